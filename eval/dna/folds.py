"""Folds of DNA sequences: what overlaps, also with the other strand, is never on both sides of a split."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from sklearn.model_selection import StratifiedGroupKFold

from eval.dna.sequences import BASES, reverse_complement

K = 32  # bases in common that join two sequences, as many as fit into 64 bits
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
    texts = sequences["seq"].tolist()
    either_strand = np.array([min(text, reverse_complement(text)) for text in texts])
    kinds = [_kmers(texts), (either_strand, np.arange(len(texts)))]
    left, right = np.concatenate([_shared(*kind) for kind in kinds]).T
    graph = coo_array((np.ones(len(left), bool), (left, right)), shape=(len(texts),) * 2)
    return connected_components(graph, directed=False)[1]


def _kmers(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the K-mers without N of all texts, uint64, the lesser of both strands, and the texts that they are of."""
    joined = "N".join([*texts, ""])
    table = np.zeros(128, np.uint64)
    table[[ord(base) for base in BASES]] = range(len(BASES))  # A, C, G, T are 0 to 3: 3 - code is the complement
    codes = table[np.frombuffer(joined.encode(), np.uint8)]
    size = max(0, len(codes) - K + 1)
    forward, backward = np.zeros(size, np.uint64), np.zeros(size, np.uint64)
    for i in range(K):
        base = codes[i : i + size] & np.uint64(3)
        forward = forward << np.uint64(2) | base
        backward |= (np.uint64(3) - base) << np.uint64(2 * i)
    before = np.concatenate([[0], np.cumsum(codes == BASES.index("N"))])
    whole = before[K:] == before[:size]
    owners = np.repeat(np.arange(len(texts)), [len(text) + 1 for text in texts])[:size]
    return np.minimum(forward, backward)[whole], owners[whole]


def _shared(keys: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Returns edges (E, 2) that connect all owners of each key."""
    order = np.lexsort((owners, keys))
    keys, owners = keys[order], owners[order]
    joined = (keys[1:] == keys[:-1]) & (owners[1:] != owners[:-1])
    return np.stack([owners[:-1][joined], owners[1:][joined]], 1)


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
