"""The grid of chunks (or segments) on which the tokens of a call are placed, for each row.

A row that has already read `num_seen` tokens is `num_seen % grid_size` slots into a chunk. The rows of a batch may be
at different positions in their chunk, and contain padding or several documents. Each document gets a row of slots, and
its tokens (without padding) consecutive slots from its position in the chunk on: then all rows share the same chunk
boundaries. Empty slots are masked out and never count as tokens: gates of 0 would not do, because a token adds the
momentum once more whatever its gates are.

Shapes: B batch rows, T tokens, R rows of slots (one per document; B where there is one document per batch row), G slots
of a row, P entries that precede a row's first slot.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Columns(NamedTuple):
    """Padding and document starts among the columns of a call, (B, T) bool each, and whether the memory learns them.

    mask: True at tokens, False at padding; None if there is no padding.
    document_starts: True where a document starts, whatever the row has read before; None if none starts.
    learns: False if the memory is read at these columns, but not updated (`set_memory_learning`).
    """

    mask: Tensor | None = None
    document_starts: Tensor | None = None
    learns: bool = True

    @property
    def are_tokens(self) -> bool:
        """True if every column is a token of the document before."""
        return self.mask is None and self.document_starts is None


ALL_TOKENS = Columns()


@dataclass(frozen=True)
class TokenGrid:
    """The slots of the tokens of a call (B, T).

    num_slots: G.
    row_starts, row_ends: (R,) int64, each row's first slot with a token, and one past its last. All slots between them
    have a token.
    token_slots: (B, T) int64, the slot of every token among all R * G, R * G for padding; None where token t of batch
    row b is at slot t of row b.
    source_rows: (R,) int64, the batch row whose state a row continues, -1 for a new document; None where each row
    continues its own.
    last_rows: (B,) int64, the row of each batch row's last document; None if every batch row has one document.
    is_padding: (B,) bool, in a call of one column, True in rows where it is padding; None without padding.
    needs_surprise: True if the call returns the surprise of its tokens.
    learns: False if the memory is read with these tokens, but not updated.
    rotary: cos and sin (2, R or 1, G, 1, rotary_dim) at each slot's position in its document; None where no
    attention needs them.
    full_window: True if the cache of a window has its full length after the call, whatever the number of columns read.
    """

    num_slots: int
    row_starts: Tensor
    row_ends: Tensor
    token_slots: Tensor | None = None
    source_rows: Tensor | None = None
    last_rows: Tensor | None = None
    is_padding: Tensor | None = None
    needs_surprise: bool = False
    learns: bool = True
    rotary: Tensor | None = None
    full_window: bool = False

    @classmethod
    def identity(cls, batch_size: int, num_tokens: int, device: torch.device, learns: bool = True) -> "TokenGrid":
        """Returns the grid with token t at slot t in every row: the start of a sequence, or a single token."""
        row_starts = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return cls(num_tokens, row_starts, row_starts + num_tokens, learns=learns)

    @classmethod
    def build(cls, num_seen: Tensor, num_tokens: int, grid_size: int, columns: Columns = ALL_TOKENS) -> "TokenGrid":
        """Returns the grid of T tokens after `num_seen` (B,) tokens per batch row, for chunks of `grid_size` slots."""
        shape, device = (len(num_seen), num_tokens), num_seen.device
        # 1. Calls that need no grid: a single token per row, and tokens that start at a chunk boundary in every row.
        if num_tokens == 1 and columns.document_starts is None:
            grid = cls.identity(*shape, device, columns.learns)
            return grid if columns.mask is None else replace(grid, is_padding=~columns.mask[:, 0])
        compiling = torch.compiler.is_compiling()  # then no size may depend on data
        if columns.are_tokens and not compiling and not (num_seen % grid_size).any():
            return cls.identity(*shape, device, columns.learns)
        # 2. One row of slots per document: documents are counted over all columns, batch row after batch row.
        row, source_rows, last_rows = torch.arange(shape[0], device=device)[:, None].expand(shape), None, None
        if columns.document_starts is not None:
            starts_row = columns.document_starts.clone()
            starts_row[:, 0] = True
            row = starts_row.flatten().cumsum(0).view(shape) - 1
            last_rows = row[:, -1]
            batch_row = torch.arange(shape[0], device=device)[:, None]
            source_rows = torch.where(columns.document_starts, -1, batch_row)[starts_row]
            num_seen = _num_seen_of_rows(num_seen, source_rows)
        # 3. A row's tokens start at its position in the chunk; the longest row sets the number of slots.
        mask = torch.ones(shape, dtype=torch.bool, device=device) if columns.mask is None else columns.mask
        row_starts = num_seen % grid_size
        count = torch.zeros_like(row_starts).index_add(0, row.flatten(), mask.flatten().long())
        row_ends = row_starts + count
        # Compiled: the largest number that can be needed. At least 1: a call may contain padding only.
        num_slots = num_tokens + grid_size - 1 if compiling else max(1, int(row_ends.max()))
        # 4. A token's slot: its row's first slot plus the number of the row's tokens before it.
        index_in_row = mask.flatten().cumsum(0).view(shape) - 1 - (count.cumsum(0) - count)[row]
        token_slots = row * num_slots + row_starts[row] + index_in_row
        token_slots = token_slots.masked_fill(~mask, len(row_starts) * num_slots)
        return cls(num_slots, row_starts, row_ends, token_slots, source_rows, last_rows, learns=columns.learns)

    def to(self, device: torch.device, non_blocking: bool = False) -> "TokenGrid":
        """Copies the grid to a device. Accelerate calls it where layers are on several devices."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **{name: x.to(device, non_blocking=non_blocking) for name, x in tensors.items()})

    def split(self, length: int) -> Iterator["TokenGrid"]:
        """Splits the grid every `length` slots; a row may have no token in some of the parts."""
        for first in range(0, self.num_slots, length):
            size = min(length, self.num_slots - first)
            row_starts, row_ends = ((x - first).clamp(0, size) for x in (self.row_starts, self.row_ends))
            options = {"needs_surprise": self.needs_surprise, "learns": self.learns}
            yield TokenGrid(size, row_starts, row_ends, self.token_slots, **options)

    def positions(self, num_seen: Tensor) -> Tensor:
        """Computes each slot's position (R, G) in its document; `num_seen` (B,): tokens read before the call."""
        before = num_seen if self.source_rows is None else _num_seen_of_rows(num_seen, self.source_rows)
        slots = torch.arange(self.num_slots, device=num_seen.device)
        return slots + (before - self.row_starts)[:, None]

    def num_seen_after(self, num_seen: Tensor) -> Tensor:
        """Computes how many tokens of its last document each batch row (B,) has read after the call; `num_seen` (B,):
        before it.
        """
        if self.is_padding is not None:
            return num_seen + ~self.is_padding
        if self.source_rows is None:
            return num_seen + self.row_ends - self.row_starts
        return (_num_seen_of_rows(num_seen, self.source_rows) + self.row_ends - self.row_starts)[self.last_rows]

    @property
    def num_rows(self) -> int:
        """R, the number of rows of slots."""
        return len(self.row_starts)

    @property
    def num_columns(self) -> int:
        """T, the number of columns of the call."""
        return self.num_slots if self.token_slots is None else self.token_slots.shape[1]

    @property
    def filled(self) -> Tensor | None:
        """(R, G) bool, True at slots with a token; None if every slot has one."""
        if self.token_slots is None:
            return None
        slots = torch.arange(self.num_slots, device=self.row_starts.device)
        return (slots >= self.row_starts[:, None]) & (slots < self.row_ends[:, None])

    @property
    def is_single_token(self) -> bool:
        """True for one token per row without a grid: each row may be at any position in its chunk."""
        return self.num_slots == 1 and self.token_slots is None

    def scatter(self, x: Tensor) -> Tensor:
        """Scatters tokens (B, T, ...) to slots (R, G, ...); empty slots are zero."""
        if self.token_slots is None:
            return x
        slots = x.new_zeros(self.num_rows * self.num_slots + 1, *x.shape[2:])
        slots = slots.index_copy(0, self.token_slots.flatten(), x.flatten(0, 1))[:-1]
        return slots.unflatten(0, (self.num_rows, self.num_slots))

    def gather(self, y: Tensor) -> Tensor:
        """Gathers tokens (B, T, ...) from slots (R, G, ...); padding is zero."""
        if self.token_slots is None:
            return y
        y = torch.cat([y.flatten(0, 1), y.new_zeros(1, *y.shape[2:])])
        return y.index_select(0, self.token_slots.flatten()).unflatten(0, self.token_slots.shape)

    def prepend(self, previous: Tensor, x: Tensor) -> Tensor:
        """Puts each row's previous entries (R, P, ...) before its first token in x (R, G, ...): (R, P + G, ...)."""
        extended = torch.cat([previous, x], dim=1)
        if self.token_slots is None:
            return extended
        index = self.row_starts[:, None] + torch.arange(previous.shape[1], device=self.row_starts.device)
        return extended.scatter(1, _index_like(index, previous), previous)

    def last_entries(self, extended: Tensor, length: int) -> Tensor:
        """Returns the last `length` entries up to each row's last token, from the result of `prepend`; `length` is at
        least the number of entries before the call. Zeros stand in for entries before a row's first.
        """
        if self.token_slots is None:
            extended = pad_before(extended, length - extended.shape[1])
            last = extended[:, extended.shape[1] - length :]
            if self.num_slots == 1 and not torch.compiler.is_compiling():
                return last  # a view keeps little more alive than itself
            # A view would keep all of `extended` alive, and its strides would trigger a recompilation.
            return last.clone(memory_format=torch.contiguous_format)
        extended = pad_before(extended, length - (extended.shape[1] - self.num_slots))
        index = self.row_ends[:, None] + torch.arange(length, device=self.row_ends.device)
        return extended.gather(1, _index_like(index, extended))


def pad_before(x: Tensor, number: int) -> Tensor:
    """Puts `number` zeros, none if it is negative, before the entries of x (B, N, ...)."""
    return torch.cat([x.new_zeros(x.shape[0], number, *x.shape[2:]), x], dim=1) if number > 0 else x


def _num_seen_of_rows(num_seen: Tensor, source_rows: Tensor) -> Tensor:
    """Computes the tokens read by the rows of slots (R,) from the counts of batch rows (B,): 0 for a new document."""
    return torch.where(source_rows < 0, 0, num_seen[source_rows])


def _index_like(index: Tensor, x: Tensor) -> Tensor:
    """Expands (R, N) to (R, N, ...) with the trailing sizes of x, as gather and scatter need it."""
    return index.view(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])
