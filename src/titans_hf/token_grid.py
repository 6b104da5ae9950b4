"""Where the tokens of a call lie on each row's own grid of chunks (or segments).

A row that has already read `num_seen` tokens is `num_seen % unit` slots into a chunk. Rows of a batch may be out of
step and may hold padding; laying every row's real tokens on slots that start there makes all rows share the same chunk
boundaries. Slots that no token fills are marked and masked out; they never count as read.

Shapes: B batch, T tokens, G slots, P slots of history before the first one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenGrid:
    """The slots of a (B, T) call.

    num_slots: G.
    start, end: (B,) int64, each row's first filled slot and one past its last; filled slots are contiguous.
    slot: (B, T) int64, the slot of every token, G for padding; None where token t simply lies at slot t.
    """

    num_slots: int
    start: Tensor
    end: Tensor
    slot: Tensor | None = None

    @classmethod
    def whole(cls, batch_size: int, num_tokens: int, device: torch.device) -> "TokenGrid":
        """Token t at slot t in every row: the beginning of a sequence, or a single token."""
        start = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return cls(num_tokens, start, start + num_tokens)

    @classmethod
    def build(cls, num_seen: Tensor, num_tokens: int, unit: int, padding_mask: Tensor | None = None) -> "TokenGrid":
        """`num_seen` (B,) tokens read before; `padding_mask` (B, T), nonzero for real tokens, None if all are."""
        start = num_seen % unit
        if padding_mask is None:
            if not start.any():
                return cls.whole(len(start), num_tokens, start.device)
            end = start + num_tokens
            return cls(int(end.max()), start, end, start[:, None] + torch.arange(num_tokens, device=start.device))
        real = padding_mask != 0
        end = start + real.sum(1)
        num_slots = max(1, int(end.max()))  # a call may hold padding only
        slot = start[:, None] + real.cumsum(1) - 1
        return cls(num_slots, start, end, slot.masked_fill(~real, num_slots))

    def to(self, device: torch.device, non_blocking: bool = False) -> "TokenGrid":
        """The grid on another device: what Accelerate calls where layers are spread over several."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **{name: x.to(device, non_blocking=non_blocking) for name, x in tensors.items()})

    def pieces(self, length: int) -> Iterator[tuple[int, "TokenGrid"]]:
        """The grid cut every `length` slots: first slot and grid of each piece; a row may have no token in some."""
        for first in range(0, self.num_slots, length):
            size = min(length, self.num_slots - first)
            start, end = ((x - first).clamp(0, size) for x in (self.start, self.end))
            yield first, TokenGrid(size, start, end, self.slot)

    @property
    def filled(self) -> Tensor | None:
        """(B, G) bool, True where a token lies; None where every slot is filled."""
        if self.slot is None:
            return None
        slots = torch.arange(self.num_slots, device=self.start.device)
        return (slots >= self.start[:, None]) & (slots < self.end[:, None])

    @property
    def is_step(self) -> bool:
        """Whether this is one real token a row, which needs no grid: a row may then be anywhere in its chunk."""
        return self.num_slots == 1 and self.slot is None

    def place(self, x: Tensor) -> Tensor:
        """(B, T, ...) tokens -> (B, G, ...) slots, zero where no token lies."""
        if self.slot is None:
            return x
        slots = x.new_zeros(x.shape[0], self.num_slots + 1, *x.shape[2:])
        return slots.scatter(1, _index_like(self.slot, x), x)[:, :-1]

    def take(self, y: Tensor) -> Tensor:
        """(B, G, ...) slots -> (B, T, ...) tokens, zero at padding."""
        if self.slot is None:
            return y
        y = torch.cat([y, y.new_zeros(y.shape[0], 1, *y.shape[2:])], dim=1)
        return y.gather(1, _index_like(self.slot, y))

    def extend(self, history: Tensor, x: Tensor) -> Tensor:
        """(B, P, ...) and (B, G, ...) -> (B, P + G, ...), each row's history right before its first filled slot."""
        extended = torch.cat([history, x], dim=1)
        if self.slot is None:
            return extended
        index = self.start[:, None] + torch.arange(history.shape[1], device=self.start.device)
        return extended.scatter(1, _index_like(index, history), history)

    def tail(self, extended: Tensor, length: int) -> Tensor:
        """The last `length` entries of each row of `extended`: the history for the next call."""
        if self.slot is None:
            return extended[:, extended.shape[1] - length :].clone()  # a view would keep all of `extended` alive
        index = self.end[:, None] + torch.arange(length, device=self.end.device)
        return extended.gather(1, _index_like(index, extended))


def _index_like(index: Tensor, x: Tensor) -> Tensor:
    """(B, N) -> (B, N, ...) with the trailing sizes of x, as gather and scatter want it."""
    return index.view(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])
