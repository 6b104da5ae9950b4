"""The grid of chunks (or segments) on which the tokens of a call are placed, for each row.

A row that has already read `num_seen` tokens is `num_seen % grid_size` slots into a chunk. The rows of a batch may be
at different positions in their chunk, and contain padding or several documents. Each document gets a row of slots. Its
tokens (without padding) take consecutive slots, from the document's position in the chunk on, so all rows share the
same chunk boundaries. Empty slots are masked out and never count as tokens. Gates of 0 are not enough: any token adds
the momentum once more.

Shapes: B batch rows, T tokens, R rows of slots (one per document; B where there is one document per batch row), G slots
of a row, P entries that precede a row's first slot.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .configuration_titans import WITH_WINDOW, TitansConfig

if TYPE_CHECKING:  # the cache imports this file
    from .cache_titans import TitansCache


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
        """True if there is no padding and no document starts."""
        return self.mask is None and self.document_starts is None


ALL_TOKENS = Columns()
# The three ways in which Transformers marks packed documents, None where not given: `position_ids` (B, T) or (1, T),
# restarting at 0; `cu_seq_lens_q` (N + 1,), cumulative lengths in a single row; `seq_idx` (B, T) or (1, T), one index
# per document.
Documents = dict[str, Tensor | None]


@dataclass(frozen=True)
class TokenGrid:
    """The slots of the tokens of a call (B, T).

    num_slots: G.
    row_starts, row_ends: (R,) int64, each row's first slot with a token, and one past its last. All slots between them
    have a token.
    token_slots: (B, T) int64, the slot of every token among all R * G slots (R * G for padding); None if token t of
    batch row b is at slot t of row b.
    source_rows: (R,) int64, the batch row whose state a row continues, -1 for a new document; None if row b continues
    batch row b.
    last_rows: (B,) int64, the row of each batch row's last document; None if every batch row has one document.
    is_padding: (B,) bool, in a call of one column, True in rows whose column is padding; None without padding.
    needs_surprise: True if the call returns the surprise of its tokens.
    learns: False if the memory is read with these tokens, but not updated.
    rotary: cos and sin (2, R or 1, G, 1, rotary_dim) at each slot's position in its document; None if no attention
    needs them.
    full_window: True if the cache of a window has its full length after the call, whatever the number of columns read.
    shared: the results of `once`.
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
    shared: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, compare=False)

    @classmethod
    def identity(cls, batch_size: int, num_tokens: int, device: torch.device, learns: bool = True) -> "TokenGrid":
        """Returns the grid with token t at slot t in every row: the start of a sequence, or a single token."""
        row_starts = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return cls(num_tokens, row_starts, row_starts + num_tokens, learns=learns)

    @classmethod
    def build(
        cls, num_seen: Tensor, num_tokens: int, grid_size: int, columns: Columns = ALL_TOKENS, is_new: bool = False
    ) -> "TokenGrid":
        """Returns the grid of T tokens after `num_seen` (B,) tokens per batch row, for chunks of `grid_size` slots;
        is_new: all of `num_seen` is 0. The host reads one value at most.
        """
        shape, device = (len(num_seen), num_tokens), num_seen.device
        # 1. Calls that need no grid: a single token per row, and tokens that start at a chunk boundary in every row.
        if num_tokens == 1 and columns.document_starts is None:
            grid = cls.identity(*shape, device, columns.learns)
            return grid if columns.mask is None else replace(grid, is_padding=~columns.mask[:, 0])
        compiling = torch.compiler.is_compiling()  # then no size may depend on data
        num_slots = num_tokens + (grid_size - 1 if compiling else 0)  # compiled: the largest number that can be needed
        if columns.are_tokens and not compiling:
            if not (first_slot := int((num_seen % grid_size).max())):
                return cls.identity(*shape, device, columns.learns)
            num_slots += first_slot
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
        if not (compiling or columns.are_tokens or (is_new and makes_host_wait(row_ends))):
            num_slots = max(1, int(row_ends.max()))  # at least 1: a call may contain padding only
        # 4. A token's slot: its row's first slot plus the number of the row's tokens before it.
        index_in_row = mask.flatten().cumsum(0).view(shape) - 1 - (count.cumsum(0) - count)[row]
        token_slots = row * num_slots + row_starts[row] + index_in_row
        token_slots = token_slots.masked_fill(~mask, len(row_starts) * num_slots)
        return cls(num_slots, row_starts, row_ends, token_slots, source_rows, last_rows, learns=columns.learns)

    def to(self, device: torch.device, non_blocking: bool = False) -> "TokenGrid":
        """Copies the grid to a device. Accelerate calls it when layers are on several devices."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        moved: dict[str, Any] = {name: x.to(device, non_blocking=non_blocking) for name, x in tensors.items()}
        return replace(self, **moved)

    def once(self, name: str, compute: Callable[[], Tensor], device: torch.device) -> Tensor:
        """Returns what the first layer of a call computes for all layers on its device, for example a mask."""
        if (name, device) not in self.shared:
            self.shared[name, device] = compute()
        return self.shared[name, device]

    def split(self, length: int) -> Iterator["TokenGrid"]:
        """Splits the grid every `length` slots; a row may have no token in some of the parts."""
        for first in range(0, self.num_slots, length):
            size = min(length, self.num_slots - first)
            starts, ends = ((x - first).clamp(0, size) for x in (self.row_starts, self.row_ends))
            asks, learns = self.needs_surprise, self.learns
            yield TokenGrid(size, starts, ends, self.token_slots, needs_surprise=asks, learns=learns)

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
                return last  # a view keeps little more in memory than itself
            # A view would keep all of `extended` in memory, and its strides would trigger a recompilation.
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


def rotary_factors(config: TitansConfig, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes cos and sin (2, ..., 1, rotary_dim) of the rotary angles at `positions` (...) int64, the same for all
    heads, in float32 at least. The first half of sin is negative, as `rotate` takes it.

    Angles are computed in float64 and cos and sin are rounded once: a score depends only on the distance to its key,
    even at position 5 million.
    """
    precise, device = torch.promote_types(dtype, torch.float32), positions.device
    size, base = config.rotary_dim, config.rope_parameters["rope_theta"]
    frequencies = base ** -(torch.arange(0, size, 2, device=device, dtype=precise) / size)
    exact = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    angles = positions[..., None].to(exact) * frequencies.to(exact)
    cos, sin = (x.unsqueeze(-2) for x in (angles.cos(), angles.sin()))
    return torch.cat([cos, cos, -sin, sin], dim=-1).unflatten(-1, (2, -1)).movedim(-2, 0).to(precise)


def check_inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    """Raises ValueError unless exactly one of the two is given: input_ids (B, T), or inputs_embeds (B, T, hidden), B
    and T at least 1.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
    for name, inputs, num_dims in (("input_ids", input_ids, 2), ("inputs_embeds", inputs_embeds, 3)):
        if inputs is not None:
            check_not_empty(name, inputs, num_dims)


def check_not_empty(name: str, inputs: Tensor, num_dims: int) -> None:
    """Raises ValueError unless inputs is (B, T) or (B, T, hidden), as `num_dims` says, with rows and columns."""
    if inputs.dim() != num_dims or 0 in inputs.shape[:2]:
        shape = "(B, T)" if num_dims == 2 else "(B, T, hidden)"
        raise ValueError(
            f"`{name}` must be {shape} with at least one row and one column, but is {tuple(inputs.shape)}. If "
            "`generate()` continues a cache, call `cache.start_prompt()` first and give only the tokens to "
            "read next."
        )


class TokenLayout(NamedTuple):
    """The layout that all layers share.

    columns: padding and document starts of the new tokens. grid: the slots of the new tokens. reread_grids: the slots
    of the columns that a cropped cache has to read again first, a grid for each of `RecordedColumns.runs`.
    """

    columns: Columns
    grid: TokenGrid
    reread_grids: tuple[TokenGrid, ...] = ()

    @classmethod
    def of_call(
        cls,
        config: TitansConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        documents: Documents,
        cache: "TitansCache | None",
        learns: bool = True,
    ) -> "TokenLayout":
        """Returns the layout of new tokens (B, T, hidden) after the tokens of `cache`, if there is one; `learns`:
        whether the memory is updated with them.

        Raises ValueError, naming the argument, for shapes that do not fit and for positions that decrease to a value
        other than 0.
        """
        (batch_size, num_tokens), device = inputs_embeds.shape[:2], inputs_embeds.device
        columns = _columns((batch_size, num_tokens), attention_mask, documents, cache)._replace(learns=learns)
        num_seen = None if cache is None else cache.num_tokens_seen
        to_reread = None if cache is None else cache.columns_to_reread()
        compiled = torch.compiler.is_compiling() or (cache is not None and cache.is_compileable)

        def with_rotary(grid: TokenGrid, num_seen: Tensor) -> TokenGrid:
            if config.variant not in WITH_WINDOW:  # rotated by the slots of a segment, or not at all
                return grid
            rotary = rotary_factors(config, grid.positions(num_seen), inputs_embeds.dtype)
            return replace(grid, rotary=rotary, full_window=compiled)

        if num_seen is None and to_reread is None and columns.are_tokens:
            grid = TokenGrid.identity(batch_size, num_tokens, device, learns)
            return cls(columns, with_rotary(grid, grid.row_starts[:1]))
        is_new = num_seen is None and to_reread is None
        if num_seen is None:
            num_seen = torch.zeros(batch_size, dtype=torch.int64, device=device)
        num_seen, reread_grids = num_seen.to(device), []
        for run in [] if to_reread is None else to_reread.runs():
            mask, starts = (x if x is None else x.to(device) for x in run.columns[:2])
            again = run.columns._replace(mask=mask, document_starts=starts)
            grid = TokenGrid.build(num_seen, run.num_columns, config.grid_size, again)
            reread_grids.append(with_rotary(grid, num_seen))
            num_seen = grid.num_seen_after(num_seen)
        grid = TokenGrid.build(num_seen, num_tokens, config.grid_size, columns, is_new)
        return cls(columns, with_rotary(grid, num_seen), tuple(reread_grids))


def _columns(
    shape: tuple[int, int], attention_mask: Tensor | None, documents: Documents, cache: "TitansCache | None"
) -> Columns:
    """Returns the `Columns` of T new tokens."""
    mask = _new_columns_of_mask(attention_mask, shape, 0 if cache is None else cache.get_seq_length())
    _check_documents(shape, documents)
    # The first token of a row always continues the cache.
    starts = _document_starts(shape, mask, documents) if shape[1] > 1 else None
    restart = None if cache is None else cache.rows_to_restart()
    if restart is not None:
        device = restart.device if starts is None else starts.device
        starts = torch.zeros(shape, dtype=torch.bool, device=device) if starts is None else starts
        starts[:, 0] |= restart.to(device)
    return Columns(mask, starts)


def _new_columns_of_mask(
    attention_mask: Tensor | None, shape: tuple[int, int], num_read: int | Tensor
) -> Tensor | None:
    """Returns the mask of the new tokens, (B, T) bool; None if none of them is padding."""
    if attention_mask is None:
        return None
    batch_size, num_tokens = shape
    if torch.compiler.is_compiling() and isinstance(num_read, Tensor):
        num_read = attention_mask.shape[-1] - num_tokens  # a graph cannot depend on the value of a tensor
    if attention_mask.dim() != 2 or attention_mask.shape not in (shape, (batch_size, num_read + num_tokens)):
        raise ValueError(
            f"`attention_mask` must be ({batch_size}, {num_tokens}) or, with the {num_read} columns read before, "
            f"({batch_size}, {num_read + num_tokens}), but is {tuple(attention_mask.shape)}."
        )
    if torch.compiler.is_compiling():
        return attention_mask[:, -num_tokens:] != 0
    mask = attention_mask != 0
    if num_tokens > 1 and makes_host_wait(mask) and not attention_mask.is_floating_point():
        torch._assert_async((attention_mask == mask).all(), "`attention_mask` must be 1 at tokens and 0 at padding.")
        return mask[:, -num_tokens:]
    # An all-zero float mask is ambiguous: additive it masks nothing, as 0/1 it masks everything.
    ambiguous = attention_mask.is_floating_point() and not attention_mask.any()
    if ambiguous or (others := attention_mask != mask).any():
        other = "0.0 everywhere" if ambiguous else attention_mask[others][0]
        raise ValueError(f"`attention_mask` must be 1 at tokens and 0 at padding, not additive, but has {other}.")
    mask = mask[:, -num_tokens:]
    return None if mask.all() else mask


def makes_host_wait(x: Tensor) -> bool:
    """True if the host, which asks for a value of x, waits until a device has computed it."""
    return x.device.type != "cpu"


def _check_documents(shape: tuple[int, int], documents: Documents) -> None:
    """Raises ValueError for arguments of another shape."""
    for name, value in documents.items():
        if value is None:
            continue
        if name == "cu_seq_lens_q":
            fits, expected = value.dim() == 1 and len(value) > 0, "(N + 1,)"
        else:
            fits, expected = value.dim() == 2 and value.shape in (shape, (1, shape[1])), str(shape)
        if not fits:
            raise ValueError(f"`{name}` must be {expected}, but is {tuple(value.shape)}.")


def _document_starts(shape: tuple[int, int], mask: Tensor | None, documents: Documents) -> Tensor | None:
    """Returns (B, T) bool, True where a document follows another in a row; None if none does."""
    given = {name: x for name, x in documents.items() if x is not None}
    if not given:
        return None
    device = next(iter(given.values())).device
    mask = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask
    columns = torch.arange(shape[1], device=device)
    last_token = torch.where(mask, columns, -1).cummax(1).values
    previous = torch.nn.functional.pad(last_token, (1, -1), value=-1)  # column of the token before; -1 if there is none
    has_previous = mask & (previous >= 0)
    starts = torch.zeros(shape, dtype=torch.bool, device=device)
    if "position_ids" in given:
        positions = given["position_ids"].expand(shape)
        decreases = has_previous & (positions <= positions.gather(1, previous.clamp(min=0)))
        # In right-padded prompts that are read again, Transformers gives padding position 0 and counts on from there.
        adjacent = previous == columns - 1
        message = "`position_ids` must increase within a row, or be 0 where a new document starts"
        _require(not_any=decreases & adjacent & (positions != 0), message=message, values=positions)
        starts = starts | (decreases & (positions == 0))
    if "seq_idx" in given:
        indices = given["seq_idx"].expand(shape)
        starts = starts | (has_previous & (indices != indices.gather(1, previous.clamp(min=0))))
    if "cu_seq_lens_q" in given:
        starts = starts | (has_previous & _starts_of_lengths(given["cu_seq_lens_q"], shape))
    if torch.compiler.is_compiling():
        _require(not_any=starts, message="Packed documents cannot be compiled: the number of rows depends on the data.")
        return None
    return starts if starts.any() else None


def _starts_of_lengths(cu_seq_lens_q: Tensor, shape: tuple[int, int]) -> Tensor:
    """Converts the cumulative lengths (N + 1,) of the documents of a single row to their first columns, (1, T) bool."""
    ends = cu_seq_lens_q.tolist()
    if shape[0] != 1 or ends[0] != 0 or ends[-1] != shape[1] or ends != sorted(ends):
        raise ValueError(
            f"`cu_seq_lens_q` must rise from 0 to the {shape[1]} columns of a single row, but is {ends} for "
            f"{shape[0]} rows."
        )
    starts = torch.zeros(shape, dtype=torch.bool, device=cu_seq_lens_q.device)
    starts[:, [end for end in ends if end < shape[1]]] = True
    return starts


def _require(*, not_any: Tensor, message: str, values: Tensor | None = None) -> None:
    """Raises ValueError, with the first of `values` there, if any entry is True. A compiled call raises RuntimeError
    when it runs.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(~not_any.any(), message)
    elif not_any.any():
        raise ValueError(message if values is None else f"{message}, but has {values[not_any][0]} there.")
