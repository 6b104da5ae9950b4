"""Texts as tokens of a small byte-level BPE, made from the texts themselves and kept for the next run."""

import hashlib
import json
import os
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def make_tokenizer(files: list[Path], vocab_size: int, cache: Path) -> Tokenizer:
    """Trains a byte-level BPE on every third file, or loads the BPE that was trained on these files before."""
    path = cache / f"bpe-{vocab_size}-{_digest(files)}.json"
    if path.is_file():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>"],
        show_progress=False,
    )
    tokenizer.train([str(file) for file in files[::3]], trainer)
    cache.mkdir(parents=True, exist_ok=True)
    _write_at_once(path, tokenizer.to_str().encode())
    return tokenizer


def read_documents(files: list[Path], tokenizer: Tokenizer, cache: Path) -> list[np.ndarray]:
    """Tokenizes each file to uint16 ids, or loads what these files gave before."""
    name = hashlib.sha256((_digest(files) + tokenizer.to_str()).encode()).hexdigest()[:16]
    path = cache / f"ids-{name}.npz"
    if not path.is_file():
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        documents = [np.array(x.ids, dtype=np.uint16) for x in tokenizer.encode_batch_fast(texts)]
        with tempfile.TemporaryFile() as stream:
            np.savez(stream, *documents)
            stream.seek(0)
            _write_at_once(path, stream.read())
    with np.load(path) as stored:
        return [stored[key] for key in stored.files]


def cut_blocks(documents: list[np.ndarray], length: int) -> np.ndarray:
    """Cuts documents into blocks: (N, length) ids; the rest of each document is left out."""
    blocks = [ids[: len(ids) // length * length].reshape(-1, length) for ids in documents]
    return np.concatenate(blocks).astype(np.int64)


def cut_stretches(documents: list[np.ndarray], length: int, number: int) -> np.ndarray:
    """Takes `number` stretches of each document, spread evenly over it: (documents * number, length + 1) ids."""
    stretches = []
    for ids in documents:
        starts = np.linspace(0, len(ids) - length - 1, number).astype(int)
        stretches += [ids[start : start + length + 1] for start in starts]
    return np.stack(stretches).astype(np.int64)


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(json.dumps([(file.name, file.stat().st_size) for file in files]).encode()).hexdigest()[:16]


def _write_at_once(path: Path, content: bytes) -> None:
    """Writes a file under a name of its own first, so that a run beside this one never reads half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
    Path(name).replace(path)
