"""Labelled DNA sequences: tables as data frames, a token per base, and folds.

What overlaps, also with the other strand, is never on both sides of a split.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from sklearn.model_selection import StratifiedGroupKFold

BASES = "ACGTN"
PAD, END = 0, 1  # the tokens before those of the bases
TOKENS = {base: token for token, base in enumerate(BASES, END + 1)}
VOCAB_SIZE = END + 1 + len(BASES)
K = 32  # bases in common that join two sequences
VALIDATION_PARTS = 10  # a tenth of the sequences that are not tested


Fold = tuple[np.ndarray, np.ndarray, np.ndarray]  # rows of the parts to train, to validate and to test on


def read_sequences(path: Path) -> pd.DataFrame:
    """Reads a table with the columns `seq`, of A, C, G, T and N, and `label`; comma-separated or tab-separated (.tsv),
    also gzipped. Raises ValueError, naming the sequence, for an empty label or another letter.
    """
    options = {"dtype": str, "encoding": "utf-8-sig", "keep_default_na": False, "usecols": ["seq", "label"]}
    table = pd.read_csv(path, sep="\t" if ".tsv" in path.suffixes else ",", **options)
    table["seq"] = table["seq"].str.upper()
    wrong = table[~table["seq"].str.fullmatch(f"[{BASES}]+") | (table["label"] == "")]
    if len(wrong):
        row = f"sequence {wrong.index[0] + 1} is {dict(wrong.iloc[0])}"
        raise ValueError(f"{path}: a sequence must have a label and letters of {BASES}, but {row}")
    return table


def reverse_complement(text: str) -> str:
    """Returns the other strand in its own direction: A for T, C for G, from end to start; N stays N."""
    return text.translate(str.maketrans("ACGTN", "TGCAN"))[::-1]


def group_sequences(sequences: pd.DataFrame) -> np.ndarray:
    """Returns the group (N,) int of each sequence, from 0.

    A group is a connected component of the graph whose edges join sequences that have K bases in a row in common, on
    the same strand or with the other's reverse complement, and sequences that are equal on either strand.
    """
    first, edges = {}, []  # the first sequence with a stretch
    for row, text in enumerate(sequences["seq"]):
        other = reverse_complement(text)
        pairs = ((text[i : i + K], other[len(text) - K - i : len(text) - i]) for i in range(len(text) - K + 1))
        stretches = {min(pair) for pair in pairs if "N" not in pair[0]} | {min(text, other)}
        edges += [(row, owner) for owner in {first.setdefault(x, row) for x in stretches} if owner != row]
    left, right = np.array(edges, dtype=int).reshape(-1, 2).T
    graph = coo_array((np.ones(len(edges), bool), (left, right)), shape=(len(sequences),) * 2)
    return connected_components(graph, directed=False)[1]


def make_folds(sequences: pd.DataFrame, number: int) -> list[Fold]:
    """Returns `number` folds, whose test parts are all sequences once; of the others, a tenth is the validation part.
    The parts have similar shares of labels, and no group is in two parts of a fold.
    """
    groups, labels = group_sequences(sequences), sequences["label"].to_numpy()

    def split(rows: np.ndarray, parts: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        splitter = StratifiedGroupKFold(parts, shuffle=True, random_state=0)
        for outside, inside in splitter.split(rows, labels[rows], groups[rows]):
            yield rows[outside], rows[inside]

    return [(*next(split(rest, VALIDATION_PARTS)), test) for rest, test in split(np.arange(len(labels)), number)]
