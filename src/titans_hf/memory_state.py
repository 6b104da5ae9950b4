"""The state of a neural memory, the inputs that update it, and what an update returns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class MemoryState:
    """The memory of every batch row and head; tuples hold one tensor per layer of the memory network.

    weights (M), momentum (S; empty without momentum), anchor (the weights at the start of the current chunk, where
    gradients are taken, eq. 16; empty where `UpdateRule.needs_anchor` is False): (B, H, d_in, d_out) in float32
    (float64 in a float64 model).
    num_seen: (B,) int64, tokens read by each row, padding excluded.

    Inside the scan over chunks, batch and heads are one dimension, (N, d_in, d_out), and `num_seen` is None. Gradients
    with respect to a state have the same form. Never changed in place; not frozen, because Transformers' exporters set
    the fields of a copy.
    """

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    anchor: tuple[Tensor, ...]
    num_seen: Tensor | None = None

    @classmethod
    def initial(
        cls,
        weights: Sequence[Tensor],
        batch_size: int,
        dtype: torch.dtype,
        has_anchor: bool = True,
        has_momentum: bool = True,
    ) -> "MemoryState":
        """Returns the state before the first token, from learned initial weights (H, d_in, d_out)."""
        rows = tuple(weight.to(dtype).expand(batch_size, *weight.shape) for weight in weights)
        num_seen = torch.zeros(batch_size, dtype=torch.int64, device=weights[0].device)
        momentum = tuple(map(torch.zeros_like, rows)) if has_momentum else ()
        return cls(rows, momentum, rows if has_anchor else (), num_seen)

    def map(self, fn: Callable[..., Tensor], *others: "MemoryState") -> "MemoryState":
        """Applies `fn` to every tensor (batch dimension first), with the tensors of `others` as further arguments."""
        states = (self, *others)
        layers = (
            tuple(map(fn, *(getattr(state, part) for state in states))) for part in ("weights", "momentum", "anchor")
        )
        return MemoryState(*layers, fn(*(state.num_seen for state in states)))

    def with_count_reset(self) -> "MemoryState":
        """Returns the state with no token counted: the next token starts a new chunk."""
        anchor = self.weights if self.anchor else ()
        return MemoryState(self.weights, self.momentum, anchor, torch.zeros_like(self.num_seen))

    def flat(self) -> tuple[Tensor, ...]:
        """Returns all tensors but `num_seen`, as `from_flat` takes them."""
        return (*self.weights, *self.momentum, *self.anchor)

    @property
    def sizes(self) -> "StateSizes":
        """Numbers of tensors of the state's parts."""
        return StateSizes(len(self.weights), len(self.momentum), len(self.anchor))

    @classmethod
    def from_flat(cls, tensors: Iterable[Tensor], sizes: "StateSizes") -> "MemoryState":
        """Returns the state with the tensors of `flat`, `num_seen` None."""
        remaining = iter(tensors)
        return cls(*(tuple(islice(remaining, size)) for size in sizes))


class StateSizes(NamedTuple):
    """The number of tensors of each part of a `MemoryState`: one per layer of the memory network, or none."""

    weights: int
    momentum: int
    anchor: int


class MemoryInputs(NamedTuple):
    """The inputs of the memory's update for T tokens (of a call, or of one chunk), in the state's dtype; or the
    gradients with respect to them.

    queries, keys, values: (B, H, T, D). inner_lr (theta), log_momentum_decay (log eta), log_retain (log(1 - alpha)):
    (B, H, T), or (B, H, T, L) with gates of their own for each layer of the memory network; -inf is a gate of 0.
    log_momentum_decay is None without momentum, as the state's momentum is empty then.
    filled: (B, H, T) bool, False at slots without a token; None if every slot holds one.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    inner_lr: Tensor
    log_momentum_decay: Tensor | None
    log_retain: Tensor
    filled: Tensor | None = None

    @property
    def has_gates_per_layer(self) -> bool:
        """True if the gates have a dimension for the layers of the memory network."""
        return self.inner_lr.dim() == self.keys.dim()

    def map(self, fn: Callable[[Tensor], Tensor]) -> "MemoryInputs":
        """Applies `fn` to every tensor."""
        return MemoryInputs(*(None if x is None else fn(x) for x in self))


class MemorizeOutput(NamedTuple):
    """What an update of the memory returns: retrieved (B, H, T, D) in the state's dtype; surprise (B, H, T), the norm
    of each token's gradient, which carries no gradient itself; and the state after the last token.
    """

    retrieved: Tensor
    surprise: Tensor
    state: MemoryState


def where_rows(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Selects `new` in the batch rows where `rows` (B,) is True, `old` in the others; new and old (B, ...)."""
    return torch.where(rows.view(-1, *[1] * (new.dim() - 1)), new, old)
