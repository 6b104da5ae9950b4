"""Loads the parts of a checkpoint. A part that does not load raises a ValueError that names the checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from titans_hf.cli.shared.hub import go_offline_without_network

SIZES_DIFFER = "ignore_mismatched_sizes"  # in the RuntimeError of transformers


def check_checkpoint(path: str | Path, argument: str) -> None:
    """Checks a checkpoint before another package loads it. No weights are read; a name on the Hub is not looked at.

    Raises ValueError for a folder whose configuration does not load, and for a Titans that `load_model` refuses.
    """
    go_offline_without_network(path)
    if Path(path).is_dir() and load_config(path, argument).model_type == "titans":  # others may have another head
        load_model(path, argument, device_map="meta")


@contextmanager
def loading_weights(path: str | Path, argument: str) -> Iterator[None]:
    """Raises ValueError for weights that the block cannot load because a file is damaged, or because they have other
    sizes than the configuration's; transformers prints a list of them.
    """
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{argument} {path} has damaged weights: {error}") from error
    except RuntimeError as error:
        if SIZES_DIFFER not in str(error):
            raise
        raise ValueError(
            f"{argument} {path} has weights of other sizes than its configuration: the report above lists them"
        ) from error


def load_config(path: str | Path, argument: str) -> PreTrainedConfig:
    """Loads the configuration of a checkpoint, or of a JSON file. Raises ValueError if there is none, or a bad one.

    argument: the name of the path in errors, as in "MODEL".
    """
    go_offline_without_network(path)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, StrictDataclassError) as error:
        if not Path(path).exists():
            reason = "no such folder, and not available from the Hub"
        else:
            reason = f"its configuration does not load ({error})"
        raise ValueError(f"{argument} {path} is not a checkpoint: {reason}") from error


def load_tokenizer(path: str | Path, argument: str) -> PreTrainedTokenizerBase:
    """Loads a tokenizer by its folder or name on the Hub. Raises ValueError if there is none, or a damaged one."""
    go_offline_without_network(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        usable = bool(tokenizer("a b").input_ids)
    except Exception as error:  # the classes raise different errors without their files, or with damaged ones
        known = Path(path).exists()
        reason = f"it does not load ({error})" if known else "no such folder, and not available from the Hub"
        raise ValueError(f"{argument} {path} has no tokenizer: {reason}") from error
    if not usable:
        raise ValueError(f"{argument} {path} has no tokenizer: its vocabulary is empty")
    return tokenizer


def load_model(path: str | Path, argument: str, **options: Any) -> PreTrainedModel:
    """Loads a causal language model; `options` are arguments of `from_pretrained`. With another `config` than the
    checkpoint's, weights that the checkpoint lacks are initialised.

    Raises ValueError as `loading_weights` does. Without a `config` it also raises ValueError for a checkpoint that
    lacks weights: a classifier's checkpoint has no language model's head.
    """
    with loading_weights(path, argument):
        model, found = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    if "config" not in options and (missing := sorted(found["missing_keys"])):
        made_as = " and ".join(model.config.architectures or ["no class that it names"])
        raise ValueError(
            f"{argument} {path} is not a complete {type(model).__name__}: it was saved as {made_as} and has no "
            f"{missing[0]}" + (f" and {len(missing) - 1} other weights" if missing[1:] else "")
        )
    return model
