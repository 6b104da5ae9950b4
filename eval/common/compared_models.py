"""Models of equal size to be trained and compared: Titans, and attention and linear recurrences of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from eval.common.behind_last_layer import TokenMemoryLayer, put_behind_last_layer
from eval.common.token_attention import TokenAttention
from titans_hf import TitansConfig
from titans_hf.cli.training.model import parse_value
from titans_hf.neural_memory import OUTPUT_SCALE

WINDOW = 64  # tokens that attention sees in Mistral, MAG and MAL, and of a segment in MAC
VARIANTS = ("lmm", "mag", "mac", "mal")
FORM = "delta"  # the memory's form in published runs whose settings name no other, as `memory_form=titans`
BASELINES = ("llama", "mistral", "llama-conv", "mistral-conv", "gated-deltanet", "mamba2")
# The end of a name says which memory a model has behind its last layer, after a hyphen; Titans' own is a field of their
# config. A pointer is attention over all tokens, or over a window, in the token memory's place.
BEHIND_LAST_LAYER = {
    "token": TokenMemoryLayer,
    "pointer": partial(TokenAttention, window=None),
    f"pointer-{WINDOW}": partial(TokenAttention, window=WINDOW),
}
POINTERS = ("mag-pointer", f"mag-pointer-{WINDOW}")
NAMES = (*VARIANTS, *POINTERS, *BASELINES, *(f"{name}-token" for name in BASELINES))
CONV_KERNEL = 4
HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
LAYER_TYPES = {"gated-deltanet": ["linear_attention"], "qwen3-next": HYBRID, "olmo-hybrid": HYBRID}  # repeated


class Sizes(NamedTuple):
    """The sizes that compared models share unless their settings say otherwise: fields of every configuration, fields
    of Titans or Mamba2 alone, and the longest text of models that have such a field.
    """

    shape: dict[str, Any]
    titans: dict[str, Any] = {}
    mamba2: dict[str, Any] = {}
    max_positions: int = 1 << 17


SHAPE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": None}
SHAPE |= {"eos_token_id": None, "tie_word_embeddings": True, "initializer_range": 0.05}
TRAINED = Sizes(SHAPE, {"memory_form": FORM}, {"chunk_size": 64})


def split_name(name: str) -> tuple[str, str | None]:
    """Splits a model's name into the name without a memory behind the last layer, and that memory, if any."""
    for memory in BEHIND_LAST_LAYER:
        if name.endswith(f"-{memory}"):
            return name.removesuffix(f"-{memory}"), memory
    return name, None


def make_config(name: str, free: int, settings: dict[str, Any], sizes: Sizes = TRAINED) -> PreTrainedConfig:
    """Makes a config; `free` is the size of the MLPs, in Mamba2, which has none, the number of layers."""
    name, _ = split_name(name)
    heads = sizes.shape["num_attention_heads"]
    head_dim = sizes.shape["hidden_size"] // heads
    if name == "mamba2":
        parts = {"num_heads": 2 * heads, "head_dim": head_dim, "n_groups": 1, "state_size": 64} | sizes.mamba2
        shape = {field: value for field, value in sizes.shape.items() if field != "num_attention_heads"}
        return transformers.Mamba2Config(**parts | shape | settings | {"num_hidden_layers": free})
    shape = sizes.shape | {"num_key_value_heads": heads, "intermediate_size": free} | settings
    if name.partition("-")[0] in VARIANTS:
        windows = {"sliding_window": WINDOW, "segment_length": WINDOW}
        return TitansConfig(**{"variant": name.partition("-")[0]} | windows | sizes.titans | shape)
    shape["max_position_embeddings"] = sizes.max_positions
    if name.startswith("mistral"):
        return transformers.MistralConfig(**shape, sliding_window=WINDOW)
    if name.startswith("llama"):
        return transformers.LlamaConfig(**shape)
    shape = {f"linear_num_{part}_heads": heads for part in ("key", "value")} | shape
    shape = {f"linear_{part}_head_dim": head_dim for part in ("key", "value")} | shape
    types = LAYER_TYPES[name]
    shape["layer_types"] = (types * shape["num_hidden_layers"])[: shape["num_hidden_layers"]]
    if name == "olmo-hybrid":
        return transformers.OlmoHybridConfig(**shape)
    return transformers.Qwen3NextConfig(**shape, head_dim=head_dim, num_experts=0)


def fit_config(name: str, num_parameters: int, settings: dict[str, Any], sizes: Sizes = TRAINED) -> PreTrainedConfig:
    """Makes a config with about `num_parameters`, unless the settings fix the size of the MLPs.

    The parameters are linear in the size of the MLPs, here a multiple of 8; of Mamba2, which has none, in the number of
    layers. Raises ValueError for fewer parameters than the smallest model has.
    """
    has_mlp = split_name(name)[0] != "mamba2"
    free = "intermediate_size" if has_mlp else "num_hidden_layers"
    if free in settings:
        return make_config(name, settings[free], settings, sizes)
    first, second, step = (64, 128, 8) if has_mlp else (1, 2, 1)
    counts = [count_parameters(name, make_config(name, size, settings, sizes)) for size in (first, second)]
    each = (counts[1] - counts[0]) / (second - first)
    exact = first + (num_parameters - counts[0]) / each
    if exact < step / 2:  # a network without MLPs is another architecture: its attention and memory do an MLP's work
        smallest = round(counts[0] - (first - step) * each)
        raise ValueError(f"the parameters of {name} must be at least {smallest}, but are {num_parameters}")
    return make_config(name, step * round(exact / step), settings, sizes)


def count_parameters(name: str, config: PreTrainedConfig) -> int:
    """Counts the parameters of `build_model`'s model, without making its weights."""
    with torch.device("meta"):
        return build_model(name, config).num_parameters()


def num_trained(model: nn.Module) -> int:
    """Counts the parameters that are trained."""
    return sum(x.numel() for x in model.parameters() if x.requires_grad)


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
    """Builds the model with random weights. A model with -conv in its name has convolutions on q, k and v; the end of
    the name may be a memory of BEHIND_LAST_LAYER.
    """
    model = AutoModelForCausalLM.from_config(config)
    name, memory = split_name(name)
    if name.endswith("-conv"):
        for layer in model.model.layers:
            attention = layer.self_attn
            for part in ("q_proj", "k_proj", "v_proj"):
                setattr(attention, part, ConvolvedLinear(getattr(attention, part)))
    if memory:
        put_behind_last_layer(model, BEHIND_LAST_LAYER[memory](config.hidden_size))
    return model


@torch.no_grad()
def scale_outputs(model: PreTrainedModel) -> None:
    """Scales the last projection of every attention or recurrence of a baseline to a tenth, as Titans start."""
    for name, module in model.named_modules():
        if name.endswith(("self_attn.o_proj", "linear_attn.out_proj", "mixer.out_proj")):
            module.weight.mul_(OUTPUT_SCALE)


@torch.no_grad()
def start_like_titans(model: PreTrainedModel) -> None:
    """Lets a baseline start as Titans do: a tenth of the outputs, and in Gated DeltaNet keys a token late, and little
    is forgotten.
    """
    scale_outputs(model)
    for net in (module for name, module in model.named_modules() if name.endswith("linear_attn")):
        width = net.hidden_size
        net.conv1d.weight.zero_()[..., -1] = 1
        net.conv1d.weight[width : 2 * width] = net.conv1d.weight[width : 2 * width].roll(-1, -1)
        net.A_log.zero_()
        net.dt_bias.fill_(-5)  # softplus(-5) is .007; 1 is what it starts with, which keeps less than a token


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Parses NAME=JSON pairs; a value that is no JSON is a string. Raises ValueError for a text that is no pair."""
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise ValueError(f"a setting must be NAME=VALUE, but is {pair!r}")
        settings[name] = parse_value(value)
    return settings


@contextmanager
def named_errors(owner: str) -> Iterator[None]:
    """Names the owner of the settings in the error of a configuration that is not possible."""
    try:
        yield
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{owner}: {error}") from error


def check_fields(owner: str, config: PreTrainedConfig, settings: dict[str, Any]) -> None:
    """Raises ValueError for settings that are no fields of the config; `owner` says whose they are."""
    if unknown := settings.keys() - config.to_dict().keys():
        raise ValueError(f"--set {', '.join(sorted(unknown))}: {owner} has no such field")
