"""Where the tokens of a call lie on each row's own grid of chunks (or segments).

A row that has already read `num_seen` tokens is `num_seen % unit` slots into a chunk. Rows of a batch may be out of
step, hold padding or several documents; laying every document's real tokens on slots of a row of their own that start
there makes all rows share the same chunk boundaries. Slots that no token fills are marked and masked out; they never
count as read.

Shapes: B batch rows, T tokens, R rows of slots (one per document; B where there are no others), G slots of a row,
P slots of history before the first one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Columns(NamedTuple):
    """What stands in each column of a call, (B, T) bool each; None where it is everywhere the same."""

    real: Tensor | None = None  # not padding; None: all are real
    begins: Tensor | None = None  # a document begins here, whatever the row has read before; None: nowhere


ALL_REAL = Columns()


@dataclass(frozen=True)
class TokenGrid:
    """The slots of a (B, T) call.

    num_slots: G.
    start, end: (R,) int64, each row's first filled slot and one past its last; filled slots are contiguous.
    slot: (B, T) int64, the slot of every token among all R * G, R * G for padding; None where token t of batch row b
    simply lies at slot t of row b.
    origin: (R,) int64, the batch row that a row goes on from, -1 for a new document; None where each is its own.
    last: (B,) int64, the row that each batch row ends in; None likewise.
    idle: (B,) bool, in a call of one column, the rows where it is padding; None for none.
    """

    num_slots: int
    start: Tensor
    end: Tensor
    slot: Tensor | None = None
    origin: Tensor | None = None
    last: Tensor | None = None
    idle: Tensor | None = None

    @classmethod
    def whole(cls, batch_size: int, num_tokens: int, device: torch.device) -> "TokenGrid":
        """Token t at slot t in every row: the beginning of a sequence, or a single token."""
        start = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return cls(num_tokens, start, start + num_tokens)

    @classmethod
    def build(cls, num_seen: Tensor, num_tokens: int, unit: int, columns: Columns = ALL_REAL) -> "TokenGrid":
        """`num_seen` (B,) tokens read before by each batch row."""
        shape, device = (len(num_seen), num_tokens), num_seen.device
        if num_tokens == 1 and columns.begins is None:  # a single token needs no grid
            whole = cls.whole(*shape, device)
            return whole if columns.real is None else replace(whole, idle=~columns.real[:, 0])
        compiling = torch.compiler.is_compiling()  # sizes may not depend on data: take the largest that can be needed
        if columns == ALL_REAL and not compiling and not (num_seen % unit).any():
            return cls.whole(*shape, device)
        row, origin, last = torch.arange(shape[0], device=device)[:, None].expand(shape), None, None
        if columns.begins is not None:
            opens = columns.begins.clone()
            opens[:, 0] = True
            row = opens.flatten().cumsum(0).view(shape) - 1
            last = row[:, -1]
            origin = torch.where(columns.begins, -1, torch.arange(shape[0], device=device)[:, None])[opens]
            num_seen = seen_before(num_seen, origin)
        real = torch.ones(shape, dtype=torch.bool, device=device) if columns.real is None else columns.real
        start = num_seen % unit
        count = torch.zeros_like(start).index_add(0, row.flatten(), real.flatten().long())
        end = start + count
        num_slots = num_tokens + unit - 1 if compiling else max(1, int(end.max()))  # a call may hold padding only
        rank = real.flatten().cumsum(0).view(shape) - 1 - (count.cumsum(0) - count)[row]
        slot = (row * num_slots + start[row] + rank).masked_fill(~real, len(start) * num_slots)
        return cls(num_slots, start, end, slot, origin, last)

    def to(self, device: torch.device, non_blocking: bool = False) -> "TokenGrid":
        """The grid on another device: what Accelerate calls where layers are spread over several."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **{name: x.to(device, non_blocking=non_blocking) for name, x in tensors.items()})

    def pieces(self, length: int) -> Iterator["TokenGrid"]:
        """The grid cut every `length` slots; a row may have no token in some."""
        for first in range(0, self.num_slots, length):
            size = min(length, self.num_slots - first)
            start, end = ((x - first).clamp(0, size) for x in (self.start, self.end))
            yield TokenGrid(size, start, end, self.slot)

    def seen_after(self, num_seen: Tensor) -> Tensor:
        """(B,) tokens read before -> (B,) tokens of its last document that each batch row has read after the call."""
        if self.idle is not None:
            return num_seen + ~self.idle
        if self.origin is None:
            return num_seen + self.end - self.start
        return (seen_before(num_seen, self.origin) + self.end - self.start)[self.last]

    @property
    def num_rows(self) -> int:
        return len(self.start)

    @property
    def filled(self) -> Tensor | None:
        """(R, G) bool, True where a token lies; None where every slot is filled."""
        if self.slot is None:
            return None
        slots = torch.arange(self.num_slots, device=self.start.device)
        return (slots >= self.start[:, None]) & (slots < self.end[:, None])

    @property
    def is_step(self) -> bool:
        """Whether this is one token a row, which needs no grid: a row may then be anywhere in its chunk."""
        return self.num_slots == 1 and self.slot is None

    def place(self, x: Tensor) -> Tensor:
        """(B, T, ...) tokens -> (R, G, ...) slots, zero where no token lies."""
        if self.slot is None:
            return x
        slots = x.new_zeros(self.num_rows * self.num_slots + 1, *x.shape[2:])
        slots = slots.index_copy(0, self.slot.flatten(), x.flatten(0, 1))[:-1]
        return slots.unflatten(0, (self.num_rows, self.num_slots))

    def take(self, y: Tensor) -> Tensor:
        """(R, G, ...) slots -> (B, T, ...) tokens, zero at padding."""
        if self.slot is None:
            return y
        y = torch.cat([y.flatten(0, 1), y.new_zeros(1, *y.shape[2:])])
        return y.index_select(0, self.slot.flatten()).unflatten(0, self.slot.shape)

    def extend(self, history: Tensor, x: Tensor) -> Tensor:
        """(R, P, ...) and (R, G, ...) -> (R, P + G, ...), each row's history right before its first filled slot."""
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


def seen_before(num_seen: Tensor, origin: Tensor) -> Tensor:
    """(B,) tokens read by batch rows -> (R,) tokens read by the rows that go on from them: 0 for a new document."""
    return torch.where(origin < 0, 0, num_seen[origin])


def _index_like(index: Tensor, x: Tensor) -> Tensor:
    """(R, N) -> (R, N, ...) with the trailing sizes of x, as gather and scatter want it."""
    return index.view(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])
