"""The arguments of a call: their checks, and the layout of the call's tokens.

The layout says which columns are padding, where documents start, and which slots tokens are on.

The call's arguments (mask, positions, packed documents) and the cache (tokens read before, columns to read again, rows
to restart) are combined here, once for all layers.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .cache_titans import TitansCache, check_cache_class
from .configuration_titans import WITH_WINDOW, TitansConfig
from .rotary_titans import rotary_factors
from .token_grid import Columns, TokenGrid

# The three ways in which Transformers marks packed documents, None where not given: `position_ids` (B, T) or (1, T),
# restarting at 0; `cu_seq_lens_q` (N + 1,), cumulative lengths in a single row; `seq_idx` (B, T) or (1, T), one index
# per document.
Documents = dict[str, Tensor | None]


def check_inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    """Raises ValueError unless exactly one of the two is given: input_ids (B, T), or inputs_embeds (B, T, hidden), B
    and T at least 1.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
    if inputs_embeds is None:
        check_not_empty("input_ids", input_ids, 2)
    else:
        check_not_empty("inputs_embeds", inputs_embeds, 3)


def check_cache(cache: TitansCache, config: TitansConfig, batch_size: int) -> None:
    """Raises ValueError for a cache of another class, config or batch size."""
    check_cache_class("cache", cache)
    cache.check_fits(config, batch_size)


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
        cache: TitansCache | None,
        learns: bool = True,
    ) -> "TokenLayout":
        """Returns the layout of new tokens (B, T, hidden) after the tokens of `cache`, if there is one; `learns`:
        whether the memory is updated with them.

        Raises ValueError, naming the argument, for shapes that do not fit and for positions that decrease to another
        value than 0.
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
        if num_seen is None:
            num_seen = torch.zeros(batch_size, dtype=torch.int64, device=device)
        num_seen, reread_grids = num_seen.to(device), []
        for run in [] if to_reread is None else to_reread.runs():
            again = run.columns
            again = again._replace(mask=again.mask.to(device), document_starts=again.document_starts.to(device))
            grid = TokenGrid.build(num_seen, run.num_columns, config.grid_size, again)
            reread_grids.append(with_rotary(grid, num_seen))
            num_seen = grid.num_seen_after(num_seen)
        grid = TokenGrid.build(num_seen, num_tokens, config.grid_size, columns)
        return cls(columns, with_rotary(grid, num_seen), tuple(reread_grids))


def _columns(
    shape: tuple[int, int], attention_mask: Tensor | None, documents: Documents, cache: TitansCache | None
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
    # An all-zero float mask is ambiguous: additive it masks nothing, as 0/1 it masks everything.
    ambiguous = attention_mask.is_floating_point() and not attention_mask.any()
    if ambiguous or (others := attention_mask != mask).any():
        other = "0.0 everywhere" if ambiguous else attention_mask[others][0]
        raise ValueError(f"`attention_mask` must be 1 at tokens and 0 at padding, not additive, but has {other}.")
    mask = mask[:, -num_tokens:]
    return None if mask.all() else mask


def _check_documents(shape: tuple[int, int], documents: Documents) -> None:
    """Raises ValueError for arguments of another shape."""
    for name, value in documents.items():
        if value is None:
            continue
        if name == "cu_seq_lens_q":
            fits, expected = value.dim() == 1 and len(value) > 0, "(N + 1,)"
        else:
            fits, expected = value.dim() == 2 and value.shape in (shape, (1, shape[1])), shape
        if not fits:
            raise ValueError(f"`{name}` must be {expected}, but is {tuple(value.shape)}.")


def _document_starts(shape: tuple[int, int], mask: Tensor | None, documents: Documents) -> Tensor | None:
    """Returns (B, T) bool, True where a document follows another in a row; None where none does."""
    given = {name: x for name, x in documents.items() if x is not None}
    if not given:
        return None
    device = next(iter(given.values())).device
    mask = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask
    columns = torch.arange(shape[1], device=device)
    last_token = torch.where(mask, columns, -1).cummax(1).values
    previous = torch.nn.functional.pad(last_token, (1, -1), value=-1)  # column of the token before; -1 without one
    has_previous = mask & (previous >= 0)
    starts = torch.zeros(shape, dtype=torch.bool, device=device)
    if "position_ids" in given:
        positions = given["position_ids"].expand(shape)
        decreases = has_previous & (positions <= positions.gather(1, previous.clamp(min=0)))
        # Transformers gives padding position 0 and counts on from there, in right-padded prompts that are read again.
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
    """Raises ValueError, with the first of `values` there, if any entry is True; RuntimeError in a compiled call, when
    it runs.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(~not_any.any(), message)
    elif not_any.any():
        raise ValueError(message if values is None else f"{message}, but has {values[not_any][0]} there.")
