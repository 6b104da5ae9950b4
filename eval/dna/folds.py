"""Folds of DNA sequences: what overlaps, also with the other strand, is never on both sides of a split."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from sklearn.model_selection import StratifiedGroupKFold

from eval.dna.sequences import reverse_complement

K = 32  # bases in common that join two sequences
VALIDATION_PARTS = 10  # a tenth of the sequences that are not tested


class Fold(NamedTuple):
    """Rows of a fold's three parts."""

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray


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

    Raises ValueError if a class has fewer groups than there are folds, or a tenth cannot be held out.
    """
    groups, labels = group_sequences(sequences), sequences["label"].to_numpy()

    def split(rows: np.ndarray, parts: int, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        fewest = pd.Series(groups[rows]).groupby(labels[rows]).nunique().min()
        if fewest < parts:
            raise ValueError(
                f"{name}: {parts} parts need as many groups of sequences in each class, but one has {fewest}"
            )
        splitter = StratifiedGroupKFold(parts, shuffle=True, random_state=0)
        for outside, inside in splitter.split(np.zeros(len(rows)), labels[rows], groups[rows]):
            yield rows[outside], rows[inside]

    def hold_out(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return next(split(rows, VALIDATION_PARTS, "the validation part"))

    splits = split(np.arange(len(labels)), number, f"--folds {number}")
    return [Fold(*hold_out(rest), test) for rest, test in splits]
