"""Labelled DNA sequences: tables as data frames, the reverse complement, and a token per base."""

import zlib
from pathlib import Path

import pandas as pd

BASES = "ACGTN"
PAD, END = 0, 1  # the tokens before those of the bases
TOKENS = {base: token for token, base in enumerate(BASES, END + 1)}
VOCAB_SIZE = END + 1 + len(BASES)
COMPLEMENT = str.maketrans("ACGTN", "TGCAN")


def reverse_complement(text: str) -> str:
    """Returns the other strand in its own direction: A for T, C for G, from end to start; N stays N."""
    return text.translate(COMPLEMENT)[::-1]


def tokenize(text: str) -> list[int]:
    """Returns the token of each base, and END."""
    return [*map(TOKENS.__getitem__, text), END]


def read_sequences(path: Path) -> pd.DataFrame:
    """Reads a table with the columns `seq`, of A, C, G, T and N, and `label`; comma-separated or tab-separated (.tsv),
    also gzipped.

    Raises ValueError, naming file and sequence, for a file that cannot be read, an empty label or another letter.
    """
    options = {"dtype": str, "encoding": "utf-8-sig", "keep_default_na": False, "usecols": ["seq", "label"]}
    try:
        table = pd.read_csv(path, sep="\t" if ".tsv" in path.suffixes else ",", **options)
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    table["seq"] = table["seq"].str.upper()
    wrong = table[~table["seq"].str.fullmatch(f"[{BASES}]+") | (table["label"] == "")]
    if table.empty or len(wrong):
        row = f"sequence {wrong.index[0] + 1} is {dict(wrong.iloc[0])}" if len(wrong) else "it has none"
        raise ValueError(f"{path}: a sequence must have a label and letters of {BASES}, but {row}")
    return table[["seq", "label"]]
