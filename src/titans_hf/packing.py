"""What stands in the columns of a call: padding, and documents packed into one row, however Transformers says so."""

import torch
from torch import Tensor

from .cache_titans import TitansCache
from .token_grid import Columns


def columns_of_call(
    batch_size: int,
    num_tokens: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: TitansCache | None,
    kwargs: dict,
) -> Columns:
    """The `Columns` of T new tokens; `kwargs` may hold `cu_seq_lens_q` (N + 1,) and `seq_idx` (B, T).

    Raises ValueError, naming the argument, for shapes that do not fit and for positions that go back but not to 0.
    """
    shape = (batch_size, num_tokens)
    real = _real_columns(attention_mask, shape, 0 if cache is None else cache.get_seq_length())
    begins = None
    if num_tokens > 1:  # the first token goes on from the cache
        begins = _document_starts(shape, real, position_ids, kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx"))
    restart = None if cache is None else cache.layers[0].restart
    if restart is not None:
        device = restart.device if begins is None else begins.device
        begins = torch.zeros(shape, dtype=torch.bool, device=device) if begins is None else begins
        begins[:, 0] |= restart.to(device)
    return Columns(real, begins)


def _real_columns(attention_mask: Tensor | None, shape: tuple[int, int], num_read: int) -> Tensor | None:
    """The part of the mask for the new tokens, (B, T) bool; None where none of them is padding."""
    if attention_mask is None:
        return None
    batch_size, num_tokens = shape
    if attention_mask.dim() != 2 or attention_mask.shape not in (shape, (batch_size, num_read + num_tokens)):
        raise ValueError(
            f"`attention_mask` must be ({batch_size}, {num_tokens}) or, with the {num_read} columns read before, "
            f"({batch_size}, {num_read + num_tokens}), but is {tuple(attention_mask.shape)}."
        )
    real = attention_mask[:, -num_tokens:] != 0
    return real if torch.compiler.is_compiling() or not real.all() else None


def _document_starts(
    shape: tuple[int, int],
    real: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    seq_idx: Tensor | None,
) -> Tensor | None:
    """(B, T) bool, the columns where a document follows another in a row; None where none does."""
    given = {"position_ids": position_ids, "seq_idx": seq_idx}
    for name, value in given.items():
        if value is not None and (value.dim() != 2 or value.shape not in (shape, (1, shape[1]))):
            raise ValueError(f"`{name}` must be {shape}, but is {tuple(value.shape)}.")
    tensors = [x for x in (position_ids, cu_seq_lens_q, seq_idx) if x is not None]
    if not tensors:
        return None
    device = tensors[0].device
    real = torch.ones(shape, dtype=torch.bool, device=device) if real is None else real
    columns = torch.arange(shape[1], device=device)
    last_real = torch.where(real, columns, -1).cummax(1).values
    previous = torch.nn.functional.pad(last_real, (1, -1), value=-1)  # the last real column before; -1: there is none
    follows = real & (previous >= 0)
    begins = torch.zeros(shape, dtype=torch.bool, device=device)
    if position_ids is not None:
        positions = position_ids.expand(shape)
        goes_back = follows & (positions <= positions.gather(1, previous.clamp(min=0)))
        _require(not_any=goes_back & (positions != 0), message="`position_ids` may go back within a row only to 0.")
        begins = begins | (goes_back & (positions == 0))
    if seq_idx is not None:
        indices = seq_idx.expand(shape)
        begins = begins | (follows & (indices != indices.gather(1, previous.clamp(min=0))))
    if cu_seq_lens_q is not None:
        begins = begins | (follows & _starts_of_lengths(cu_seq_lens_q, shape))
    if torch.compiler.is_compiling():
        _require(not_any=begins, message="Packed documents cannot be compiled: the number of rows depends on the data.")
        return None
    return begins if begins.any() else None


def _starts_of_lengths(cu_seq_lens_q: Tensor, shape: tuple[int, int]) -> Tensor:
    """(N + 1,) cumulative lengths of the documents of the only row -> (1, T) bool."""
    ends = cu_seq_lens_q.tolist()
    if shape[0] != 1 or ends[0] != 0 or ends[-1] != shape[1] or ends != sorted(ends):
        raise ValueError(
            f"`cu_seq_lens_q` must rise from 0 to the {shape[1]} columns of a single row, but is {ends} for "
            f"{shape[0]} rows."
        )
    starts = torch.zeros(shape, dtype=torch.bool, device=cu_seq_lens_q.device)
    starts[:, [end for end in ends if end < shape[1]]] = True
    return starts


def _require(*, not_any: Tensor, message: str) -> None:
    """Raises ValueError if anything is marked; in a compiled call RuntimeError, when it runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(~not_any.any(), message)
    elif not_any.any():
        raise ValueError(message)
