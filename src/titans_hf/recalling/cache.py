"""The cache of a model with `remember`."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from . import files
from .columns import Columns
from .recording import Recording
from .rows import Rows
from .settings import memory_of
from .window import make_layers


class Passage(NamedTuple):
    """What was read again: ids (S,) int64 of a row's text, from its token number `begin` on."""

    begin: int
    ids: Tensor


class MemoryCache(Cache):
    """The cache of a model with `remember`: its memory of R texts. Use it as any cache of Transformers.

        cache = MemoryCache(model)
        model(ids, cache=cache)                # reads on
        model.generate(ids, cache=cache)
        branch = copy.copy(cache)              # shares all tensors: none is changed in place

    rows: the texts as they were read, without passages. branch: the rows that see passages, see `recall`; None without
    a recall. unread: the last columns, which `rows` has not read: they were read in the branch alone, or `crop` went
    back behind them. since_recall (R,) int64: columns read since a row's recall, -1 for a row without one beside rows
    that have one; None without a recall.
    num_columns: columns that were read, padding included. first_column: the first one of the prompt, as `generate()`
    counts. prompt_end: in `generate()`, columns of its prompt by `get_seq_length`, else None. in_answer: whether that
    prompt was read.
    recalled: for each row, the passages that were read again since `start_prompt` or `generate()`.
    about: any JSON, saved with the memory. seen_in_folders: see `cache_files.write_memory`.

    Raises ValueError for a model without `remember`.
    """

    layer_class_to_replicate, offloading = None, False

    def __init__(self, model: PreTrainedModel):
        self.memory = memory = memory_of(model)
        self.rows = Rows(make_layers(model, memory.window, memory.extra_columns), memory.passages is not None)
        self.branch: Rows | None = None
        self.unread = Columns.none(0)
        self.since_recall: Tensor | None = None
        self.recording: Recording | None = None
        self.num_columns = self.first_column = 0
        self.prompt_end: int | None = None
        self.in_answer = False
        self.recalled: list[list[Passage]] = []
        self.about: dict[str, Any] = {}
        self.seen_in_folders: dict[Path, dict | None] = {}

    @property
    def layers(self) -> list:
        return self.rows.layers

    @property
    def seen(self) -> Tensor:
        """Tokens that each row has read plainly (R,)."""
        return self.rows.seen

    @property
    def num_tokens_seen(self) -> Tensor:
        """Tokens that each row has read (R,)."""
        return self.unread.tokens_after(self.seen)

    @property
    def batch_size(self) -> int:
        return len(self.rows) or -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return self.recording is not None

    @property
    def num_removable(self) -> int:
        """The columns that `crop` may remove."""
        return 0 if self.recording is None else self.recording.num_removable

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of columns read since the last `start_prompt`."""
        return self.num_columns - self.first_column

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def begin(self, rows: int, device: torch.device) -> None:
        """Makes `rows` rows that have read nothing, unless there are some. Raises ValueError for another number."""
        if not len(self.rows):
            self.rows, self.unread = self.rows.empty(rows, device), Columns.none(rows)
            self.recalled = [[] for _ in range(rows)]
            self.restart_recording()
        elif len(self.rows) != rows:
            raise ValueError(f"`input_ids` must have the {len(self.rows)} rows of `cache`, got {rows}.")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Restores the cache if the block raises an error."""
        before = copy.copy(self)
        try:
            yield
        except BaseException:
            self.__dict__.update(before.__dict__)
            raise

    def start_prompt(self, num_read: int = 0) -> None:
        """Lets a prompt begin, by which passages are chosen: its first token is the one to read next. `generate()` then
        expects the tokens from there on; with `num_read`, also the last `num_read` that were read, and the prompt by
        which passages are chosen goes on.
        """
        if num_read > self.num_columns:
            self.num_columns = num_read
            self.restart_recording()
        self.first_column = self.num_columns - num_read
        self.recalled = [[] for _ in range(len(self.rows))]
        if not num_read:
            self.begin_prompt()

    def begin_prompt(self) -> None:
        """Lets the tokens to read next be the prompt by which passages are chosen."""
        self.rows.asked = -self.unread.real.sum(1)
        if self.recording is not None:
            self.recording.begin_prompt()

    def end_recall(self) -> None:
        """Lets the text go on without passages in sight, also where it is cropped."""
        self.branch = self.since_recall = None
        self.unread = self.unread.without_recalls()
        if self.recording is not None:
            self.recording.forget_recalls()

    def note_recall(self, rows: Tensor, branch: Rows, found: dict[int, list[Passage]]) -> None:
        """Notes that rows (I,) int64 recall after the last column, and go on in `branch`; found: the passages, by the
        number of the row in `branch`.
        """
        if self.since_recall is None or self.branch is None:
            self.since_recall = torch.full_like(self.seen, -1)
        if len(rows) == len(self.rows):
            self.branch = branch
        else:
            self.branch = self.rows.as_branch() if self.branch is None else self.branch
            self.branch.put(rows, branch)
        self.since_recall = self.since_recall.index_fill(0, rows, 0)
        for i, passages in found.items():
            row = int(rows[i])
            self.recalled[row] = [*self.recalled[row], *passages]
        if self.recording is not None:
            self.recording.note_recall(rows, is_read=not self.unread.width)

    def note_unread(self, columns: Columns) -> None:
        """Notes columns that were read only in the branch."""
        self.unread, self.num_columns = self.unread.join(columns), self.num_columns + columns.width
        self.since_recall = torch.where(self.since_recall < 0, -1, self.since_recall + columns.width)
        if self.recording is not None:
            self.recording.add(columns)

    def take_unread(self, begin: int = 0) -> Columns:
        """Takes the unread columns from `begin` on out of the cache, and returns them."""
        taken = self.unread.at(begin, self.unread.width)
        self.unread, self.num_columns = self.unread.at(0, begin), self.num_columns - taken.width
        if self.recording is not None:
            self.recording.drop(taken.width)
        return taken

    def append_rows(self, other: "MemoryCache") -> None:
        """Appends the rows of another cache of the same model. Both must have read something. A cache that records can
        be cropped from here on. If only one of the caches sees passages, the other's rows go on in its branch, without
        a passage.

        Raises ValueError for another model's or an empty cache, after `crop` in a recall, and if one cache sees
        passages and the other has columns to be read again.
        """
        if other.memory is not self.memory or not len(self.rows) or not len(other.rows):
            raise ValueError("`other` must be a cache of the same model, and both must have read something.")
        both = (self, copy.copy(other))  # it may be this cache
        if any(x.since_recall is not None for x in both):
            if any(x.branch is None and x.unread.width for x in both):
                raise ValueError(
                    "`append_rows` beside a recall: call `cache.read_unread(model)` on both caches before."
                )
            branches = [x.rows.as_branch() if x.branch is None else x.branch for x in both]
            self.branch = branches[0].join(branches[1])
            none = [torch.full_like(x.seen, -1) for x in both]
            since = [y if x.since_recall is None else x.since_recall for x, y in zip(both, none, strict=True)]
            self.since_recall = torch.cat(since)
        most = max(x.unread.width for x in both)  # the shorter of the two has padding in front
        padded = [x.unread.map(lambda y: pad(y.to(self.rows.device), (most - y.shape[1], 0))) for x in both]
        self.unread = Columns(*map(torch.cat, zip(*padded, strict=True)))
        self.unread = Columns(self.unread.ids, *(x.cpu() for x in self.unread[1:]))
        self.rows = self.rows.join(both[1].rows)
        self.recalled = [*self.recalled, *both[1].recalled]
        self.restart_recording()

    def reset_rows(self, model: PreTrainedModel, rows: Tensor) -> None:
        """Lets some rows (I,) int64 begin a new text with an empty memory. Beside rows that see a passage they see none
        until their next recall. A cache that records can be cropped from here on.
        """
        if len(self.rows):
            for state in filter(None, (self.rows, self.branch)):
                state.clear(rows)
                state.asked = state.asked.index_fill(0, rows, 0)
            self.unread = self.unread._replace(real=self.unread.real.index_fill(0, rows, False))
            self.recalled = [[] if i in rows.tolist() else x for i, x in enumerate(self.recalled)]
            self.restart_recording()

    def reset(self) -> None:
        """Forgets everything that was read."""
        self.rows = self.rows.empty(0, "cpu")
        self.num_columns, self.first_column, self.unread, self.recalled = 0, 0, Columns.none(0), []
        self.branch = self.since_recall = None
        self.restart_recording()

    def read_unread(self, model: PreTrainedModel) -> None:
        """Ends a recall, and reads the columns that are to be read again."""
        self.end_recall()
        if self.unread.width:
            with torch.no_grad():
                model(input_ids=self.unread.ids[:, :0], cache=self)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps rows (I,) int64, in this order."""
        if not len(self.rows):
            return
        rows = indices.cpu()
        self.rows, self.unread = self.rows.take(rows), self.unread.of_rows(rows)
        self.branch = None if self.branch is None else self.branch.take(rows)
        self.since_recall = None if self.since_recall is None else self.since_recall[rows]
        self.recalled = [self.recalled[i] for i in rows.tolist()]
        if self.recording is not None:
            self.recording.take(rows)

    reorder_cache = batch_select_indices  # as beam search asks

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        self.batch_select_indices(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """Lets `crop` remove columns from here on: the state at the starts of the last chunks is kept."""
        if self.recording is None:
            self.restart_recording(always=True)

    def restart_recording(self, always: bool = False) -> None:
        if always or self.recording is not None:
            since = torch.full_like(self.seen, -1) if self.since_recall is None else self.since_recall
            self.recording = Recording(self.rows, self.unread, since >= 0, self.num_columns)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last columns: -n removes n, as in Transformers.

        Raises ValueError without `activate_past_recording`, and for more columns than were recorded. At least the
        columns since the start of the last full chunk are recorded, and those of the last call; where a part of the
        rows recalled, those since then.
        """
        number = -tokens_to_remove
        if number < 0:
            raise ValueError(f"`tokens_to_remove` must be 0 or negative, got {tokens_to_remove}.")
        if number and self.recording is None:
            raise ValueError(
                "`crop` needs a cache that records: call `cache.activate_past_recording()` before reading."
            )
        if number > self.num_removable:
            most = self.num_removable
            raise ValueError(f"`tokens_to_remove` must be at least -{most}, by the recorded columns, got {-number}.")
        if number:
            self.num_columns -= number
            self.rows, self.unread, recall, sees = self.recording.crop(self.num_columns)
            self.branch, self.since_recall = None, None
            known = zip(self.recalled, self.num_tokens_seen.tolist(), strict=True)
            self.recalled = [[x for x in own if x.begin + len(x.ids) <= seen] for own, seen in known]
            if recall is not None:
                self.since_recall = torch.where(sees, self.num_columns - recall, -1)

    def num_bytes(self) -> dict[str, int]:
        """Returns the bytes of "keys and values" of the window and states of recurrent layers, with those that see a
        passage, and of the "text", token ids.
        """
        layers = [*self.rows.layers, *([] if self.branch is None else self.branch.layers)]
        held = {x.data_ptr(): x.nbytes for layer in layers if hasattr(layer, "named") for x in layer.named().values()}
        return {"keys and values": sum(held.values()), "text": 0 if self.rows.text is None else self.rows.text.nbytes}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in self.num_bytes().items())
        return f"MemoryCache(tokens read {self.num_tokens_seen.tolist()}; {sizes})"

    def __copy__(self) -> "MemoryCache":
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.rows, new.branch, new.recording = (copy.copy(x) for x in (self.rows, self.branch, self.recording))
        new.about, new.seen_in_folders = copy.deepcopy(self.about), dict(self.seen_in_folders)
        return new

    def __deepcopy__(self, memo: dict) -> "MemoryCache":
        new = copy.copy(self)
        new.memory = memo.get(id(self.memory), self.memory)  # of the model that is copied with it
        new.rows = self.rows.map(torch.clone)
        new.branch = None if self.branch is None else self.branch.map(torch.clone)
        return new

    def save_pretrained(
        self, folder: str | os.PathLike, model: PreTrainedModel, *, model_fingerprint: dict | None = None
    ) -> None:
        """Saves the memory in a folder, atomically. See `files.save`."""
        plain = copy.copy(self)
        plain.read_unread(model)
        plain.rows.trim()
        files.save(plain, folder, model_fingerprint or files.memory_fingerprint(model))
        self.seen_in_folders = plain.seen_in_folders

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike, model: PreTrainedModel, *, model_fingerprint: dict | None = None
    ) -> "MemoryCache":
        """Loads the memory of a folder for the model that wrote it. See `files.load`."""
        return files.load(cls(model), folder, model, model_fingerprint or files.memory_fingerprint(model))
