"""Checks of a model's arguments; an error names the argument, its value and the allowed values."""

import torch
from torch import Tensor
from transformers.utils import logging

from .cache_titans import TitansCache, check_cache_class
from .configuration_titans import TitansConfig

logger = logging.get_logger(__name__)


def check_config(config: TitansConfig) -> None:
    """Raises ValueError for a value that a new config refuses, since fields may have been set later, and for a
    `pad_token_id` outside of the vocabulary. Warns of updates that can overshoot.
    """
    config.validate_architecture()
    if config.memory_max_lr > config.max_stable_lr:  # as that of a saved model whose rule or chunk has been changed
        logger.warning_once(
            f"`memory_max_lr` ({config.memory_max_lr:g}) is above {config.max_stable_lr:g}, its limit and default with "
            f"memory_update_rule={config.memory_update_rule!r} and chunks of {config.memory_chunk_size}: steps can "
            "overshoot, and training can diverge."
        )
    if config.memory_momentum and config.memory_update_rule == "delta":
        logger.warning_once(
            "`memory_momentum` is True with memory_update_rule='delta', whose default is False: where the same key "
            "comes in bursts, the memory can grow exponentially."
        )
    if config.pad_token_id is not None and not 0 <= config.pad_token_id < config.vocab_size:
        raise ValueError(
            f"`pad_token_id` must be None or from 0 to {config.vocab_size - 1} (`vocab_size` - 1), but is "
            f"{config.pad_token_id}."
        )


def check_inputs(input_ids: Tensor | None, inputs_embeds: Tensor | None, config: TitansConfig) -> None:
    """Raises ValueError unless exactly one of both is given: input_ids (B, T) int64 or int32 within the vocabulary, or
    inputs_embeds (B, T, hidden), B and T at least 1. On an accelerator the range of ids is not checked, because reading
    them would wait for the device.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
    if inputs_embeds is None:
        _check_shape("input_ids", input_ids, ("B", "T"))
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"`input_ids` must be int64 or int32, but is {input_ids.dtype}.")
        if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = input_ids.aminmax()
            if low < 0 or high >= config.vocab_size:
                raise ValueError(
                    f"`input_ids` must be from 0 to {config.vocab_size - 1} (`vocab_size` - 1), but go from {low} to "
                    f"{high}."
                )
    else:
        _check_shape("inputs_embeds", inputs_embeds, ("B", "T", config.hidden_size))


def check_cache(cache: TitansCache, config: TitansConfig, batch_size: int) -> None:
    """Raises ValueError for a cache of another class, config or batch size."""
    check_cache_class("past_key_values", cache)
    cache.check_fits(config, batch_size)


def check_not_empty(name: str, inputs: Tensor) -> None:
    """Raises ValueError unless inputs is a tensor (B, T, ...) with rows and columns."""
    if not isinstance(inputs, Tensor) or inputs.dim() < 2:
        given = tuple(inputs.shape) if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}"
        raise ValueError(f"`{name}` must be a tensor (B, T), rows of tokens, but is {given}.")
    if inputs.shape[0] == 0:
        raise ValueError(f"`{name}` has no rows: its shape is {tuple(inputs.shape)}.")
    if inputs.shape[1] == 0:
        raise ValueError(
            f"The input has no tokens: `{name}` is {tuple(inputs.shape)}; give `input_ids` or `inputs_embeds` with at "
            "least one column. If `generate()` continues a cache, call `past_key_values.start_prompt()` first and "
            "give only the tokens to read next."
        )


def _check_shape(name: str, x: Tensor, shape: tuple[str | int, ...]) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"`{name}` must be a tensor ({', '.join(map(str, shape))}), but is a {type(x).__name__}.")
    if x.dim() != len(shape) or any(type(size) is int and size != x.shape[at] for at, size in enumerate(shape)):
        raise ValueError(f"`{name}` must be ({', '.join(map(str, shape))}), but is {tuple(x.shape)}.")
    check_not_empty(name, x)
