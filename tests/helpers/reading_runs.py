"""Runs of titans-hf read and the memory that a text should give, for the tests of read.py and ask.py."""

from pathlib import Path
from types import SimpleNamespace

import torch
from byte_model import save_byte_model

from titans_hf import TitansCache
from titans_hf.cli import read
from titans_hf.cli.training.tokenizer import byte_tokenizer

TEXT = "Es war einmal ein König, der hatte zwölf Töchter. 東京 " * 9
SPECIAL = "Er sagte </s> und <pad> und <unk>, sonst nichts. " * 4


def make_paths(folder: Path) -> SimpleNamespace:
    """Makes a checkpoint and a folder with TEXT in three parts; returns their paths, the model, and where to save."""
    model = save_byte_model(folder / "model", "mag")
    texts = folder / "texts"
    texts.mkdir()
    for name, part in zip(("a", "b", "c"), TEXT.split("Töchter", 2), strict=True):
        (texts / f"{name}.txt").write_text(part)
    (texts / "README.md").write_text("not a text to be read")
    return SimpleNamespace(model=str(folder / "model"), net=model, texts=texts, memory=folder / "memory")


def whole_text(paths) -> str:
    return "\n".join((paths.texts / f"{name}.txt").read_text() for name in "abc")


def ids_of(text: str) -> torch.Tensor:
    """Returns the ids of a text as in training, where special tokens in the text are text."""
    return byte_tokenizer()(text, return_tensors="pt", split_special_tokens=True).input_ids


def expected(paths, text: str) -> TitansCache:
    """Returns the cache of a model that reads the text in one call."""
    with torch.no_grad():
        return paths.net.model(ids_of(text), use_cache=True).cache


def load(paths, memory: Path | None = None) -> TitansCache:
    return TitansCache.from_pretrained(memory or paths.memory, paths.net)


def assert_has_read(paths, text: str, memory: Path | None = None) -> None:
    found, wanted = load(paths, memory), expected(paths, text)
    for ours, theirs in zip(found.layers, wanted.layers, strict=True):
        torch.testing.assert_close(ours.named_tensors(), theirs.named_tensors(), rtol=1e-4, atol=1e-4)
    assert found.get_seq_length() == ids_of(text).shape[1]


def flags(**options) -> list[str]:
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()]


def run_read(paths, *texts, **changes) -> read.Reading:
    options = dict(memory=paths.memory, piece=32, save_seconds=0) | changes
    return read.main([paths.model, *map(str, texts), *flags(**options)])


def stop_reading_at(number, monkeypatch) -> None:
    """Makes a reading raise KeyboardInterrupt when it has read `number` tokens or more of a text."""
    whole = read.Reading.read

    def read_piece(self, ids):
        whole(self, ids)
        if self.num_read >= number:
            raise KeyboardInterrupt

    monkeypatch.setattr(read.Reading, "read", read_piece)
