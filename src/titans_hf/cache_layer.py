"""The cache of one decoder layer: its state, the record from which a crop restores an earlier state, batch operations.

States are never changed in place, but are not frozen either: Transformers' exporters set the fields of a copy.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .memory_state import MemoryState, map_tensors, named_tensors, shapes_of, where_rows
from .token_grid import Columns, pad_before

LEARNED = ("weights", "momentum", "anchor")  # the parts of a `MemoryState` that change while reading


@dataclass
class KeyValueCache:
    """Keys and values of attention, (B, N, h, D) each: in MAG and MAL the parts of a `WindowCache`, in MAC the keys
    and values of the persistent tokens, the recalled tokens h and the segment (N = P + 2 L). All but persistent keys
    are rotated.
    """

    keys: Tensor
    values: Tensor

    def map(self, fn: Callable[..., Tensor], *others: "KeyValueCache") -> "KeyValueCache":
        """Applies `fn` to keys and values, with the keys and values of `others` as further arguments."""
        return map_tensors(fn, self, *others)


@dataclass
class WindowCache:
    """Keys and values of sliding-window attention: of the P persistent tokens, and of the last N <= W - 1 tokens. A row
    that has read fewer than N tokens has zeros before them.
    """

    persistent: KeyValueCache
    window: KeyValueCache

    def map(self, fn: Callable[[Tensor], Tensor]) -> "WindowCache":
        """Applies `fn` to all keys and values."""
        return map_tensors(fn, self)

    def with_length(self, length: int) -> "WindowCache":
        """Returns the cache with room for `length` >= N tokens."""
        return replace(self, window=self.window.map(lambda x: pad_before(x, length - x.shape[1])))


@dataclass
class LayerState:
    """All that a decoder layer needs to continue a sequence; the first dimension of every tensor is the batch.

    memory: weights, momentum, anchor and number of tokens (`MemoryState`).
    conv_state: (B, kernel - 1, 3 * hidden), the last inputs of the memory's convolutions.
    kv_cache: None in LMM, a `WindowCache` in MAG and MAL.
    segment_weights: in MAC, the memory's weights at the start of the current segment. Empty if they are the memory's
    anchor.
    """

    memory: MemoryState
    conv_state: Tensor
    kv_cache: KeyValueCache | WindowCache | None = None
    segment_weights: tuple[Tensor, ...] = ()

    __repr__ = shapes_of

    def map(self, fn: Callable[..., Tensor], *others: "LayerState") -> "LayerState":
        """Applies `fn` to every tensor, with the tensors of `others` as further arguments."""
        return map_tensors(fn, self, *others)

    def where_rows(self, rows: Tensor, other: "LayerState") -> "LayerState":
        """Returns a state with this state's rows where `rows` (B,) bool is True, and the rows of `other` elsewhere."""
        return map_tensors(partial(where_rows, rows), *self._of_equal_length(other))

    def joined(self, other: "LayerState") -> "LayerState":
        """Returns a state with the rows of this state, then the rows of `other`."""
        return map_tensors(lambda *rows: torch.cat(rows), *self._of_equal_length(other))

    def _of_equal_length(self, other: "LayerState") -> "list[LayerState]":
        """Returns both states with windows of the same length."""
        ours, theirs = self.kv_cache, other.kv_cache
        if isinstance(ours, WindowCache) and isinstance(theirs, WindowCache):
            length = max(x.window.keys.shape[1] for x in (ours, theirs))
            ours, theirs = ours.with_length(length), theirs.with_length(length)
        return [replace(self, kv_cache=ours), replace(other, kv_cache=theirs)]

    def merged(self, other: "LayerState", weight: float) -> "LayerState":
        """Returns the state with the memory (1 - weight) * self + weight * other; its other parts are this state's."""

        def interpolate(ours: Tensor, theirs: Tensor) -> Tensor:
            return torch.lerp(ours, theirs.to(ours).expand_as(ours), weight)

        parts = {x: map_tensors(interpolate, getattr(self.memory, x), getattr(other.memory, x)) for x in LEARNED}
        segment_weights = map_tensors(interpolate, self.segment_weights, other.segment_weights)
        return replace(self, memory=replace(self.memory, **parts), segment_weights=segment_weights)


@dataclass
class RecordedColumns:
    """What is kept to undo recent columns: the layer's state before them, and their inputs.

    state: None before the first token. inputs: (B, T, hidden), the mixer's inputs. mask, document_starts: (B, T)
    bool, as in `Columns`. restart: (B,) bool, True in rows that were reset before the first column; None if no row was.
    learned: (B, T) bool, False at columns read with learning off, the same in every row; None if there are none.
    """

    state: LayerState | None
    inputs: Tensor
    mask: Tensor
    document_starts: Tensor
    restart: Tensor | None = None
    learned: Tensor | None = None

    @property
    def num_columns(self) -> int:
        """T, the number of recorded columns."""
        return self.inputs.shape[1]

    @property
    def columns(self) -> Columns:
        """Mask and document starts of the columns, and whether all of them were learned."""
        return Columns(self.mask, self.document_starts, self.learned is None)

    def append(self, inputs: Tensor, columns: Columns) -> "RecordedColumns":
        """Returns the record with the columns of one more call."""
        shape, device = inputs.shape[:2], inputs.device
        mask, starts = columns.mask, columns.document_starts
        mask = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask
        starts = torch.zeros(shape, dtype=torch.bool, device=device) if starts is None else starts
        learned = self.learned
        if learned is not None or not columns.learns:
            before = torch.ones_like(self.mask) if learned is None else learned
            learned = torch.cat([before, torch.full_like(starts, columns.learns)], dim=1)
        return replace(
            self,
            inputs=torch.cat([self.inputs, inputs], dim=1),
            mask=torch.cat([self.mask, mask], dim=1),
            document_starts=torch.cat([self.document_starts, starts], dim=1),
            learned=learned,
        )

    @classmethod
    def empty(cls, state: LayerState | None, inputs: Tensor, restart: Tensor | None) -> "RecordedColumns":
        """Returns a record without columns, for inputs with the batch size, dtype and device of `inputs`."""
        no_columns = torch.zeros(inputs.shape[0], 0, dtype=torch.bool, device=inputs.device)
        return cls(state, inputs[:, :0], no_columns, no_columns, restart)

    def runs(self) -> "list[RecordedColumns]":
        """Splits the record into runs of columns read with learning on, or off (`columns.learns`)."""
        if self.learned is None:
            return [self]
        learned = self.learned[0].tolist()
        at = [0, *(i for i in range(1, len(learned)) if learned[i] != learned[i - 1]), len(learned)]
        runs = [self.part(*bounds) for bounds in itertools.pairwise(at)]
        return [replace(x, learned=None) if learned[begin] else x for x, begin in zip(runs, at, strict=False)]

    def part(self, begin: int, end: int) -> "RecordedColumns":
        """Returns the record of the columns from begin to end."""
        names = ("inputs", "mask", "document_starts", "learned")
        return replace(self, **{name: x[:, begin:end] for name in names if (x := getattr(self, name)) is not None})


class TitansCacheLayer(CacheLayerMixin):
    """The `LayerState` of one layer; None before the first token.

    States are replaced, never modified in place: earlier states, and the graph of a training step, stay intact.

    num_columns: number of columns read; in a compileable layer a 0-d tensor, because a Python number would trigger a
    recompilation whenever it changes.
    recorded: with `record_past`, the columns read since the last `crop`.
    to_reread: after `crop(-k)`, the recorded columns that were not removed. `state` is then the state before them, and
    the next call reads them again before its own tokens.
    restart: (B,) bool, True in rows that have been reset: their state is zeros, and their next column starts a new
    document, from the learned initial state.
    """

    # A crop reads the kept columns again, because an update cannot be inverted without rounding.

    is_sliding = False
    is_croppable = True

    def __init__(self, compileable: bool = False):
        super().__init__()
        self.is_compileable = compileable
        self.state: LayerState | None = None
        self.num_columns: int | Tensor = 0
        self.set_num_columns(0)
        self.record_past = False
        self.recorded: RecordedColumns | None = None
        self.to_reread: RecordedColumns | None = None
        self.restart: Tensor | None = None

    def state_before_call(self) -> tuple[LayerState | None, list[RecordedColumns]]:
        """Returns the state from which a call continues (None before the first token), and the `runs` of the columns
        kept by a crop, which the call reads again before its own.
        """
        return self.state, [] if self.to_reread is None else self.to_reread.runs()

    def finish_call(self, before: LayerState | None, after: LayerState, inputs: Tensor, columns: Columns) -> None:
        """Stores the state after a call that read `inputs` (B, T, hidden) from the state `before`."""
        if self.record_past:
            empty = RecordedColumns.empty(before, inputs, self.restart)
            recorded = empty if self.recorded is None else self.recorded
            self.recorded = recorded.append(inputs, columns)
        self.state, self.to_reread, self.restart = after, None, None
        if isinstance(self.num_columns, Tensor) and not self.is_initialized:
            self.num_columns = self.num_columns.to(inputs.device)
        self.num_columns = self.num_columns + inputs.shape[1]
        self.is_initialized: bool = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("A TitansCache stores layer states, not keys and values: use it with a Titans model.")

    lazy_initialization = update

    def set_num_columns(self, number: int) -> None:
        """Sets the number of columns read, as a tensor if the layer is compileable."""
        self.num_columns = torch.tensor(number) if self.is_compileable else number

    def get_seq_length(self) -> int | Tensor:
        return self.num_columns

    def get_mask_sizes(self, query_length: int) -> tuple[int | Tensor, int]:
        return self.num_columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first token."""
        if self.state is not None:
            return self.state.conv_state.shape[0]
        return -1 if self.to_reread is None else self.to_reread.inputs.shape[0]

    def tensors(self) -> list[Tensor]:
        """Returns all tensors of the layer."""
        return list(self.named_tensors().values())

    def named_tensors(self) -> dict[str, Tensor]:
        """Returns all tensors of the layer by their paths, as "state.memory.weights.0"."""
        parts = {name: getattr(self, name) for name in ("state", "recorded", "to_reread", "restart")}
        return {path: x for name, part in parts.items() for path, x in named_tensors(part, name)}

    def restore(self, take: Callable[[str, Any], Any], like: LayerState, inputs: Tensor) -> None:
        """Sets the layer to saved tensors. `take(part, form)` returns a tree of them like `form`, None if there are
        none. like: any state of this layer. inputs: any inputs of this layer; only their dtype and last dimension
        count.
        """
        form = RecordedColumns.empty(None, inputs, None)
        rows, columns = form.mask.any(1), form.mask
        self.state, self.restart = take("state", like), take("restart", rows)
        for part in ("recorded", "to_reread"):
            if (record := take(part, form)) is not None:
                extras = {"state": like, "restart": rows, "learned": columns}
                record = replace(record, **{name: take(f"{part}.{name}", x) for name, x in extras.items()})
            setattr(self, part, record)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replaces every tensor x of the layer by fn(x)."""
        for name in ("state", "recorded", "to_reread", "restart"):
            setattr(self, name, map_tensors(fn, getattr(self, name)))

    def reset(self, rows: Tensor | None = None) -> None:
        """Resets the layer, or the rows where `rows` (B,) bool is True: their next token starts from the learned
        initial memory."""
        if rows is None:
            self.state, self.recorded, self.to_reread, self.restart = (None,) * 4
            self.is_initialized = False
            self.set_num_columns(0)
        elif self.state is not None:
            rows = rows.to(self.state.conv_state.device)
            self.state = self.state.map(lambda x: where_rows(rows, torch.zeros_like(x), x))
            self.restart = rows.clone() if self.restart is None else self.restart.to(rows.device) | rows

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.apply(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.apply(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.batch_size == 1:  # a view is enough: states are never modified in place
            self.apply(lambda x: x.expand(repeats, *x.shape[1:]))
        else:
            self.apply(lambda x: x.repeat_interleave(repeats, dim=0))

    def append_rows(self, other: "TitansCacheLayer") -> None:
        """Appends the rows of another layer, with their resets."""
        unfinished = self.to_reread is not None or other.to_reread is not None
        if unfinished or self.state is None or other.state is None:
            raise RuntimeError("append_rows() must wait for the next token, as after crop(): read on first.")
        if self.restart is not None or other.restart is not None:
            counts = [state.memory.num_seen for state in (self.state, other.state)]
            none = [torch.zeros_like(x, dtype=torch.bool) for x in counts]
            given = [layer.restart for layer in (self, other)]
            self.restart = torch.cat([x if y is None else y for x, y in zip(none, given, strict=True)])
        self.state = self.state.joined(other.state)

    def activate_past_recording(self) -> None:
        """Records the columns that are read from now on, so that `crop` can remove them."""
        self.record_past = True

    def stop_past_recording(self) -> None:
        """Ends the recording. Raises RuntimeError while columns kept by a crop are to be read again."""
        if self.to_reread is not None:
            raise RuntimeError("stop_past_recording() after crop() must wait for the next token: read on first.")
        self.record_past, self.recorded = False, None

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -`tokens_to_remove` columns and empties the record; `tokens_to_remove` is at most 0.

        Raises ValueError for a positive number, and RuntimeError for columns that were not recorded: an update of the
        memory cannot be inverted.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"`tokens_to_remove` must be 0 or negative, as in crop(-3), but is {tokens_to_remove}.")
        record = self.recorded if self.to_reread is None else self.to_reread
        kept = tokens_to_remove + (0 if record is None else record.num_columns)
        if tokens_to_remove and (kept < 0 or self.num_columns < -tokens_to_remove):  # start_prompt() resets num_columns
            raise RuntimeError(
                f"crop({tokens_to_remove}) goes back beyond the {kept - tokens_to_remove} columns recorded since the "
                "last crop. Call activate_past_recording() before reading tokens that may be removed, or read with "
                "a copy (copy.copy)."
            )
        if record is not None and tokens_to_remove:
            self.state, self.to_reread = record.state, record.part(0, kept) if kept else None
            self.restart = None if kept else record.restart  # kept columns mark the restart as a document's start
            self.num_columns = self.num_columns + tokens_to_remove
            self.is_initialized = bool(self.num_columns > 0)
        self.recorded = None


__all__ = ["TitansCacheLayer"]
