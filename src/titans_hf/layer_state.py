"""The state of a decoder layer between calls, and the record from which a crop restores an earlier state.

States are never changed in place, but are not frozen either: Transformers' exporters set the fields of a copy.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .memory_state import MemoryState
from .token_grid import Columns


@dataclass
class KeyValueCache:
    """Keys and values of attention, (B, N, h, D) each: of the persistent tokens, then in MAG and MAL of the last W - 1
    tokens (not rotated; N = P + W - 1), in MAC of the recalled tokens h and of the segment (rotated; N = P + 2 L).
    """

    keys: Tensor
    values: Tensor

    def map(self, fn: Callable[..., Tensor], *others: "KeyValueCache") -> "KeyValueCache":
        """Applies `fn` to keys and values, with those of `others` as further arguments."""
        caches = (self, *others)
        return KeyValueCache(fn(*(cache.keys for cache in caches)), fn(*(cache.values for cache in caches)))


@dataclass
class LayerState:
    """All that a decoder layer needs to continue a sequence; the first dimension of every tensor is the batch.

    memory: weights, momentum, anchor and number of tokens (`MemoryState`).
    conv_state: (B, kernel - 1, 3 * hidden), the last inputs of the memory's convolutions; of the token memory
    (B, 1, hidden), the last hidden state.
    kv_cache: None in LMM.
    segment_weights: in MAC, the memory's weights at the start of the current segment. Empty if they are the memory's
    anchor.
    """

    memory: MemoryState
    conv_state: Tensor
    kv_cache: KeyValueCache | None = None
    segment_weights: tuple[Tensor, ...] = ()

    def map(self, fn: Callable[..., Tensor], *others: "LayerState") -> "LayerState":
        """Applies `fn` to every tensor, with the tensors of `others` as further arguments."""
        states = (self, *others)
        return LayerState(
            self.memory.map(fn, *(state.memory for state in others)),
            fn(*(state.conv_state for state in states)),
            None if self.kv_cache is None else self.kv_cache.map(fn, *(state.kv_cache for state in others)),
            tuple(map(fn, *(state.segment_weights for state in states))),
        )

    def merged(self, other: "LayerState", weight: float) -> "LayerState":
        """Returns the state with the memory (1 - weight) * self + weight * other; all else as in this state."""

        def interpolate(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(torch.lerp(x, y.to(x).expand_as(x), weight) for x, y in zip(ours, theirs, strict=True))

        memory = MemoryState(
            interpolate(self.memory.weights, other.memory.weights),
            interpolate(self.memory.momentum, other.memory.momentum),
            interpolate(self.memory.anchor, other.memory.anchor),
            self.memory.num_seen,
        )
        segment_weights = interpolate(self.segment_weights, other.segment_weights)
        return replace(self, memory=memory, segment_weights=segment_weights)

    def tensors(self) -> list[Tensor]:
        """Returns all tensors."""
        return [x for _, x in named_tensors(self)]

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> "LayerState":
        """Returns the state whose `named_tensors` are the leaves of `tree` (see `as_tree`)."""
        memory = tree["memory"]
        layers = (_in_order(memory.get(part, {})) for part in ("weights", "momentum", "anchor"))
        return cls(
            MemoryState(*layers, memory["num_seen"]),
            tree["conv_state"],
            KeyValueCache(**tree["kv_cache"]) if "kv_cache" in tree else None,
            _in_order(tree.get("segment_weights", {})),
        )


@dataclass
class RecordedColumns:
    """Columns that a crop may remove: the state before them, and what the layer needs to read them again.

    state: None before the first token. inputs: (B, T, input size), of the mixer. mask, document_starts: (B, T) bool, as
    in `Columns`. restart: (B,) bool, True in rows that were reset before the first column; None if none was.
    """

    state: LayerState | None
    inputs: Tensor
    mask: Tensor
    document_starts: Tensor
    restart: Tensor | None = None

    @property
    def num_columns(self) -> int:
        """T, the number of recorded columns."""
        return self.inputs.shape[1]

    @property
    def columns(self) -> Columns:
        """Mask and document starts of the columns."""
        return Columns(self.mask, self.document_starts)

    def append(self, inputs: Tensor, columns: Columns) -> "RecordedColumns":
        """Returns the record with the columns of one more call."""
        shape, device = inputs.shape[:2], inputs.device
        mask, starts = columns.mask, columns.document_starts
        mask = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask
        starts = torch.zeros(shape, dtype=torch.bool, device=device) if starts is None else starts
        return replace(
            self,
            inputs=torch.cat([self.inputs, inputs], dim=1),
            mask=torch.cat([self.mask, mask], dim=1),
            document_starts=torch.cat([self.document_starts, starts], dim=1),
        )

    @classmethod
    def empty(cls, state: LayerState | None, inputs: Tensor, restart: Tensor | None) -> "RecordedColumns":
        """Returns a record without columns, for inputs with the batch size, dtype and device of `inputs`."""
        no_columns = torch.zeros(inputs.shape[0], 0, dtype=torch.bool, device=inputs.device)
        return cls(state, inputs[:, :0], no_columns, no_columns, restart)

    def first(self, num_columns: int) -> "RecordedColumns":
        """Returns the record of the first `num_columns` columns."""
        return replace(
            self,
            inputs=self.inputs[:, :num_columns],
            mask=self.mask[:, :num_columns],
            document_starts=self.document_starts[:, :num_columns],
        )

    def map(self, fn: Callable[[Tensor], Tensor]) -> "RecordedColumns":
        """Applies `fn` to every tensor."""
        state = None if self.state is None else self.state.map(fn)
        restart = None if self.restart is None else fn(self.restart)
        return RecordedColumns(state, fn(self.inputs), fn(self.mask), fn(self.document_starts), restart)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> "RecordedColumns":
        """Returns the record whose `named_tensors` are the leaves of `tree` (see `as_tree`)."""
        state = LayerState.from_tree(tree["state"]) if "state" in tree else None
        return cls(state, tree["inputs"], tree["mask"], tree["document_starts"], tree.get("restart"))


def named_tensors(part: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a state, a record or a tuple of them, each with its path, as "memory.weights.0"."""
    if isinstance(part, Tensor):
        yield path, part
    elif part is not None:
        names = getattr(type(part), "__match_args__", None)  # the fields of a dataclass
        values = part if names is None else [getattr(part, name) for name in names]
        for name, value in zip(range(len(part)) if names is None else names, values, strict=True):
            yield from named_tensors(value, f"{path}.{name}" if path else str(name))


def as_tree(named: dict[str, Any]) -> dict[str, Any]:
    """Nests dictionaries by the parts of their keys: {"a.b": x} -> {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, x in named.items():
        *parents, name = path.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[name] = x
    return tree


def _in_order(tree: dict[str, Any]) -> tuple[Tensor, ...]:
    """Returns the tensors of {"0": x, "1": y, ...} in the order of their numbers."""
    return tuple(tree[str(i)] for i in range(len(tree)))
