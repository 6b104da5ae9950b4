"""The configuration of a run, with its overrides, and the parameters that are trained."""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from titans_hf.cli.shared import checkpoints
from titans_hf.cli.training.size import fit_widths
from titans_hf_console import RunArguments

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
PYTHON_WORDS = {"True": True, "False": False, "None": None}


def load_config(args: RunArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Loads the configuration with its overrides, of the size asked for; from scratch it gets the tokenizer's special
    tokens.

    The configuration is built anew, so that derived values follow overridden values. Raises ValueError for overrides
    that the configuration does not take, for a size that it cannot have, and for a vocabulary smaller than the
    tokenizer's.
    """
    config, source = find_config(args)
    overrides = parse_overrides(args.config_overrides)
    for name in [name for name in overrides if name not in config.to_dict()]:
        raise ValueError(f"--config_overrides: {config.model_type} has no {name}")
    settings, _ = PreTrainedConfig.get_config_dict(source)
    try:
        config = type(config)(**settings | overrides)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"--config_overrides {args.config_overrides}: {error}") from error
    if config.vocab_size < len(tokenizer):
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, more than the vocab_size {config.vocab_size}: give another "
            f"--tokenizer, or for a new model --config_overrides vocab_size={len(tokenizer)}"
        )
    if args.num_parameters is not None:
        sizes = fit_widths(config, settings | overrides, set(overrides), args.num_parameters)
        config = type(config)(**settings | overrides | sizes)
    if args.config is not None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
    return config


def find_config(args: RunArguments) -> tuple[PreTrainedConfig, str]:
    """Loads the configuration that --config or --model_name_or_path names; returns it and its file or folder.

    Raises ValueError for a name that is neither in CONFIGS nor a checkpoint.
    """
    source, argument = args.model_name_or_path, "--model_name_or_path"
    if args.config is not None:
        shipped, argument = CONFIGS / f"{args.config}.json", "--config"
        source = str(shipped) if shipped.exists() and not Path(args.config).exists() else args.config
    try:
        return checkpoints.load_config(source, argument), source
    except ValueError as error:
        if args.config is None or Path(source).exists():
            raise
        names = ", ".join(sorted(path.stem for path in CONFIGS.glob("*.json")))
        raise ValueError(f"{error}; configurations by name: {names}") from error


def refuse_unknown(options: list[str], args: RunArguments) -> None:
    """Raises ValueError if there are options that no parser knows. Of fields of the model's configuration, the error
    names the option that sets them.
    """
    given = re.findall(r"--(\w+)(?:[= ](.*?))?(?= --\w|$)", " ".join(options))
    if not options:
        return
    config, _ = find_config(args)
    fields = [f"{name}={value or 'true'}" for name, value in given if name in config.to_dict()]
    if len(fields) < len(given) or not fields:
        raise ValueError(f"there is no option {' '.join(options)}: titans-hf train --help shows the options")
    overrides = ",".join([args.config_overrides] * bool(args.config_overrides) + fields)
    raise ValueError(f"--{given[0][0]} is a field of the model's configuration: give --config_overrides {overrides}")


def freeze_all_but_memory(model: PreTrainedModel) -> None:
    """Leaves gradients only to the parameters of the memories: in the layers, behind the last layer, and the norms of
    their outputs. Raises ValueError for a model without a memory.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("memory" in name)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("--train_only memory: this model has no memory")


def parse_overrides(text: str) -> dict[str, Any]:
    """Parses `name=value,name=value`; a comma that no `name=` follows belongs to a value."""
    items = [item.partition("=") for item in re.split(r",(?=\s*\w+=)", text) if item]
    return {name.strip(): parse_value(value) for name, _, value in items}


def parse_value(text: str) -> Any:
    """Parses JSON or True, False, None; anything else is text."""
    try:
        return PYTHON_WORDS[text] if text in PYTHON_WORDS else json.loads(text)
    except json.JSONDecodeError:
        return text
