"""Memories behind any reader that need no training: each finds words that may come next, and is mixed in.

    p = (1 - l) p_model + l m,   l the share of what a memory says of itself (its bucket)

The shares of all buckets are found on choice texts, by expectation maximisation, for each reader anew.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from eval.streaming.readers import TOKEN_BYTES

LONGEST = 16  # tokens of a match


class Found(NamedTuple):
    """What a memory says of the next token of each position of a piece."""

    tokens: Tensor  # (K,), a token may occur twice
    weights: Tensor  # (T, K)
    buckets: Tensor  # (T,)

    def of_targets(self, targets: Tensor) -> Tensor:
        """Returns m of the targets, (T,) or of the first positions alone."""
        weights = self.weights[: len(targets)]
        return (weights * (self.tokens == targets[:, None])).sum(1)


class Match:
    """The token after the longest suffix of the text, of at most 16 tokens, that has occurred before; the last time."""

    num_buckets, options, share = LONGEST + 1, ({},), None  # share: one that is not fitted

    def prepare(self, states: Tensor) -> None:
        """Needs nothing of other texts."""

    def begin(self) -> None:
        """Forgets the text."""
        self.ids, self.after = [], {}

    def state_bytes(self) -> int:
        """Returns the bytes of the text: it could be searched anew at each token."""
        return TOKEN_BYTES * len(self.ids)

    def predict(self, ids: Tensor, states: Tensor) -> Found:
        """Reads ids (T,), and predicts after each of them; the bucket is the length of the match."""
        tokens, lengths = [], []
        for token in ids.tolist():
            for n in range(1, min(LONGEST, len(self.ids)) + 1):
                self.after[tuple(self.ids[-n:])] = token
            self.ids.append(token)
            suffixes = (tuple(self.ids[-n:]) for n in range(min(LONGEST, len(self.ids)), 0, -1))
            found = next((x for x in suffixes if x in self.after), ())
            tokens.append(self.after.get(found, token))
            lengths.append(len(found))
        lengths = torch.tensor(lengths)
        return Found(torch.tensor(tokens), torch.eye(len(ids)) * (lengths > 0)[:, None], lengths)


class Search(Match):
    """The longest match alone: wherever there is one, it is the answer."""

    share = 0.99


class Neural:
    """The neural cache (Grave et al. 2017): tokens whose states were like the last one, keys of 64 numbers of 8 bits.

    A key is a state's principal directions, each divided by the fourth root of its variance. The sharpness is chosen;
    the bucket is the largest weight of an entry's word.
    """

    num_buckets, share, options = 5, None, tuple({"sharpness": x} for x in (8.0, 12.0, 18.0, 26.0))

    dtype, nearest = torch.int8, 10**9  # of the keys; the number of entries that have a weight

    def __init__(self, sharpness: float = 0.0, entries: int = 10240, size: int = 64):
        self.sharpness, self.entries, self.size = sharpness, entries, size  # size: at most that of the states

    def encode(self, states: Tensor) -> Tensor:
        """Makes the queries (T, size) of states."""
        return normalize((states - self.mean) @ self.directions, dim=-1)

    def pack(self, queries: Tensor) -> Tensor:
        """Makes keys of queries."""
        return (127 * queries / queries.abs().amax(-1, keepdim=True)).round().to(torch.int8)

    def compare(self, queries: Tensor) -> Tensor:
        """Returns the logit of each entry (T, N)."""
        return self.sharpness * queries @ normalize(self.keys.float(), dim=-1).T

    def prepare(self, states: Tensor) -> None:
        """Fits the keys to states (N, D) of other texts."""
        self.mean = states.mean(0)
        variances, directions = torch.linalg.eigh((states - self.mean).T @ (states - self.mean) / len(states))
        self.directions = (directions * variances.clamp(min=1e-6) ** -0.25)[:, -self.size :]
        self.size = self.directions.shape[1]

    def begin(self) -> None:
        """Forgets the text."""
        self.keys, self.tokens = torch.zeros(0, self.size, dtype=self.dtype), torch.zeros(0, dtype=torch.long)
        self.last = torch.zeros(0, self.size)

    def state_bytes(self) -> int:
        """Returns the bytes of keys and tokens."""
        return len(self.keys) * (self.size * self.dtype.itemsize + TOKEN_BYTES)

    def predict(self, ids: Tensor, states: Tensor) -> Found:
        """Reads ids (T,) and the states at them (T, D), and predicts after each of them."""
        queries = self.encode(states)
        written = self.pack(torch.cat([self.last, queries[:-1]]))
        old = len(self.keys)
        self.keys, self.tokens = (
            torch.cat([self.keys, written]),
            torch.cat([self.tokens, ids[len(ids) - len(written) :]]),
        )
        self.last = queries[-1:]
        if not len(self.keys):
            return Found(ids, torch.zeros(len(ids), len(ids)), torch.zeros(len(ids), dtype=torch.long))
        place = torch.arange(len(self.keys)) - old + len(ids) - len(written)  # an entry's token in this piece
        visible = place <= torch.arange(len(ids))[:, None]
        scores = self.compare(queries).masked_fill(~visible, -torch.inf)
        if len(self.keys) > self.nearest:
            scores.masked_fill_(scores < scores.topk(self.nearest).values[:, -1:], -torch.inf)
        weights = scores.softmax(1).nan_to_num()
        tokens, inverse = self.tokens.unique(return_inverse=True)
        weights = torch.zeros(len(ids), len(tokens)).index_add_(1, inverse, weights)
        buckets = (weights.amax(1) * self.num_buckets).long().clamp(max=self.num_buckets - 1)
        self.keys, self.tokens = self.keys[-self.entries :], self.tokens[-self.entries :]
        return Found(tokens, weights, buckets)


class NearestNeighbours(Neural):
    """The memory of kNN-LM (Khandelwal et al. 2020) of the text so far: whole states in float16, squared distances.

    The sharpness is that of distances divided by the mean one between two states of other texts.
    """

    dtype, nearest, most_bytes = torch.float16, 1024, math.inf
    options = tuple({"sharpness": x} for x in (6.0, 12.0, 24.0, 48.0))

    def prepare(self, states: Tensor) -> None:
        """Measures the mean squared distance of states (N, D) of other texts."""
        self.size, self.mean = states.shape[1], states.mean(0)
        self.mean_distance = 2 * states.var(0).sum()
        self.entries = int(min(self.most_bytes / (self.size * self.dtype.itemsize + TOKEN_BYTES), 1e9))

    def encode(self, states: Tensor) -> Tensor:
        """Returns the states, centred."""
        return states - self.mean

    def pack(self, queries: Tensor) -> Tensor:
        """Rounds states to 16 bits."""
        return queries.half()

    def compare(self, queries: Tensor) -> Tensor:
        """Returns the logit of each entry (T, N)."""
        return -self.sharpness / self.mean_distance * torch.cdist(queries, self.keys.float()).square()


class RecentNeighbours(NearestNeighbours):
    """The same of the last states alone, as many as fit into 4 MB."""

    most_bytes = 4e6


MIXTURES = {"match": Match, "search": Search, "neural": Neural}
MIXTURES |= {"knn": NearestNeighbours, "knn-4mb": RecentNeighbours}


def fit_shares(p: Tensor, m: Tensor, buckets: Tensor, num_buckets: int) -> Tensor:
    """Finds the share of each bucket (num_buckets,) that makes (1 - l) p + l m of the targets largest: p, m (N,)."""
    shares = torch.full((num_buckets,), 0.1, dtype=torch.double)
    for _ in range(200):
        mixed = shares[buckets] * m
        belief = mixed / ((1 - shares[buckets]) * p + mixed)
        # half a token that the memory did not help with keeps a rare bucket's share below 1
        count = torch.bincount(buckets, minlength=num_buckets) + 0.5
        shares = torch.bincount(buckets, belief, minlength=num_buckets) / count
    return shares
