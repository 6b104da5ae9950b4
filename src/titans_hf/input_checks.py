"""What a Titans model refuses, said before anything is computed or changed."""

import torch
from torch import Tensor

from .cache_titans import TitansCache
from .configuration_titans import TitansConfig


def check_input_ids(input_ids: Tensor, vocab_size: int) -> None:
    """Raises ValueError for ids that have no embedding. Not on accelerators: looking would wait for the device."""
    if input_ids.device.type != "cpu" or torch.compiler.is_compiling() or not input_ids.numel():
        return
    low, high = input_ids.aminmax()
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"`input_ids` must be from 0 to {vocab_size - 1} (`vocab_size` - 1), but go from {low} to {high}."
        )


def check_call(config: TitansConfig, batch_size: int, num_tokens: int, cache: TitansCache | None) -> None:
    """Raises ValueError for an empty sequence or a cache that does not fit."""
    if num_tokens == 0:
        raise ValueError("The input has no tokens: give `input_ids` or `inputs_embeds` with at least one column.")
    if cache is not None:
        if not isinstance(cache, TitansCache):
            raise ValueError(f"`past_key_values` must be a TitansCache, but is a {type(cache).__name__}.")
        cache.check_fits(config, batch_size)


def check_not_packed(position_ids: Tensor | None, cu_seq_lens_q=None, seq_idx=None, **kwargs) -> None:
    """Raises ValueError for several documents in a row, in any of the ways that Transformers' collators say so."""
    for name, value in (("cu_seq_lens_q", cu_seq_lens_q), ("seq_idx", seq_idx)):
        if value is not None:
            raise ValueError(f"`{name}` packs documents into one row, which is not supported.")
    if position_ids is not None and position_ids.shape[-1] > 1 and (position_ids.diff(dim=-1) < 0).any():
        raise ValueError("`position_ids` restart within a row: packed documents are not supported.")


def new_columns(attention_mask: Tensor | None, batch_size: int, num_tokens: int, num_read: int) -> Tensor | None:
    """The part of the mask for the new tokens, (B, T); None where none of them is padding.

    Raises ValueError for a mask that is neither (B, T) nor (B, num_read + T).
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape not in (
        (batch_size, num_tokens),
        (batch_size, num_read + num_tokens),
    ):
        raise ValueError(
            f"`attention_mask` must be ({batch_size}, {num_tokens}) or, with the {num_read} columns read before, "
            f"({batch_size}, {num_read + num_tokens}), but is {tuple(attention_mask.shape)}."
        )
    mask = attention_mask[:, -num_tokens:]
    return None if mask.all() else mask
