"""Passages: which parts of a row's text are read again where they are asked for.

    s(i) = sum over terms x of the query of round(1024 * .99^age(x) * idf(x)) * [x occurs in span i]
    idf(x) = log(1 + (N - n_x + .5) / (n_x + .5))       N spans, of which n_x have the term

A term is a token or two neighbouring tokens of the query; its age counts the tokens after its last occurrence there.
The query is the prompt, at most its last 64 tokens. A span is two neighbouring blocks, all of whose tokens have left
the window. The spans with at least .9 of the best score are chosen, of neighbours the newest, and of more than eight
the best. Scores are whole numbers: neither a batch, nor a cut, nor a device can turn a near tie.

Source: idf as in BM25 (Robertson and Zaragoza 2009). The numbers were chosen on validation texts (log).
Shapes: N tokens of a text.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

UNIT = 1024  # of a score


class Choice(NamedTuple):
    """What is read again of a text: pieces, (begin, end) of each in the order of the text, and near: the places in the
    joined pieces whose keys and values stand `more` times more in sight.
    """

    pieces: list[tuple[int, int]]
    near: list[int]
    more: int


@dataclass(frozen=True)
class Passages:
    """How passages are chosen and read again.

    block, before, after: tokens; a span has two blocks, and is read with the tokens beside it. query: most tokens of
    the query. again: how many of the last tokens are read once more with passages in sight. every: own tokens from one
    recall to the next. decay: of the weight of a term for each token after it. share: of the best score that a span
    needs. most: passages of a recall. max_tokens: of a row's text, whose oldest tokens are dropped. copies: how many
    times keys and values of a span and of what is near it stand in sight: their attention counts so many times. With
    several passages, the newest alone has one copy less, and the others one.
    """

    block: int = 8
    before: int = 16
    after: int = 64
    query: int = 64
    again: int = 64
    every: int = 64
    decay: float = 0.99
    share: float = 0.9
    most: int = 8
    max_tokens: int = 1_048_576
    copies: int = 3

    def choose(self, ids: Tensor, seen: int, window: int, asked: int) -> Choice | None:
        """Returns what to read again of ids (N,), the last tokens of a text of `seen` tokens, of which the last `asked`
        are the prompt; None for nothing. Without a token of the prompt, the last tokens of the text ask.
        """
        spans = self.spans(ids, seen, window, min(self.query, asked) if asked > 0 else self.query)
        pieces: list[list[int]] = []
        for span in spans:
            begin, end = max(0, span - self.before), span + 2 * self.block + self.after
            if pieces and begin <= pieces[-1][1]:
                pieces[-1][1] = end
            else:
                pieces.append([begin, end])
        if not spans:
            return None
        places = [x for begin, end in pieces for x in range(begin, end)]
        newest = range(max(0, spans[-1] - self.block), spans[-1] + 7 * self.block)
        near = [i for i, x in enumerate(places) if x in newest]
        return Choice([(a, b) for a, b in pieces], near, self.copies - (1 if len(spans) == 1 else 2))

    def spans(self, ids: Tensor, seen: int, window: int, asked: int) -> list[int]:
        """Returns where in ids (N,) the chosen spans begin; the last `asked` tokens are the query."""
        first = (len(ids) - seen) % self.block  # blocks count from the text's first token
        ids = ids[first:].long()
        number = (len(ids) - max(window - 1, self.before + self.after)) // self.block  # blocks
        if number < 2:
            return []
        query = ids[-asked:].flip(0)  # the newest first
        distinct, where = query.unique(return_inverse=True)
        index = ids.new_full((int(ids.max()) + 1,), -1)  # by token: its number among the query's
        index[distinct] = torch.arange(len(distinct))
        old = index[ids[: number * self.block]]
        one = (old >= 0).nonzero()[:, 0]  # places of the query's tokens, and of two of them in a row
        two = one[(one > 0) & (old[one - 1] >= 0)]
        pairs, wanted = (
            len(distinct) * newer + older for newer, older in ((old[two], old[two - 1]), (where[:-1], where[1:]))
        )
        score = self._scores(old[one], one // self.block, where, number)
        score += self._scores(pairs, two // self.block, wanted, number)
        best = int(score.max())
        fitting = (100 * score >= round(100 * self.share) * max(best, 1)).nonzero()[:, 0].tolist()
        newest = [x for x in fitting if x + 1 not in fitting and x + 2 not in fitting]
        if len(newest) > self.most:
            newest = sorted(sorted(newest, key=lambda x: (int(score[x]), x))[-self.most :])
        return [first + x * self.block for x in newest]

    def _scores(self, found: Tensor, blocks: Tensor, wanted: Tensor, number: int) -> Tensor:
        """Returns the scores (number - 1,) of spans: terms (F,) were found in `blocks` (F,); wanted (Q,): those of the
        query, the newest first.
        """
        if not len(wanted):
            return torch.zeros(number - 1, dtype=torch.int64)
        terms, inverse = wanted.unique(return_inverse=True)
        age = torch.full((len(terms),), len(wanted)).scatter_reduce(0, inverse, torch.arange(len(wanted)), "amin")
        place = torch.searchsorted(terms, found).clamp(max=len(terms) - 1)
        is_wanted = terms[place] == found
        has = torch.zeros(len(terms), number, dtype=torch.bool)
        has[place[is_wanted], blocks[is_wanted]] = True
        has = has[:, :-1] | has[:, 1:]  # (terms, spans)
        count = has.sum(1).double()
        idf = torch.log1p((number - 1 - count + 0.5) / (count + 0.5))
        weights = (UNIT * self.decay ** age.double() * idf).round().long()
        return (weights[:, None] * has).sum(0)
