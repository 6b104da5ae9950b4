"""Texts as tokens of a small byte-level BPE, made from the texts themselves."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def make_tokenizer(files: list[Path], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE on every third file."""
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
    return tokenizer


def read_documents(files: list[Path], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Tokenizes each file to int64 ids."""
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    return [np.array(x.ids) for x in tokenizer.encode_batch_fast(texts)]


def cut_blocks(documents: list[np.ndarray], length: int) -> np.ndarray:
    """Cuts documents into blocks: (N, length) ids; the rest of each document is left out."""
    return np.concatenate([ids[: len(ids) // length * length].reshape(-1, length) for ids in documents])


def cut_stretches(documents: list[np.ndarray], length: int, number: int) -> np.ndarray:
    """Takes `number` stretches of each document, spread evenly over it: (documents * number, length + 1) ids."""
    starts = [(ids, start) for ids in documents for start in np.linspace(0, len(ids) - length - 1, number).astype(int)]
    return np.stack([ids[start : start + length + 1] for ids, start in starts])
