"""The model of a run: from a configuration and its overrides, or from the weights of a checkpoint."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from titans_hf.cli.shared import checkpoints
from titans_hf.cli.training.arguments import ModelArguments

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
PYTHON_WORDS = {"True": True, "False": False, "None": None}


def check_model_arguments(args: ModelArguments) -> None:
    """Raises ValueError unless either a configuration with a tokenizer or a checkpoint with whole weights is given."""
    if (args.config is None) == (args.model_name_or_path is None):
        raise ValueError("give either --config, to train from scratch, or --model_name_or_path, to go on from weights")
    if args.config is not None and args.tokenizer is None:
        raise ValueError("--config needs a --tokenizer: a folder, a name on the Hub, or the word bytes")
    if args.model_name_or_path is not None:
        checkpoints.check_weights(args.model_name_or_path, "--model_name_or_path")


def load_config(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Loads the configuration with its overrides.

    From scratch it gets the tokenizer's special tokens. Raises ValueError for overrides that the configuration does not
    take, and for a vocabulary smaller than the tokenizer's.
    """
    source = args.model_name_or_path if args.config is None else str(_config_path(args.config))
    argument = "--model_name_or_path" if args.config is None else "--config"
    config = override(checkpoints.load_config(source, argument), source, args.config_overrides)
    if config.vocab_size < len(tokenizer):
        mend = f"--config_overrides vocab_size={len(tokenizer)}"
        if args.config is None:
            mend = "the checkpoint's own tokenizer, by leaving --tokenizer out"
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, more than the vocab_size {config.vocab_size}: give {mend}"
        )
    if args.config is not None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
    return config


def _config_path(config: str) -> Path:
    """Returns the path of `--config`: a file, or the name of a configuration of this package."""
    path, shipped = Path(config), CONFIGS / f"{config}.json"
    if path.exists():
        return path
    if shipped.exists():
        return shipped
    names = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.json")))
    raise FileNotFoundError(
        f"--config {config}: no such file or folder, nor a configuration of this package, which are {names}"
    )


def unused_weights(config: str) -> str | None:
    """Returns a warning where weights lie beside the configuration, which training from scratch does not use."""
    path = Path(config)
    folder = path.parent if path.name == "config.json" else path
    if not any(file for pattern in WEIGHTS for file in folder.glob(pattern)):
        return None
    return (
        f"--config {config} takes the configuration alone: training starts from scratch, without the weights in "
        f"{folder}. To go on from them give --model_name_or_path {folder}"
    )


def load_model(args: ModelArguments, config: PreTrainedConfig) -> PreTrainedModel:
    """Makes the model from scratch, or loads its weights, in float32: mixed precision is an option of the training.

    Raises ValueError for weights of other shapes than the configuration's, and for damaged ones.
    """
    if args.model_name_or_path is None:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    argument = "--model_name_or_path"
    return checkpoints.load_model(args.model_name_or_path, argument, config=config, dtype=torch.float32)


def override(config: PreTrainedConfig, source: str, overrides: str) -> PreTrainedConfig:
    """Builds a configuration anew with overrides, so that values derived from an overridden one follow it.

    Raises ValueError for unknown names and for values of another type.
    """
    if not overrides:
        return config
    settings, _ = PreTrainedConfig.get_config_dict(source)
    known = config.to_dict()
    for item in split_overrides(overrides):
        name, given, value = item.partition("=")
        if not given:
            raise ValueError(f"--config_overrides: {item} has no value, as in {item}=1")
        first, *nested = name.strip().split(".")
        if first not in known:
            raise ValueError(f"--config_overrides: {config.model_type} has no {first}")
        settings[first] = _replace(settings.get(first, known[first]), nested, parse_value(value.strip()), name)
    try:
        return type(config)(**settings)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"--config_overrides {overrides}: {error}") from error


def _replace(value: Any, names: list[str], new: Any, path: str) -> Any:
    """Returns a copy of a nested dictionary with the entry at `names` replaced."""
    if not names:
        return new
    if not isinstance(value, dict) or names[0] not in value:
        present = f", only {', '.join(value)}" if isinstance(value, dict) else ""
        raise ValueError(f"--config_overrides: there is no {path}{present}")
    value = copy.copy(value)
    value[names[0]] = _replace(value[names[0]], names[1:], new, path)
    return value


def split_overrides(text: str) -> list[str]:
    """Splits at commas outside of brackets, braces and quotes."""
    items, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        if not quoted:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quoted:
            items.append("")
        else:
            items[-1] += letter
    return [item.strip() for item in items if item.strip()]


def parse_value(text: str) -> Any:
    """Parses JSON or True, False, None; anything else is text."""
    if text in PYTHON_WORDS:
        return PYTHON_WORDS[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
