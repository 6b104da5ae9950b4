"""What a neural memory carries from token to token, and what a batch does to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MemoryState:
    """The memory of every row and head; tuples hold one tensor per layer of the memory network.

    weights (M), momentum (S), anchor (the weights at the start of the running chunk, where gradients are taken, eq.
    16): (B, H, d_in, d_out) in float32 (float64 in a float64 model). num_seen: (B,) int64, real tokens read by each
    row.
    """

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    anchor: tuple[Tensor, ...]
    num_seen: Tensor

    @classmethod
    def initial(cls, weights: Sequence[Tensor], batch_size: int, dtype: torch.dtype) -> "MemoryState":
        """The state before the first token, from learned initial weights of (H, d_in, d_out)."""
        rows = tuple(weight.to(dtype).expand(batch_size, *weight.shape) for weight in weights)
        num_seen = torch.zeros(batch_size, dtype=torch.int64, device=weights[0].device)
        return cls(rows, tuple(torch.zeros_like(weight) for weight in rows), rows, num_seen)

    def map(self, fn: Callable[..., Tensor], *others: "MemoryState") -> "MemoryState":
        """The state with `fn` applied to every tensor, batch dimension first, and to those of `others` beside it."""
        states = (self, *others)
        layers = (
            tuple(map(fn, *(getattr(state, part) for state in states))) for part in ("weights", "momentum", "anchor")
        )
        return MemoryState(*layers, fn(*(state.num_seen for state in states)))

    def primed(self) -> "MemoryState":
        """The state with its tokens uncounted: the grid of chunks begins anew at the next token."""
        return MemoryState(self.weights, self.momentum, self.weights, torch.zeros_like(self.num_seen))


def where_rows(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` in the rows of a batch marked in `rows` (B,), `old` in the others; new and old (B, ...)."""
    return torch.where(rows.view(-1, *[1] * (new.dim() - 1)), new, old)
