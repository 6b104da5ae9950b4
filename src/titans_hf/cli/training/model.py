"""The model of a run: from a configuration and its overrides, or from the weights of a checkpoint."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from titans_hf.cli.shared import checkpoints
from titans_hf.cli.training.arguments import ModelArguments

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
PYTHON_WORDS = {"True": True, "False": False, "None": None}


def check_model_arguments(args: ModelArguments) -> None:
    """Raises ValueError unless either a configuration with a tokenizer or a checkpoint is given."""
    if (args.config is None) == (args.model_name_or_path is None):
        raise ValueError("give either --config, to train from scratch, or --model_name_or_path, to go on from weights")
    if args.config is not None and args.tokenizer is None:
        raise ValueError("--config needs a --tokenizer: a folder, a name on the Hub, or the word bytes")


def load_config(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Loads the configuration with its overrides.

    From scratch it gets the tokenizer's special tokens. Raises ValueError for overrides that the configuration does not
    take, and for a vocabulary smaller than the tokenizer's.
    """
    source, argument = args.model_name_or_path, "--model_name_or_path"
    if args.config is not None:
        shipped, argument = CONFIGS / f"{args.config}.json", "--config"
        source = str(shipped) if shipped.exists() and not Path(args.config).exists() else args.config
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
    settings, _ = PreTrainedConfig.get_config_dict(source)
    for item in split_overrides(overrides):
        name, _, value = item.partition("=")
        if name not in config.to_dict():
            raise ValueError(f"--config_overrides: {config.model_type} has no {name}")
        settings[name] = parse_value(value)
    try:
        return type(config)(**settings)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"--config_overrides {overrides}: {error}") from error


def split_overrides(text: str) -> list[str]:
    """Splits at the commas that come before a name and its `=`: other commas belong to a value."""
    return [item.strip() for item in re.split(r",(?=\s*\w+=)", text) if item]


def parse_value(text: str) -> Any:
    """Parses JSON or True, False, None; anything else is text."""
    if text in PYTHON_WORDS:
        return PYTHON_WORDS[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
