"""The cache of a model with `remember`: window, passages, fast weights and list of each row, as plain tensors.

Shapes: R rows, C tokens of a chunk.
"""

import copy
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from . import files, passages
from .columns import CallColumns
from .parts import memory_of
from .titans_layer import TitansLayer, is_titans
from .window import KeyValueLayer, StateLayer, make_layers


class MemoryCache(Cache):
    """The cache of a model with `remember`: its memory of the texts that it reads. Use it as any cache of Transformers.

        cache = MemoryCache(model)
        model(ids, cache=cache)                # reads on
        model.generate(ids, cache=cache)
        branch = copy.copy(cache)              # shares all tensors: none is changed in place

    layers: keys and values of the window, states of recurrent layers. seen (R,) int64, on the CPU: tokens that each row
    has read. steps (R,) int64, on the CPU: chunks whose step was taken or left out. state: other tensors with rows by
    name: "B.*" of the fast weights, "list.*", "passages.ids" (R, N), the text, and "chunk.ids" (R, C) and
    "chunk.learns" (R, C), on the CPU, the last C tokens.
    num_columns: columns that were read, padding included; `crop` may remove them from first_removable on.
    first_of_call: in a call with recalls, the columns before it. unread: the last columns, which are to be read again
    after `crop`, or were read only in the branch.
    branch: the cache that sees the passages, see `recall`; since_recall (R,) int64: columns read since a row's recall,
    -1 for a row without one beside rows that have one; None without a recall. recalled: the rows (F,) and passages
    (F, S) of each recall since the last `generate()` began.

    Raises ValueError for a model without `remember`.
    """

    def __init__(self, model: PreTrainedModel):
        self.memory = memory_of(model)
        self.seen = self.steps = torch.zeros(0, dtype=torch.int64)
        self.state: dict[str, Tensor] = {}
        self.sinks: dict[int, list] = {}  # by block of positions, see `reading.sink_of`
        self.num_columns = self.first_column = self.first_removable = 0
        self.first_of_call: int | None = None
        self.recorded: list[Recorded] | None = None
        self.unread: CallColumns | None = None
        self.branch: MemoryCache | None = None
        self.since_recall: Tensor | None = None
        self.recalled: list[tuple[Tensor, Tensor]] = []
        self.prompt_end: int | None = None  # in `generate()`: columns of the prompt, by `get_seq_length`; 0 after it
        self.about: dict[str, Any] = {}  # any JSON, saved with the memory
        self.seen_in_folders: dict[Path, dict | None] = {}  # see `cache_files.write_memory`
        if is_titans(model):
            layers = [TitansLayer(layer.mixer) for layer in model.base_model.layers]
        else:
            layers = make_layers(model, self.memory.window, self.memory.extra_columns)
        super().__init__(layers=layers)

    def begin(self, model: PreTrainedModel, rows: int, device: torch.device) -> None:
        """Makes the state of `rows` rows that have read nothing, unless there is one.

        Raises ValueError for another number of rows than before, and for another model's cache.
        """
        if self.memory is not model.memory:
            raise ValueError("`cache` must belong to this model: create it by `MemoryCache(model)`.")
        if not len(self.seen):
            self.seen = self.steps = torch.zeros(rows, dtype=torch.int64)
            self.state, self.device = self.memory.initial_state(model, rows, device), device
            self._clear_layers()
            self.restart_recording()
        elif len(self.seen) != rows:
            raise ValueError(f"`input_ids` must have the {len(self.seen)} rows of `cache`, got {rows}.")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Restores the cache if the block raises an error."""
        before = copy.copy(self)
        layers = [(x, y) for x, y in zip(self.layers, before.layers, strict=True) if isinstance(x, KeyValueLayer)]
        for layer, kept in layers:
            layer.before = kept
        try:
            yield
        except BaseException:
            self.__dict__.update(before.__dict__)
            raise
        finally:
            for layer, _ in layers:
                layer.before = None

    @property
    def num_tokens_seen(self) -> Tensor:
        """Tokens that each row has read (R,)."""
        return self.seen if self.unread is None else self.seen + self.unread.real.sum(1)

    @property
    def batch_size(self) -> int:
        return len(self.seen) or -1

    def start_prompt(self, num_read: int = 0) -> None:
        """Lets `generate()` expect a prompt that begins with the last `num_read` tokens read. With 0, the prompt has
        only the tokens to read next.
        """
        if num_read > self.num_columns:
            self.num_columns = num_read
            self.restart_recording()
        self.first_column = self.num_columns - num_read

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of columns read since the last `start_prompt`."""
        return self.num_columns - self.first_column

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return self.recorded is not None

    def num_bytes(self) -> dict[str, int]:
        """Returns the bytes of the state by part: "keys and values" of the window and states of recurrent layers, with
        those that see a passage, "fast_weights", and by their names other parts, such as "passages" (token ids).
        """
        found: dict[int, Tensor] = {}  # keys, values and states, each once
        for layer in [*self.layers, *(() if self.branch is None else self.branch.layers)]:
            if hasattr(layer, "map"):
                layer.map(lambda x: found.setdefault(id(x), x))
        parts = {"keys and values": sum(x.numel() * x.element_size() for x in found.values())}
        for name, x in self.state.items():
            part = name.partition(".")[0]
            part = "fast_weights" if part in ("B", "start") else part
            parts[part] = parts.get(part, 0) + x.numel() * x.element_size()
        return parts

    def __repr__(self) -> str:
        facts = [f"tokens read {self.num_tokens_seen.tolist()}"]
        if norms := [x.flatten(1).square().sum(1) for name, x in self.state.items() if name.startswith("B.")]:
            facts.append(f"|fast weights| {[round(x, 3) for x in torch.stack(norms).sum(0).sqrt().tolist()]}")
        if (tokens := self.state.get("list.tokens")) is not None:
            facts.append(f"list entries {(tokens >= 0).sum(1).tolist()}")
        sizes = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in self.num_bytes().items())
        return f"MemoryCache({', '.join(facts)}; {sizes})"

    def __deepcopy__(self, memo: dict) -> "MemoryCache":
        new = self.map(torch.clone)
        new.memory = memo.get(id(self.memory), self.memory)  # of the model that is copied with it
        for layer in new.layers:
            if isinstance(layer, TitansLayer):
                layer.module = memo.get(id(layer.module), layer.module)
        new.branch = copy.deepcopy(self.branch, memo)
        new.recorded = None if self.recorded is None else list(self.recorded)
        return new

    def save_pretrained(
        self, folder: str | os.PathLike, model: PreTrainedModel, *, model_fingerprint: dict | None = None
    ) -> None:
        """Saves the memory in a folder, atomically. See `files.save`."""
        plain = copy.copy(self)
        plain.read_unread(model)
        plain._drop_empty_columns()
        files.save(plain, folder, model_fingerprint or files.memory_fingerprint(model))
        self.seen_in_folders = plain.seen_in_folders

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike, model: PreTrainedModel, *, model_fingerprint: dict | None = None
    ) -> "MemoryCache":
        """Loads the memory of a folder for the model that wrote it. See `files.load`."""
        return files.load(cls(model), folder, model, model_fingerprint or files.memory_fingerprint(model))

    def map(self, function: Callable[[Tensor], Tensor]) -> "MemoryCache":
        """Returns a copy with `function` of each tensor that has a row dimension."""
        new = copy.copy(self)
        with torch.inference_mode(False):  # tensors of inference_mode could not be part of a later step's graph
            new.layers = [layer.map(function) if hasattr(layer, "map") else layer for layer in self.layers]
            new.seen, new.steps = function(self.seen), function(self.steps)
            new.state = {name: function(x) for name, x in self.state.items()}
            for name in ("unread", "branch"):
                setattr(new, name, None if (x := getattr(self, name)) is None else x.map(function))
            new.since_recall = None if self.since_recall is None else function(self.since_recall)
        return new

    def __copy__(self) -> "MemoryCache":
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.layers = [layer.map(lambda x: x) if hasattr(layer, "map") else layer for layer in self.layers]
        new.state, new.about = dict(self.state), copy.deepcopy(self.about)
        new.seen_in_folders = dict(self.seen_in_folders)
        new.recorded = None if self.recorded is None else list(self.recorded)
        new.branch, new.recalled = copy.copy(self.branch), list(self.recalled)
        return new

    def as_branch(self) -> "MemoryCache":
        """Returns a copy that may see passages: without the text's ids, and without columns to be read again."""
        new = copy.copy(self)
        new.unread = new.branch = new.since_recall = new.recorded = None
        new.state.pop(passages.NAME, None)
        return new

    def end_recall(self) -> None:
        """Lets the text go on without passages in sight, also where it is cropped."""
        self.branch = self.since_recall = None
        plain = lambda x: x._replace(recalls=torch.zeros_like(x.recalls))  # noqa: E731
        self.unread = None if self.unread is None else plain(self.unread)
        for i, x in enumerate(self.recorded or ()):
            self.recorded[i] = x._replace(columns=plain(x.columns), recalls=torch.zeros_like(x.recalls))

    def take(self, rows: Tensor) -> "MemoryCache":
        """Returns the cache of some rows (I,) int64."""
        new = self.map(lambda x: x.index_select(0, rows.to(x.device)))
        new.recorded = None
        new._drop_empty_columns()
        return new

    def _drop_empty_columns(self) -> None:
        most = max(self.seen.tolist(), default=0)
        if (store := self.state.get(passages.NAME)) is not None:
            self.state[passages.NAME] = store[:, max(0, store.shape[1] - most) :]
        if self.branch is not None:
            self.branch._drop_empty_columns()
        for layer in self.layers:
            if isinstance(layer, KeyValueLayer):
                layer.last_columns(most)
            if isinstance(layer, StateLayer) and not most:
                layer.forget_empty_rows()

    def put(self, rows: Tensor, other: "MemoryCache") -> None:
        """Replaces some rows (I,) int64 by the rows of another cache."""
        for own, new in zip(self.layers, other.layers, strict=True):
            if hasattr(own, "put"):
                own.put(rows, new, len(self.seen))
        self.seen = self.seen.index_copy(0, rows, other.seen)
        self.steps = self.steps.index_copy(0, rows, other.steps)
        self.put_state(rows, other.state)

    def put_state(self, rows: Tensor, state: dict[str, Tensor]) -> None:
        """Replaces some rows (I,) int64 of the tensors of `state`."""
        old, new = self.state, dict(state)
        if passages.NAME in old:
            old, new = passages.of_one_width(old, new)
        self.state = {name: x.index_copy(0, rows.to(x.device), new[name].to(x)) for name, x in old.items()}

    def append_rows(self, other: "MemoryCache") -> None:
        """Appends the rows of another cache of the same model. Both must have read something. A cache that records can
        be cropped from here on. If only one of the caches sees passages, the other's rows go on in its branch, without
        a passage.

        Raises ValueError in a recall that `crop` has to make again, and for another model's or an empty cache.
        """
        if other.memory is not self.memory or not len(self.seen) or not len(other.seen):
            raise ValueError("`other` must be a cache of the same model, and both must have read something.")
        other = copy.copy(other)  # it may be this cache
        number, both = len(other.seen), (self, other)
        since, branches = [x.since_recall for x in both], [x.branch for x in both]
        if any(x is not None and y is None for x, y in zip(since, branches, strict=True)):
            raise ValueError("`append_rows` after `crop` in a recall: read a token before.")
        if any(x is not None for x in since):
            since = [torch.full_like(x.seen, -1) if y is None else y for x, y in zip(both, since, strict=True)]
            branches = [x.as_branch() if x.branch is None else copy.copy(x.branch) for x in both]
            branches[0].append_rows(branches[1])
        unread = [CallColumns.none(len(x.seen)) if x.unread is None else x.unread for x in both]
        self.unread = self.branch = self.since_recall = None
        self._become(lambda x: torch.cat([x, x[:1].expand(number, *x.shape[1:])]))
        self.put(torch.arange(len(self.seen) - number, len(self.seen)), other)
        self.sinks = self.sinks | other.sinks
        most = max(x.ids.shape[1] for x in unread)
        if most:  # the shorter of the two has padding in front
            padded = (x.map(lambda y: pad(y.to(self.device), (most - y.shape[1], 0))) for x in unread)
            self.unread = CallColumns(*map(torch.cat, zip(*padded, strict=True)))
        if branches[0] is not None:
            self.branch, self.since_recall = branches[0], torch.cat(since)
        self.restart_recording()

    def reset_rows(self, model: PreTrainedModel, rows: Tensor) -> None:
        """Lets some rows (I,) int64 begin a new text with an empty memory. Beside rows that see a passage they see
        none, and learn when the recall ends. A cache that records can be cropped from here on.
        """
        if len(self.seen):
            self.clear_rows(model, rows)
            if self.branch is not None:
                self.branch.clear_rows(model, rows)
            if self.unread is not None:
                self.unread = self.unread._replace(real=self.unread.real.index_fill(0, rows, False))
            self.restart_recording()

    def clear_rows(self, model: PreTrainedModel, rows: Tensor) -> None:
        """Empties the memory of some rows (I,) int64, but for columns to be read again."""
        new = self.take(rows)
        new.seen = new.steps = torch.zeros(len(rows), dtype=torch.int64)
        new.state = self.memory.initial_state(model, len(rows), self.device)
        new._clear_layers()
        self.put(rows, new)
        self._drop_empty_columns()

    def note_unread(self, columns: CallColumns) -> None:
        """Notes columns that were read only in the branch."""
        self.unread = columns if self.unread is None else self.unread.join(columns)
        self.num_columns += columns.ids.shape[1]
        since = self.since_recall
        self.since_recall = torch.where(since < 0, since, since + columns.ids.shape[1])
        if self.recorded is not None:
            last = self.recorded[-1]
            self.recorded[-1] = last._replace(columns=last.columns.join(columns))

    def take_unread(self, begin: int = 0) -> CallColumns:
        """Takes the unread columns from `begin` on out of the cache, and returns them."""
        unread = CallColumns.none(len(self.seen)) if self.unread is None else self.unread
        taken = unread.at(begin, unread.ids.shape[1])
        number = taken.ids.shape[1]
        self.unread, self.num_columns = unread.at(0, begin) if begin else None, self.num_columns - number
        if self.recorded and number:  # they are recorded again
            last = self.recorded[-1]
            self.recorded[-1] = last._replace(columns=last.columns.at(0, last.columns.ids.shape[1] - number))
        return taken

    def note_recall(self, rows: Tensor) -> None:
        """Notes, for `crop`, that rows (I,) int64 recall after the last column that was recorded; where it was not read
        plainly, because other rows go on in the branch, before the first.
        """
        if self.recorded:
            last, columns = self.recorded[-1], self.recorded[-1].columns
            if self.unread is None and columns.ids.shape[1]:
                recalls = torch.cat([columns.recalls[:, :-1], columns.recalls[:, -1:].index_fill(0, rows, True)], 1)
                self.recorded[-1] = last._replace(columns=columns._replace(recalls=recalls))
            else:
                self.recorded[-1] = last._replace(recalls=last.recalls.index_fill(0, rows, True))

    def read_unread(self, model: PreTrainedModel) -> None:
        """Ends a recall, and reads the columns that are to be read again."""
        self.end_recall()
        if self.unread is not None:
            with torch.no_grad():
                model(input_ids=self.unread.ids[:, :0], cache=self)

    def _clear_layers(self) -> None:
        for layer in self.layers:
            if hasattr(layer, "clear"):
                layer.clear(len(self.seen))

    def reset(self) -> None:
        """Forgets everything that was read."""
        self.seen = self.steps = torch.zeros(0, dtype=torch.int64)
        self.state, self.unread, self.num_columns, self.first_column = {}, None, 0, 0
        self.recalled = []
        self.end_recall()
        self.recorded = None if self.recorded is None else []
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.forget_empty_rows()
            elif isinstance(layer, KeyValueLayer):
                layer.keys = layer.values = None
                layer.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Puts the rows (R,) int64 in another order, as beam search asks."""
        self._become(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows (I,) int64."""
        self.reorder_cache(indices)
        self._drop_empty_columns()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        self._become(lambda x: x.repeat_interleave(repeats, 0))

    def _become(self, function: Callable[[Tensor], Tensor]) -> None:
        """Applies a function of rows to everything, recorded caches too. A cache that has read nothing has no rows."""
        if not len(self.seen):
            return
        recorded = self.recorded
        self.__dict__.update(self.map(function).__dict__)
        if recorded is not None:
            parts = [(x.cache.map(function), x.columns.map(function), function(x.recalls)) for x in recorded]
            self.recorded = [Recorded(*x) for x in parts]

    def activate_past_recording(self) -> None:
        """Lets `crop` remove columns from here on: the state at the starts of the last chunks is kept."""
        if self.recorded is None:
            self.recorded = []
            self.restart_recording()

    def restart_recording(self) -> None:
        if self.recorded is not None:
            self.recorded, self.first_removable = [], self.num_columns
            if len(self.seen):
                columns = CallColumns.none(len(self.seen)) if self.unread is None else self.unread
                since = torch.full_like(self.seen, -1) if self.since_recall is None else self.since_recall
                self._note_state(columns, since >= 0)

    def _note_state(self, columns: CallColumns, recalls: Tensor) -> None:
        before = copy.copy(self)
        before.num_columns -= 0 if self.unread is None else self.unread.ids.shape[1]
        before.recorded = before.unread = None
        before.end_recall()
        self.recorded.append(Recorded(before, columns, recalls))

    @property
    def is_ahead(self) -> bool:
        """Whether a row has learned its next token already, as the last label of a chunk."""
        chunk = self.memory.chunk
        full = (self.seen > 0) & (self.seen % chunk == 0) & (self.steps == self.seen // chunk)
        return self.memory.fast_weights is not None and bool(full.any())

    def record(self, columns: CallColumns, first: int, notes_state: bool) -> None:
        """Notes columns that were read by a reading that began at the column `first`. With `notes_state` it notes the
        state after them too, if a chunk was read since the last one noted and no row is ahead.
        """
        if self.recorded is None:
            return
        last, chunk = self.recorded[-1], self.memory.chunk
        self.recorded[-1] = last._replace(columns=last.columns.join(columns))
        if notes_state and self.num_columns - last.cache.num_columns >= chunk and not self.is_ahead:
            self._note_state(CallColumns.none(len(self.seen)), torch.zeros(len(self.seen), dtype=torch.bool))
        needed = min(first, first if self.first_of_call is None else self.first_of_call, self.num_columns - 2 * chunk)
        while len(self.recorded) > 2 and self.recorded[1].cache.num_columns <= self._last_recall(needed, needed):
            del self.recorded[0]

    def _last_recall(self, end: int, default: int | None) -> int | None:
        """Returns after which of the recorded columns before `end` rows last recalled."""
        points = [x.cache.num_columns for x in self.recorded if bool(x.recalls.any())]
        for x in self.recorded:
            points += (x.cache.num_columns + 1 + x.columns.recalls.any(0).nonzero()[:, 0]).tolist()
        return max((x for x in points if x <= end), default=default)

    @property
    def num_removable(self) -> int:
        """The columns that `crop` may remove."""
        first = max(self.recorded[0].cache.num_columns, self.first_removable) if self.recorded else self.num_columns
        return self.num_columns - first

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last columns: -n removes n, as in Transformers.

        Raises ValueError without `activate_past_recording`, and for more columns than were recorded. At least the
        columns since the start of the last full chunk are recorded, and those of the last call; where a part of the
        rows recalled, those since then.
        """
        number = abs(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(f"`tokens_to_remove` must be 0 or negative, got {tokens_to_remove}.")
        if not number:
            return
        if self.recorded is None:
            raise ValueError(
                "`crop` needs a cache that records: call `cache.activate_past_recording()` before reading."
            )
        end = self.num_columns - number
        most = self.num_removable
        if number > most:
            raise ValueError(f"`tokens_to_remove` must be at least -{most}, by the recorded columns, got {-number}.")
        fitting = [i for i, x in enumerate(self.recorded) if x.cache.num_columns <= end]
        first = self.recorded[0].cache.num_columns
        columns = functools.reduce(CallColumns.join, (x.columns for x in self.recorded)).at(0, end - first)
        recall = self._last_recall(end, None)  # it is made again, from before it
        states = [self.recorded[i].recalls for i in fitting]
        sees = torch.stack([columns.recalls.any(1), *states]).any(0)
        fitting = [i for i in fitting if recall is None or self.recorded[i].cache.num_columns <= recall]
        recorded = self.recorded[: fitting[-1] + 1]
        kept = recorded[-1].cache
        columns = columns.at(kept.num_columns - first, end - first)
        names = "memory first_column first_removable first_of_call about seen_in_folders recalled prompt_end".split()
        own = {name: getattr(self, name) for name in names}
        self.__dict__.update(copy.copy(kept).__dict__ | own)
        self.recorded = [*recorded[:-1], recorded[-1]._replace(columns=columns)]
        self.num_columns, self.unread = end, columns if columns.ids.shape[1] else None
        self.since_recall = None if recall is None else torch.where(sees, end - recall, -1)


class Recorded(NamedTuple):
    """A cache as it was, the columns that were read, or are to be read again, from there to the next one, and recalls
    (R,) bool, which rows recall there.
    """

    cache: MemoryCache
    columns: CallColumns
    recalls: Tensor
