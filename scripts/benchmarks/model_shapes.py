"""The shapes of the models that the benchmarks time: Titans, and models of transformers, of one of four equal sizes.

`eval.common.compared_models` makes them; their other settings are the defaults of their classes.
"""

from argparse import ArgumentParser
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from eval.common import compared_models
from eval.common.compared_models import Sizes, check_fields, parse_settings
from titans_hf.cache_titans import CACHE_NAMES

from .measure import check_close

VARIANTS = ("mac", "mag", "mal", "lmm")
TOKEN_MEMORY = "-token"  # ends the name of a variant with a token memory
NUM_FEATURES = 512
TITANS = (*VARIANTS, *(variant + TOKEN_MEMORY for variant in VARIANTS))
NAMES = (*TITANS, "llama", "mistral", "mamba2", "qwen3-next", "olmo-hybrid")
SHAPE = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": True}
# (hidden size, layers, heads, vocabulary) and the number of parameters
SHAPES = {
    "tiny": ((128, 4, 4, 259), 1_030_000),
    "30m": ((384, 8, 6, 32_000), 30_000_000),
    "170m": ((768, 12, 12, 32_000), 170_000_000),
    "340m": ((1024, 24, 16, 32_000), 340_000_000),
}
FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
SIZES = {
    name: Sizes(SHAPE | dict(zip(FIELDS, shape, strict=True)), max_positions=1 << 20)
    for name, (shape, _) in SHAPES.items()
}
PARAMETERS = {name: number for name, (_, number) in SHAPES.items()}
NUM_CHECKED_TOKENS = 200  # tokens
FIXED = ("variant", "token_memory_features", "intermediate_size")  # by a model's name, or so that sizes are equal


def add_settings(parser: ArgumentParser) -> None:
    """Adds the option `--set`, fields of the Titans' configurations."""
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="fields of the Titans' configurations"
    )


def settings_of(name: str, size: str, pairs: list[str], fixed: tuple[str, ...] = FIXED) -> dict[str, Any]:
    """Parses the NAME=VALUE pairs of `--set`, which Titans alone have.

    Raises ValueError, whatever the model's name, for a name that is no field of their configuration, for a field in
    `fixed`, and for a value that it cannot have.
    """
    settings, make = parse_settings(pairs), partial(make_config, VARIANTS[0], size, free=64)
    check_fields("TitansConfig", make(), settings)
    for field in fixed:
        if field in settings:
            raise ValueError(f"--set {field}: the benchmark sets it")
    try:
        make(**settings)
    except (ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"--set: {error}") from error
    return settings if name in TITANS else {}


def _named(name: str, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the name and the settings of a model for `compared_models`: its token memory is a setting."""
    features = {"token_memory_features": NUM_FEATURES if name.endswith(TOKEN_MEMORY) else 0} if name in TITANS else {}
    return name.removesuffix(TOKEN_MEMORY), features | settings


def make_config(name: str, size: str, free: int, **settings) -> PreTrainedConfig:
    """Makes a configuration; `free` is the size of the MLPs, or the number of layers of Mamba2, which has no MLPs."""
    name, settings = _named(name, settings)
    return compared_models.make_config(name, free, settings, SIZES[size])


def fit_config(name: str, size: str, **settings) -> PreTrainedConfig:
    """Makes a configuration with about `PARAMETERS[size]` parameters."""
    name, settings = _named(name, settings)
    return compared_models.fit_config(name, PARAMETERS[size], settings, SIZES[size])


def build(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Builds the model with random weights, always the same ones, for evaluation."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(device, dtype).eval()


def draw_tokens(model: PreTrainedModel, length: int) -> Tensor:
    """Draws token ids (1, length) on the model's device."""
    return torch.randint(2, model.config.vocab_size, (1, length), device=model.device)


def of_cache(output: ModelOutput) -> dict[str, Cache]:
    """Returns the cache of an output by the name of the argument that takes it."""
    name = next(name for name in (*CACHE_NAMES, "cache_params") if name in output)  # the last is Mamba's
    return {name: output[name]}


@torch.no_grad()
def check(model: PreTrainedModel) -> None:
    """Raises AssertionError unless a step with the cache gives the logits of the whole text."""
    ids = draw_tokens(model, NUM_CHECKED_TOKENS)
    before = model(ids[:, :-1], use_cache=True)
    step = model(ids[:, -1:], use_cache=True, **of_cache(before))
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    check_close(f"{type(model).__name__}: a step", step.logits[:, -1], model(ids).logits[:, -1], tolerance)
