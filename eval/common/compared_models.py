"""Models of equal size to be trained and compared: Titans, and attention and linear recurrences of transformers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from eval.common.token_attention import TokenAttention
from titans_hf import TitansConfig
from titans_hf.cli.training.model import parse_value
from titans_hf.neural_memory import OUTPUT_SCALE

WINDOW = 64  # tokens that attention sees in Mistral, MAG and MAL, and of a segment in MAC
VARIANTS = ("lmm", "mag", "mac", "mal")
FORM = "delta"  # of the memory in all published runs, unless their settings name another: `memory_form=titans`
# MAG with attention over all tokens, or over a window, in its token memory's place
POINTER_WINDOWS = {"mag-pointer": None, "mag-pointer-64": WINDOW}
NAMES = (*VARIANTS, *POINTER_WINDOWS, "llama", "mistral", "llama-conv", "mistral-conv", "gated-deltanet", "mamba2")
HIDDEN_SIZE, NUM_LAYERS, NUM_HEADS, CONV_KERNEL = 128, 4, 4, 4


def make_config(name: str, free: int, settings: dict[str, Any]) -> PreTrainedConfig:
    """Makes a config; `free` is the size of the MLPs, in Mamba2, which has none, the number of layers."""
    shape = {
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    } | settings
    if name == "mamba2":
        head_dim = 2 * HIDDEN_SIZE // (2 * NUM_HEADS)
        parts = {"num_heads": 2 * NUM_HEADS, "head_dim": head_dim, "n_groups": 1, "state_size": 64, "chunk_size": 64}
        return transformers.Mamba2Config(**parts | shape | {"num_hidden_layers": free})
    shape = {"num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_HEADS, "intermediate_size": free} | shape
    if name in (*VARIANTS, *POINTER_WINDOWS):
        return TitansConfig(
            **{"variant": name.partition("-")[0], "sliding_window": WINDOW, "segment_length": WINDOW}
            | {"memory_form": FORM}
            | shape
        )
    shape["max_position_embeddings"] = 1 << 17
    if name.startswith("mistral"):
        return transformers.MistralConfig(**shape, sliding_window=WINDOW)
    if name.startswith("llama"):
        return transformers.LlamaConfig(**shape)
    head_dim = HIDDEN_SIZE // NUM_HEADS
    shape = {f"linear_num_{part}_heads": NUM_HEADS for part in ("key", "value")} | shape
    shape = {f"linear_{part}_head_dim": head_dim for part in ("key", "value")} | shape
    layers = ["linear_attention"] * shape["num_hidden_layers"]
    return transformers.Qwen3NextConfig(**shape, head_dim=head_dim, num_experts=0, layer_types=layers)


def fit_config(name: str, num_parameters: int, settings: dict[str, Any]) -> PreTrainedConfig:
    """Makes a config with about `num_parameters`, unless the settings fix the size of the MLPs."""
    free = "num_hidden_layers" if name == "mamba2" else "intermediate_size"
    if free in settings:
        return make_config(name, settings[free], settings)
    return fit_size(name, partial(make_config, name, settings=settings), num_parameters)


def fit_size(name: str, make: Callable[[int], PreTrainedConfig], num_parameters: int) -> PreTrainedConfig:
    """Makes a config with about `num_parameters`, which are linear in what `make` takes: the size of the MLPs, here a
    multiple of 8; of Mamba2, which has none, the number of layers.
    """
    first, second, step = (1, 2, 1) if name == "mamba2" else (64, 128, 8)
    counts = [count_parameters(name, make(free)) for free in (first, second)]
    exact = first + (num_parameters - counts[0]) * (second - first) / (counts[1] - counts[0])
    return make(max(step, step * round(exact / step)))


def count_parameters(name: str, config: PreTrainedConfig) -> int:
    """Counts the parameters of `build_model`'s model, without making its weights."""
    with torch.device("meta"):
        return build_model(name, config).num_parameters()


class ConvolvedLinear(nn.Module):
    """A projection followed by the causal depthwise convolution that the memory has on its q, k and v."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear
        self.filters = nn.Parameter(torch.randn(linear.out_features, 1, CONV_KERNEL) * CONV_KERNEL**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (B, T, d_in) to (B, T, d_out), a whole sequence at once, without a cache."""
        projected = nn.functional.pad(self.linear(x).mT, (CONV_KERNEL - 1, 0))
        return nn.functional.conv1d(projected, self.filters.to(projected.dtype), groups=len(self.filters)).mT


def build_model(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Builds the model with random weights; a name that ends in -conv has convolutions on q, k and v, one with -pointer
    attention over tokens in the token memory's place.
    """
    model = AutoModelForCausalLM.from_config(config)
    if name in POINTER_WINDOWS:
        model.model.token_memory = TokenAttention(config.hidden_size, POINTER_WINDOWS[name])
    if name.endswith("-conv"):
        for layer in model.model.layers:
            attention = layer.self_attn
            for part in ("q_proj", "k_proj", "v_proj"):
                setattr(attention, part, ConvolvedLinear(getattr(attention, part)))
    return model


@torch.no_grad()
def scale_outputs(model: PreTrainedModel) -> None:
    """Scales the last projection of every attention or recurrence of a baseline to a tenth, as Titans start."""
    for name, module in model.named_modules():
        if name.endswith(("self_attn.o_proj", "linear_attn.out_proj", "mixer.out_proj")):
            module.weight.mul_(OUTPUT_SCALE)


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Parses NAME=JSON pairs; what is no JSON is a string. Raises ValueError for what is no pair."""
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise ValueError(f"a setting must be NAME=VALUE, but is {pair!r}")
        settings[name] = parse_value(value)
    return settings


def check_fields(owner: str, config: PreTrainedConfig, settings: dict[str, Any]) -> None:
    """Raises ValueError for settings that are no fields of the config; `owner` says whose they are."""
    if unknown := settings.keys() - config.to_dict().keys():
        raise ValueError(f"--set {', '.join(sorted(unknown))}: {owner} has no such field")
