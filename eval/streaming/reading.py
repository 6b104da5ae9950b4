"""Texts, and questions after them."""

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


class Question(NamedTuple):
    """What is read after a context, and what is right: one of some options, or all strings in a generated answer."""

    kind: str
    text: str
    value: str | list[str]
    options: list[str] = []
    generated: int = 0  # tokens of an answer, at most; 0 with options


def load_texts(path: Path, tokenizer: PreTrainedTokenizerBase, tokens: int, place: float) -> dict[str, Tensor]:
    """Returns the first `tokens` ids after the share `place` of each text of a folder or a file, by name.

    A .raw file is cut into its articles, at lines such as " = Title = ". Texts that are too short are left out.
    """
    texts = {}
    for file in sorted(x for x in path.rglob("*") if x.is_file()) if path.is_dir() else [path]:
        text = file.read_text(encoding="utf-8", errors="replace")
        is_raw = file.suffix == ".raw"
        parts = re.split(r"^ = ([^=\n]+) = *$", text, flags=re.MULTILINE) if is_raw else ["", file.name, text]
        texts |= {title.strip(): part for title, part in zip(parts[1::2], parts[2::2], strict=True)}
    result = {}
    for name, text in texts.items():
        begin = text.find("\n", int(len(text) * place)) + 1 if place else 0
        ids = tokenizer(text[begin : begin + 8 * tokens], add_special_tokens=False)["input_ids"][:tokens]
        if len(ids) == tokens:
            result[name] = torch.tensor(ids)
    return result
