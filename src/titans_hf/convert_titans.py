"""Makes a Titans of a pretrained Llama, Mistral, Qwen2 or Qwen3, with its weights and without training.

A layer of the result is sliding-window attention with persistent tokens (and, in `memory_layers`, a memory that starts
as 0). For a text of at most `window` tokens and without sinks its logits are the original's. For a longer text they are
the logits of the original with the window as its mask.

Sinks: a pretrained model needs its first position. Once its window has left that position behind, it loses about half
a nat. The first position attends to itself alone, so that its inputs of every layer are the same for every text. They
become the persistent token (paper section 3.3) of every layer, at a constant distance behind every query.

Weights are converted layer by layer: a checkpoint of any size needs the memory of one layer and of one shard.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from .configuration_titans import TitansConfig
from .generation_titans import CACHES
from .modeling_titans import TitansDecoderLayer, TitansForCausalLM

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Parts of a decoder layer: the original's name and ours.
PARTS = {
    "input_layernorm.": "mixer_norm.",
    "self_attn.": "mixer.attention.",
    "post_attention_layernorm.": "mlp_norm.",
    "mlp.": "mlp.",
}
COPIED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "attention_dropout",
    "initializer_range",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
# docs/dev/log.md: "A persistent token computed from the model itself"
SINK_DISTANCE = 256
EPISODIC = dict(token_memory_form="episodic", token_memory_entries=5400)  # half a megabyte
BUFFERS = "rotary_emb.inv_freq"  # in checkpoints of old versions
INDEX = "model.safetensors.index.json"


def convert(
    model: PreTrainedModel | str | Path,
    *,
    window: int = 1024,
    sinks: int = 1,
    memory: Literal["episodic"] | None = "episodic",
    memory_layers: list[int] | tuple[int, ...] = (),
    first_token: int | None = None,
    **fields: Any,
) -> TitansForCausalLM:
    """Returns a Titans with the weights of a pretrained model, which stays as it is.

    Args:
        model: a Llama, Mistral, Qwen2 or Qwen3 for causal language modelling; or its folder or name on the Hub.
        window: number of tokens that a token attends to, itself included; at most the length of training.
        sinks: 1 for a persistent token made of `first_token`, 0 for none.
        memory: "episodic" for a memory behind the last layer (`token_memory_form`), whose gate is nearly closed before
            training; None for none.
        memory_layers: layers that get a memory of their own, from 0 on. Its output is 0 before training.
        first_token: the token that texts begin with; the begin token of the config by default, else its end token.
        fields: further fields of `TitansConfig`.

    Raises ValueError for a model that cannot be converted exactly.
    """
    config, weights = open_model(model)
    titans = titans_config(config, window, sinks, memory, memory_layers, **fields)
    result = make_skeleton(titans, _dtype_of(weights))
    for _ in convert_parts(result, weights, _first_token(titans, first_token)):
        pass
    result.tie_weights()
    result.generation_config = generation_config_of(model, result.config)
    return result.eval()


def convert_checkpoint(
    path: str | Path,
    output: str | Path,
    *,
    window: int = 1024,
    sinks: int = 1,
    memory: Literal["episodic"] | None = "episodic",
    memory_layers: list[int] | tuple[int, ...] = (),
    first_token: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    gguf_file: str | None = None,
    check: Callable[[TitansConfig], None] | None = None,
    **fields: Any,
) -> TitansForCausalLM:
    """Writes a converted checkpoint to a folder: configuration, code and weights, shard by shard.

    Args:
        path: the folder of a checkpoint, or its name on the Hub.
        dtype: dtype of the written weights; the checkpoint's by default.
        gguf_file: the checkpoint's file if it is a GGUF, whose weights are written as numbers that are not quantised.
        check: called with the configuration before anything is written.
        window, sinks, memory, memory_layers, first_token, fields: as in `convert`.

    Returns the model on the meta device, without weights. Raises ValueError as `convert` does.
    """
    config, weights = open_model(path, gguf_file)
    titans = titans_config(config, window, sinks, memory, memory_layers, **fields)
    dtype = _dtype_of(weights) if dtype is None else dtype
    if check is not None:
        check(titans)
    skeleton = make_skeleton(titans, dtype)
    original_names(skeleton, weights)  # raises before anything is written
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    skeleton.config.architectures, skeleton.config.dtype = [TitansForCausalLM.__name__], dtype
    skeleton.config.save_pretrained(output)
    generation_config_of(path, skeleton.config).save_pretrained(output)
    planned = {name: x for name, x in skeleton.state_dict().items() if not _is_tied(titans, name)}
    shards = split_torch_state_dict_into_shards(
        planned, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    waiting, files = {}, dict(shards.filename_to_tensors)
    for prefix, module in convert_parts(skeleton, weights, _first_token(titans, first_token)):
        waiting |= {f"{prefix}.{name}": x for name, x in module.state_dict().items()}
        for file in [file for file, names in files.items() if waiting.keys() >= set(names)]:
            tensors = {name: waiting.pop(name).contiguous() for name in files.pop(file)}
            save_file(tensors, output / file, metadata={"format": "pt"})
        module.to("meta")
    if len(shards.filename_to_tensors) > 1:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (output / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return skeleton


class StoredWeights(Mapping):
    """The weights of a checkpoint's safetensors files by name; each is read when it is asked for."""

    def __init__(self, folder: Path):
        index = folder / INDEX
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            with safe_open(folder / "model.safetensors", "pt") as file:
                names = dict.fromkeys(file.keys(), "model.safetensors")
        self.files = {name: folder / file for name, file in names.items()}

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.files[name], "pt") as file:
            return file.get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self.files  # the base class would read the weight

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def open_model(
    model: PreTrainedModel | str | Path, gguf_file: str | None = None
) -> tuple[PreTrainedConfig, Mapping[str, Tensor]]:
    """Returns the configuration and the weights of a model. Weights in safetensors files are read when they are used.

    Raises ValueError for quantised weights, and for a family that is not known.
    """
    if isinstance(model, nn.Module):
        check_family(model.config)
        return model.config, model.state_dict()
    folder = Path(model)
    if gguf_file is not None:
        whole = GgufConfig(dequantize=True)
        original = AutoModelForCausalLM.from_pretrained(model, gguf_file=gguf_file, quantization_config=whole)
        original.config.quantization_config = None  # its weights are numbers of float32 now
        check_family(original.config)
        return original.config, original.state_dict()
    config = AutoConfig.from_pretrained(model)
    check_family(config)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(model), ignore_patterns=["*.bin", "*.pth", "*.gguf", "*.onnx", "*.h5"]))
    if (folder / INDEX).is_file() or (folder / "model.safetensors").is_file():
        return config, StoredWeights(folder)
    return config, AutoModelForCausalLM.from_pretrained(model, dtype="auto").state_dict()


def check_family(config: PreTrainedConfig) -> None:
    """Raises ValueError for a model that cannot be converted exactly, whatever the window."""
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"a model of type {config.model_type!r} cannot be converted, only one of {', '.join(FAMILIES)}"
        )
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise ValueError(
            f"quantised weights ({method}) cannot be converted: give the checkpoint that they were made of"
        )
    if any(isinstance(value, dict) for value in config.rope_parameters.values()):
        raise ValueError("rotary types that differ between layers cannot be converted")


def titans_config(
    config: PreTrainedConfig,
    window: int,
    sinks: int,
    memory: str | None,
    memory_layers: list[int] | tuple[int, ...],
    **fields: Any,
) -> TitansConfig:
    """Returns the configuration of the Titans that a model is converted to. Raises ValueError for bad options."""
    limits = {"max_position_embeddings": config.max_position_embeddings}
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if getattr(config, "sliding_window", None) is not None and "sliding_attention" in kinds:
        limits["sliding_window"] = config.sliding_window
    name = min(limits, key=limits.get)
    if type(window) is not int or not 1 <= window <= limits[name]:
        raise ValueError(f"`window` must be from 1 to {limits[name]}, the model's `{name}`, but is {window}")
    if sinks not in (0, 1):
        raise ValueError(f"`sinks` must be 0 or 1, but is {sinks}: a second one depends on the text")
    if memory not in ("episodic", None):
        raise ValueError(f"`memory` must be 'episodic' or None, but is {memory!r}")
    rope = {name: value for name, value in config.rope_parameters.items() if name != "type"}
    converted = {name: getattr(config, name) for name in COPIED_FIELDS} | dict(
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rope_parameters=rope | {"partial_rotary_factor": rope.get("partial_rotary_factor") or 1.0},
        attention_bias=config.model_type == "qwen2" or getattr(config, "attention_bias", False),
        qk_norm=config.model_type == "qwen3",
        variant="mag",
        sliding_window=window,
        num_persistent_tokens=sinks,
        persistent_distance=min(SINK_DISTANCE, window) if sinks else 0,
        memory_layers=sorted(memory_layers),
    )
    if memory == "episodic":
        # The fit takes directions of the hidden states as keys.
        key_size = min(TitansConfig.token_memory_key_size, config.hidden_size)
        converted |= EPISODIC | {"token_memory_key_size": key_size}
    return TitansConfig(**converted | fields)


def _first_token(config: TitansConfig, given: int | None) -> int | None:
    """Returns the token that texts begin with; None without persistent tokens. Raises ValueError for one outside of the
    vocabulary, and if the configuration has neither a begin token nor an end token.
    """
    if not config.num_persistent_tokens:
        return None
    tokens = [given, config.bos_token_id, config.eos_token_id]
    tokens = [token[0] if isinstance(token, list) else token for token in tokens if token is not None]
    if not tokens or not 0 <= tokens[0] < config.vocab_size:
        found = f"is {tokens[0]}" if tokens else "the configuration has no begin token and no end token either"
        raise ValueError(f"`first_token` must be from 0 to {config.vocab_size - 1}, but {found}")
    return tokens[0]


def _dtype_of(weights: Mapping[str, Tensor]) -> torch.dtype:
    return next(iter(weights.values())).dtype


def make_skeleton(config: TitansConfig, dtype: torch.dtype) -> TitansForCausalLM:
    """Returns a model on the meta device, without weights."""
    with torch.device("meta"):
        return TitansForCausalLM(config).to(dtype)


def convert_parts(
    model: TitansForCausalLM, weights: Mapping[str, Tensor], first_token: int | None
) -> Iterator[tuple[str, nn.Module]]:
    """Fills the parts of a model on the meta device with weights, one after the other, and yields each with its name.

    weights: the original's by name. first_token: makes the persistent token, if there is one.

    Raises ValueError for missing, unknown or misshapen weights.
    """
    names = original_names(model, weights)
    state, dtype = None, model.dtype
    base = model.model
    parts = {"model.embed_tokens": base.embed_tokens, "model.norm": base.norm, "lm_head": model.lm_head}
    parts |= {f"model.layers.{i}": layer for i, layer in enumerate(base.layers)}
    parts |= {f"model.{name}": x for name, x in base.named_children() if name not in ("embed_tokens", "layers", "norm")}
    in_order = dict.fromkeys(next(p for p in parts if name.startswith(f"{p}.")) for name in model.state_dict())
    for prefix in in_order:
        part = parts[prefix]
        if prefix == "lm_head" and model.config.tie_word_embeddings:
            continue
        part.to_empty(device="cpu")
        part.to(torch.promote_types(dtype, torch.float32))
        part.apply(model._init_weights)
        _fill(part, prefix, weights, names)
        if prefix == "model.embed_tokens" and first_token is not None:
            state = part.weight[first_token].detach().clone()[None, None]
        if isinstance(part, TitansDecoderLayer):
            state = _fill_layer(part, state)
        part.to(dtype)
        yield prefix, part


def _is_tied(config: TitansConfig, name: str) -> bool:
    return config.tie_word_embeddings and name == "lm_head.weight"


def original_names(model: TitansForCausalLM, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the original's name of every weight that has one. Raises ValueError for missing or unknown weights."""
    names = {}
    for name in model.state_dict():
        layer = re.match(r"model\.layers\.\d+\.", name)
        if layer is not None:
            part = name.removeprefix(layer[0])
            for theirs, ours in PARTS.items():
                if part.startswith(ours):
                    names[name] = layer[0] + theirs + part.removeprefix(ours)
        elif name.startswith(("model.embed_tokens.", "model.norm.", "lm_head.")) and not _is_tied(model.config, name):
            names[name] = name
    known = {*names.values(), "lm_head.weight"}
    # Qwen2 has biases in its projections of queries, keys and values alone.
    missing = [x for x in names.values() if x not in weights and not x.endswith("self_attn.o_proj.bias")]
    unknown = [x for x in weights if x not in known and not x.endswith(BUFFERS)]
    if missing or unknown:
        problem = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which a Titans has no place for"
        raise ValueError(f"the weights do not fit the configuration: the checkpoint {problem}")
    return names


@torch.no_grad()
def _fill(part: nn.Module, prefix: str, weights: Mapping[str, Tensor], names: dict[str, str]) -> None:
    """Copies the original's weights into a part of the model. Raises ValueError for a weight of another shape."""
    for name, x in part.state_dict().items():
        original = names.get(f"{prefix}.{name}")
        if original is None:
            continue
        if original not in weights:
            x.zero_()
        elif (value := weights[original]).shape != x.shape:
            raise ValueError(f"{original} must be {tuple(x.shape)}, but is {tuple(value.shape)}")
        else:
            x.copy_(value)


@torch.no_grad()
def _fill_layer(layer: TitansDecoderLayer, first: Tensor | None) -> Tensor | None:
    """Sets the persistent token of a layer and, where it has a memory, makes its output 0.

    first (1, 1, hidden): the layer's input at the first position of every text; None without persistent tokens. Returns
    its output there.
    """
    mixer, attention = layer.mixer, layer.mixer.attention
    if first is not None:
        inputs = layer.mixer_norm(first)
        mixer.persistent.copy_(inputs[0])
        values = attention.project_keys_and_values(inputs).values  # it attends to itself alone
        attended = values.repeat_interleave(attention.num_key_value_groups, dim=2).flatten(2)
        first = first + attention.o_proj(attended)
        first = first + layer.mlp(layer.mlp_norm(first))
    if mixer.memory is not None:  # y sigmoid(0) + 0: half of twice the original's y
        for parameter in attention.o_proj.parameters():
            parameter.mul_(2)
        mixer.memory.o_proj.weight.zero_()
        mixer.memory_norm.weight.zero_()
    return first


def generation_config_of(model: PreTrainedModel | str | Path, config: TitansConfig) -> GenerationConfig:
    """Returns the model's settings of `generate()`; if it has none, the settings that its configuration gives."""
    try:
        given = getattr(model, "generation_config", None) or GenerationConfig.from_pretrained(model)
        given = GenerationConfig.from_dict(given.to_dict())
    except (OSError, TypeError):  # a GGUF or an old checkpoint has no such file
        given = GenerationConfig.from_model_config(config)
    if given.cache_implementation not in CACHES:
        given.cache_implementation = None
    return given
