"""What a decoder layer carries between calls, and what it has to keep to take a call back."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .memory_state import MemoryState
from .token_grid import Columns


@dataclass(frozen=True)
class LayerState:
    """Everything a decoder layer needs to read on; every tensor has the batch first.

    memory: weights, momentum, chunk-start weights and tokens seen (`MemoryState`).
    conv: (B, kernel - 1, 3 * hidden), the last inputs of the memory's convolutions.
    keys, values: (B, P + W - 1, h, D) persistent tokens and window; in MAC (B, P + 2 L, h, D) persistent tokens,
    recalled memory and segment; None in LMM.
    segment_weights: MAC, the memory's weights at the start of the running segment; empty where that is the chunk's
    start.
    """

    memory: MemoryState
    conv: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    segment_weights: tuple[Tensor, ...] = ()

    def map(self, fn: Callable[..., Tensor], *others: "LayerState") -> "LayerState":
        """The state with `fn` applied to every tensor, and to those of `others` beside it."""
        states = (self, *others)
        keys_values = (
            None if getattr(self, part) is None else fn(*(getattr(state, part) for state in states))
            for part in ("keys", "values")
        )
        return LayerState(
            self.memory.map(fn, *(state.memory for state in others)),
            fn(*(state.conv for state in states)),
            *keys_values,
            tuple(map(fn, *(state.segment_weights for state in states))),
        )

    def merged(self, other: "LayerState", weight: float) -> "LayerState":
        """The state with a memory between its own and that of `other`, which stands at `weight` 1."""

        def between(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(torch.lerp(x, y.to(x).expand_as(x), weight) for x, y in zip(ours, theirs, strict=True))

        ours, theirs = self.memory, other.memory
        parts = {
            part: between(getattr(ours, part), getattr(theirs, part)) for part in ("weights", "momentum", "anchor")
        }
        segment_weights = between(self.segment_weights, other.segment_weights)
        return replace(self, memory=replace(ours, **parts), segment_weights=segment_weights)

    def tensors(self) -> list[Tensor]:
        return [x for _, x in named_tensors(self)]

    @classmethod
    def of_tree(cls, tree: dict[str, Any]) -> "LayerState":
        """From `named_tensors`, as `as_tree` returns them."""
        memory = tree["memory"]
        layers = (_in_order(memory[part]) for part in ("weights", "momentum", "anchor"))
        return cls(
            MemoryState(*layers, memory["num_seen"]),
            tree["conv"],
            tree.get("keys"),
            tree.get("values"),
            _in_order(tree.get("segment_weights", {})),
        )


class Span(NamedTuple):
    """Columns that a layer has read and may have to give up again: the state before them (None: nothing read) and what
    it takes to read them once more.

    inputs: (B, T, hidden), the mixer's. real, begins: (B, T), `Columns`.
    """

    state: LayerState | None
    inputs: Tensor
    real: Tensor
    begins: Tensor

    @property
    def num_columns(self) -> int:
        return self.inputs.shape[1]

    def append(self, inputs: Tensor, columns: Columns) -> "Span":
        shape, device = inputs.shape[:2], inputs.device
        real = torch.ones(shape, dtype=torch.bool, device=device) if columns.real is None else columns.real
        begins = torch.zeros(shape, dtype=torch.bool, device=device) if columns.begins is None else columns.begins
        new = (inputs, real, begins)
        return Span(self.state, *(torch.cat(pair, dim=1) for pair in zip(self[1:], new, strict=True)))

    @classmethod
    def empty(cls, state: LayerState | None, inputs: Tensor) -> "Span":
        nothing = torch.zeros(inputs.shape[0], 0, dtype=torch.bool, device=inputs.device)
        return cls(state, inputs[:, :0], nothing, nothing)

    def first(self, num_columns: int) -> "Span":
        return Span(self.state, *(x[:, :num_columns] for x in self[1:]))

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Span":
        return Span(None if self.state is None else self.state.map(fn), *map(fn, self[1:]))

    @classmethod
    def of_tree(cls, tree: dict[str, Any]) -> "Span":
        state = LayerState.of_tree(tree["state"]) if "state" in tree else None
        return cls(state, tree["inputs"], tree["real"], tree["begins"])


def named_tensors(part: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state, a span or a tuple of them, each with its path, as "memory.weights.0"."""
    if isinstance(part, Tensor):
        yield path, part
    elif part is not None:
        names = getattr(type(part), "__match_args__", None)  # of a dataclass and of a named tuple: its fields
        values = part if names is None else [getattr(part, name) for name in names]
        for name, value in zip(range(len(part)) if names is None else names, values, strict=True):
            yield from named_tensors(value, f"{path}.{name}" if path else str(name))


def as_tree(named: dict[str, Any]) -> dict[str, Any]:
    """{"a.b": x} -> {"a": {"b": x}}"""
    tree: dict[str, Any] = {}
    for path, x in named.items():
        *parents, name = path.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[name] = x
    return tree


def _in_order(tree: dict[str, Any]) -> tuple[Tensor, ...]:
    return tuple(tree[str(i)] for i in range(len(tree)))
