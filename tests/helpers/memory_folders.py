"""Memory folders: comparing, saving and changing them in tests."""

import json
from pathlib import Path

import torch
from common import make_ids, read, shared_model
from transformers import PreTrainedModel

from titans_hf import TitansCache, cache_files

IDS = make_ids(2, 60)


def everything(cache: TitansCache) -> dict[str, torch.Tensor]:
    return {f"{i}.{name}": x for i, layer in enumerate(cache.layers) for name, x in layer.named_tensors().items()}


def assert_equal(actual: TitansCache, expected: TitansCache) -> None:
    """Asserts that tensors are equal bit by bit, and so is everything that is not a tensor."""
    ours, theirs = everything(actual), everything(expected)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    facts = [[(x.num_columns, x.record_past, x.is_initialized) for x in cache.layers] for cache in (actual, expected)]
    assert facts[0] == facts[1] and actual.about == expected.about


def names(folder: Path) -> set[str]:
    """The files of a memory folder, without the lock."""
    return {path.name for path in folder.iterdir()} - {cache_files.LOCK}


def saved(cache: TitansCache, model: PreTrainedModel, folder: Path) -> TitansCache:
    cache.save_pretrained(folder, model)
    return TitansCache.from_pretrained(folder, model)


def describe(folder: Path, *lost: str, **changes) -> None:
    path = folder / "memory.json"
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: x for name, x in found.items() if name not in lost}))


def save_memory(folder: Path) -> tuple[PreTrainedModel, Path]:
    """Saves what a model remembers of IDS; returns the model and the folder."""
    model = shared_model("mag")
    read(model, IDS)[1].save_pretrained(folder, model)
    return model, folder
