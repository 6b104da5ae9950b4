"""Models that have a memory, and their caches: a Titans has its own, any other causal language model gets one."""

import argparse
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from titans_hf import TitansCache, cache_files
from titans_hf.cli.shared.checkpoints import load_config, load_model, load_tokenizer
from titans_hf.cli.shared.devices import choose_device
from titans_hf.recalling import MemoryCache, files, remember

AnyCache = TitansCache | MemoryCache


def load_with_memory(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the model that the command's options name, with a memory, and its tokenizer.

    Raises ValueError for --window beside a Titans, which has its own memory, and as `remember` does.
    """
    kind, device = load_config(args.model, "MODEL").model_type, choose_device(args.device)
    if kind == "titans" and args.window is not None:
        raise ValueError(f"--window {args.window} is for other models: MODEL is a Titans, which has its own")
    given = {} if kind == "titans" else {"dtype": "auto"}
    model = load_model(args.model, "MODEL", **given).to(device).eval()
    if kind != "titans":
        remember(model, **({} if args.window is None else {"window": args.window}))
    return model, load_tokenizer(args.model, "MODEL")


def new_cache(model: PreTrainedModel) -> AnyCache:
    """Returns the cache of a model that has read nothing."""
    return MemoryCache(model) if hasattr(model, "memory") else TitansCache(model.config)


def fingerprint_for_memories(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the facts of the model on which its memory folders depend."""
    if hasattr(model, "memory"):
        return files.memory_fingerprint(model)
    return cache_files.model_fingerprint(model)


def load_cache(folder: Path, model: PreTrainedModel, facts: dict[str, Any]) -> AnyCache:
    """Loads a memory folder for the model with these facts, `fingerprint_for_memories`."""
    return type(new_cache(model)).from_pretrained(folder, model, model_fingerprint=facts)
