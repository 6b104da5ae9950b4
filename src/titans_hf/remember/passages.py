"""Passages: the token ids of a row's text, and the choice of the passage that is read again where it is asked for.

    s(i) = sum over terms x of the query of round(1024 * .8^age(x) * idf(x)) * [x occurs in span i]
    idf(x) = log(1 + (N - n_x + .5) / (n_x + .5))       N spans, of which n_x have the term

A term is a token or two neighbouring tokens; its age counts the tokens after its last occurrence in the query. A span
is two neighbouring blocks, all of whose tokens have left the window. The newest of the spans with at least .9 of the
best score is chosen. Scores are whole numbers: neither a batch, nor a cut, nor a device can turn a near tie.

In a chat a prompt ends with the header of the answer. The header asks for nothing, and the newest turn has it too: the
query is what stands before it.

Source: idf as in BM25 (Robertson and Zaragoza 2009). `block`, `after`, `copies`: chosen on validation texts (log).
Shapes: R rows, N tokens of a text.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

UNIT = 1024  # of a score
NO_TOKEN = -1  # in the store, before a row's first token
NAME = "passages.ids"  # of the store in the state of a `MemoryCache`


@dataclass(frozen=True)
class Passages:
    """How passages are chosen and read again. All but `decay` and `max_tokens` are numbers of tokens.

    block: a span has two. before, after: read beside the span. query: the last tokens, which are the query and are read
    once more with the passage in sight. every: own tokens from one recall to the next. decay: of the weight of a term
    for each token after it. max_tokens: of a row's store, whose oldest tokens are dropped. copies: how many times keys
    and values of the span and of what is near it stand in sight: their attention counts so many times. end_tokens: of
    a turn; None: the model's.
    """

    block: int = 8
    before: int = 16
    after: int = 64
    query: int = 64
    every: int = 64
    decay: float = 0.8
    max_tokens: int = 1_048_576
    copies: int = 3
    end_tokens: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Tokens of a passage."""
        return self.before + 2 * self.block + self.after

    @property
    def near(self) -> slice:
        """The part of a passage that stands `copies` times in sight: the span, a block before it and five after it."""
        return slice(max(0, self.before - self.block), self.before + 7 * self.block)

    def initial_state(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        """Returns the store before the first token: ids (R, N) int32, whose rows end at the same column."""
        return {NAME: torch.zeros(rows, 0, dtype=torch.int32, device=device)}

    def append(self, store: Tensor, ids: Tensor) -> Tensor:
        """Returns a store with ids (R, T) appended."""
        return torch.cat([store, ids.to(store)], 1)[:, -self.max_tokens :]

    def choose(self, ids: Tensor, seen: int, window: int) -> int | None:
        """Returns where in ids (N,), the last tokens of a text of `seen` tokens, the passage begins; None if there is
        none.
        """
        first = (len(ids) - seen) % self.block  # blocks count from the text's first token
        ids = ids[first:].long()
        number = (len(ids) - max(window - 1, self.before + self.after)) // self.block  # blocks
        if number < 2:
            return None
        asked = ids[: len(ids) - self._header(ids)]
        query = asked[-self.query - 1 :].flip(0)  # the newest first, and the token before the oldest
        distinct, where = query.unique(return_inverse=True)
        index = ids.new_full((int(ids.max()) + 1,), NO_TOKEN)  # by token: its number among the query's
        index[distinct] = torch.arange(len(distinct))
        old = index[ids[: number * self.block]]
        one = (old >= 0).nonzero()[:, 0]  # places of the query's tokens, and of two of them in a row
        two = one[(one > 0) & (old[one - 1] >= 0)]
        pairs, wanted = (
            len(distinct) * newer + older for newer, older in ((old[two], old[two - 1]), (where[:-1], where[1:]))
        )
        score = self._scores(old[one], one // self.block, where[:-1], number)
        score += self._scores(pairs, two // self.block, wanted, number)
        if not (best := int(score.max())):
            return None
        span = int((10 * score >= 9 * best).nonzero()[-1])
        return first + max(0, span * self.block - self.before)

    def _header(self, ids: Tensor) -> int:
        """Returns how many tokens at the end of ids (N,) are a header: from the last end token of the query on, if the
        same tokens followed an end token before.
        """
        ends = torch.isin(ids, ids.new_tensor(self.end_tokens or ())).nonzero()[:, 0]
        if not len(ends) or (length := len(ids) - int(ends[-1])) > self.query:
            return 0
        earlier = ends[:-1, None] + torch.arange(length)  # (ends, tokens of the header)
        return length if bool((ids[earlier] == ids[-length:]).all(1).any()) else 0

    def _scores(self, found: Tensor, blocks: Tensor, wanted: Tensor, number: int) -> Tensor:
        """Returns the scores (number - 1,) of spans: terms (F,) were found in `blocks` (F,); wanted (Q,): those of the
        query, the newest first.
        """
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


def of_one_width(old: dict[str, Tensor], new: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns two states whose stores (R, N) have equally many columns: the shorter gets columns in front."""
    width = max(x[NAME].shape[1] for x in (old, new))
    return tuple(x | {NAME: pad(x[NAME], (width - x[NAME].shape[1], 0), value=NO_TOKEN)} for x in (old, new))
