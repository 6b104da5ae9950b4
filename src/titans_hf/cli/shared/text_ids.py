"""Converts text to token ids and back, in the same way for all commands."""

import itertools
from typing import Any

import torch
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from titans_hf.cli.shared.text_files import normalize_newlines


def encode(tokenizer: PreTrainedTokenizerBase, texts: str | list[str], **options) -> BatchEncoding:
    """Tokenizes a text or a list of texts. No special token is added, and text that looks like one ("</s>") is text.

    options: keyword arguments of the tokenizer. Offsets refer to the text after `normalize_newlines`.
    """
    texts = normalize_newlines(texts) if isinstance(texts, str) else [normalize_newlines(text) for text in texts]
    return tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False, **options)


def pad_left(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Returns the ids of rows (B, T), padded on the left with 0, and their mask (B, T)."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(longest, 0, -1) <= lengths[:, None]).long()


def decode_answer(tokenizer: PreTrainedTokenizerBase, prompt: list[int], answer: list[int]) -> str:
    """Returns the text that an answer's ids add to a prompt's text, without special tokens. Both are decoded together:
    the space before an answer's first word would be lost if its ids were decoded alone.
    """
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *answer]))
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))
    return whole[sum(1 for _ in same) :]


def end_tokens(*sources: Any) -> tuple[int, ...]:
    """Returns the end tokens of the first of some generation configs and tokenizers that has any."""
    for found in (source.eos_token_id for source in sources):
        if found is not None:
            return (found,) if isinstance(found, int) else tuple(map(int, found))
    return ()
