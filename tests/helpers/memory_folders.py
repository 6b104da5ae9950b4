"""Memory folders: comparing, saving and changing them in tests."""

import json
import shutil
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
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        assert ours[name].dtype == x.dtype and torch.equal(ours[name], x), name
    for ours, theirs in zip(actual.layers, expected.layers, strict=True):
        for name in ("num_columns", "record_past", "is_initialized"):
            assert getattr(ours, name) == getattr(theirs, name), name
    assert actual.about == expected.about


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


def copied(memory: tuple[PreTrainedModel, Path], folder: Path) -> tuple[PreTrainedModel, Path]:
    """Copies a memory folder to a new one, which a test may damage."""
    return memory[0], shutil.copytree(memory[1], folder, dirs_exist_ok=True)


def save_memory(folder: Path) -> tuple[PreTrainedModel, Path]:
    """Saves what a model remembers of IDS; returns the model and the folder."""
    model = shared_model("mag")
    read(model, IDS)[1].save_pretrained(folder, model)
    return model, folder
