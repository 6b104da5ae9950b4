"""Models of equal size to be trained and compared: Titans, and attention and linear recurrences of transformers."""

from functools import partial
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig

from titans_hf import TitansConfig
from titans_hf.cli.training.model import parse_overrides
from titans_hf.cli.training.size import MLP_STEP, fit_size

WINDOW = 64  # tokens that attention sees in Mistral, MAG and MAL, and of a segment in MAC
VARIANTS = ("lmm", "mag", "mac", "mal")
HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
LAYER_TYPES = {"gated-deltanet": ["linear_attention"], "qwen3-next": HYBRID, "olmo-hybrid": HYBRID}  # repeated
SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 4, "tie_word_embeddings": True}
SHAPE |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


def make_config(name: str, free: int, settings: dict[str, Any]) -> PreTrainedConfig:
    """Makes a config; `free` is the size of the MLPs, in Mamba2, which has none, the number of layers. `settings`,
    which have `hidden_size`, replace fields.
    """
    shape = SHAPE | settings
    heads = shape["num_attention_heads"]
    head_dim = shape["hidden_size"] // heads
    if name == "mamba2":
        del shape["num_attention_heads"]
        parts = {"num_heads": 2 * heads, "head_dim": head_dim, "n_groups": 1, "state_size": 64}
        return transformers.Mamba2Config(**parts | shape | {"num_hidden_layers": free})
    shape = {"num_key_value_heads": heads, "intermediate_size": free} | shape
    if name in VARIANTS:
        return TitansConfig(**{"variant": name, "sliding_window": WINDOW, "segment_length": WINDOW} | shape)
    shape["max_position_embeddings"] = 1 << 20
    if name == "mistral":
        return transformers.MistralConfig(**shape, sliding_window=WINDOW)
    if name == "llama":
        return transformers.LlamaConfig(**shape)
    shape |= {f"linear_num_{part}_heads": heads for part in ("key", "value")}
    shape |= {f"linear_{part}_head_dim": head_dim for part in ("key", "value")}
    types = LAYER_TYPES[name]
    shape["layer_types"] = (types * shape["num_hidden_layers"])[: shape["num_hidden_layers"]]
    if name == "olmo-hybrid":
        return transformers.OlmoHybridConfig(**shape)
    return transformers.Qwen3NextConfig(**shape, head_dim=head_dim, num_experts=0)


def fit_config(name: str, num_parameters: int, settings: dict[str, Any]) -> PreTrainedConfig:
    """Makes a config with about `num_parameters`, unless the settings fix the size of the MLPs.

    The size of the MLPs is a multiple of 8; Mamba2, which has none, gets a number of layers. Raises ValueError for
    fewer parameters than the smallest model has.
    """
    has_mlp = name != "mamba2"
    free = "intermediate_size" if has_mlp else "num_hidden_layers"
    if has_mlp and free in settings:
        return make_config(name, settings[free], settings)
    # A network without MLPs is another architecture: its attention and memory do an MLP's work.
    make, named = partial(make_config, name, settings=settings), f"the number of parameters of {name}"
    return make(fit_size(make, num_parameters, MLP_STEP if has_mlp else 1, named))


def num_trained(model: nn.Module) -> int:
    """Counts the parameters that are trained."""
    return sum(x.numel() for x in model.parameters() if x.requires_grad)


def parse_settings(pairs: list[str], config: PreTrainedConfig) -> dict[str, Any]:
    """Parses the NAME=JSON pairs of --set; a value that is no JSON is a string. Raises ValueError for a name that is no
    field of the config.
    """
    settings = parse_overrides(",".join(pairs))
    if unknown := settings.keys() - config.to_dict().keys():
        raise ValueError(f"--set {', '.join(sorted(unknown))}: {type(config).__name__} has no such field")
    return settings
