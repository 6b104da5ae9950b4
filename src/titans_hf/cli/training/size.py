"""The size of a new model: the width of its layers and of their MLPs for a number of parameters."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from math import lcm
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

MLP_STEP = 8  # the width of an MLP is a multiple of this number


def count_parameters(config: PreTrainedConfig) -> int:
    """Counts the parameters of a language model, without making its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()


def fit_size(make: Callable[[int], PreTrainedConfig], number: int, step: int, named: str) -> int:
    """Returns the multiple of `step` for which the model of `make(size)` has nearest to `number` parameters.

    The number of parameters must grow with the size. Raises ValueError, which begins with `named`, for fewer parameters
    than the smallest model has.
    """
    count = cache(lambda size: count_parameters(make(size)))
    if number < count(step):
        raise ValueError(f"{named} must be at least {count(step)}, but is {number}")
    above = step
    while count(above) < number:
        above *= 2
    sizes = range(max(step, above // 2), above + 1, step)
    first = bisect_left(sizes, number, key=count)
    return min(sizes[max(0, first - 1) : first + 1], key=lambda size: abs(count(size) - number))


def fit_widths(config: PreTrainedConfig, fields: dict[str, Any], fixed: set[str], number: int) -> dict[str, int]:
    """Returns `hidden_size` and `intermediate_size` of about `number` parameters: the width, with the MLPs in
    proportion, then the width of the MLPs alone.

    Args:
        config: a configuration of the model's other sizes, made of `fields`.
        fixed: names of fields that keep their value.

    Raises ValueError for fewer parameters than the smallest model has, and if no width is left to choose.
    """
    named, free = "--num_parameters", {"hidden_size", "intermediate_size"} & config.to_dict().keys() - fixed
    if not free:
        raise ValueError(f"{named} needs hidden_size or intermediate_size of {config.model_type} without a value")
    found = {}
    if "hidden_size" in free:
        ratio = getattr(config, "intermediate_size", 0) / config.hidden_size

        def of_width(width: int) -> dict[str, int]:
            mlp = {"intermediate_size": MLP_STEP * max(1, round(width * ratio / MLP_STEP))}
            return {"hidden_size": width} | (mlp if "intermediate_size" in free else {})

        heads = lcm(*(getattr(config, name, None) or 1 for name in ("num_attention_heads", "memory_num_heads")))
        found = of_width(
            fit_size(lambda width: type(config)(**fields | of_width(width)), number, 8 * heads, named)
        )  # heads of a multiple of 8, half of which may be rotated
    if "intermediate_size" in free:
        size = fit_size(lambda x: type(config)(**fields | found | {"intermediate_size": x}), number, MLP_STEP, named)
        found["intermediate_size"] = size
    return found
