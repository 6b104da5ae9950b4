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
            raise ValueError(
                f"`past_key_values` must be a TitansCache, which is made where none is given, but is a "
                f"{type(cache).__name__}: a memory does not fit a cache of keys and values."
            )
        cache.check_fits(config, batch_size)
