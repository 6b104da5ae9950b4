"""Ways in which a frozen model reads a text in pieces, and answers what is asked after it.

`begin()` forgets the text, `read(ids)` reads the next piece, `begin_question()` says that a question follows,
`after(ids)` reads on in a branch, which leaves no trace, `generate(ids)` reads on and answers. Keys and values count
two bytes a number, as they are kept in practice.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation import StoppingCriteriaList

from titans_hf import MemoryCache, Passages, remember
from titans_hf.cli.shared.text_ids import end_tokens

LONGEST, CERTAIN = 16, 0.99  # tokens of a match, and the probability of the token after it
TOKEN_BYTES = 4  # of a token of a text


class Reader:
    """Full attention; a window, a longer one too, is a memory without passages (`Remember`)."""

    piece = 256  # tokens of a call
    copied = staticmethod(copy.deepcopy)  # a cache for a branch

    def __init__(self, model: PreTrainedModel):
        self.model, self.window, self.settings = model, None, {"dtype": str(model.dtype).removeprefix("torch.")}
        config = model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.column_bytes = 2 * 2 * config.num_hidden_layers * heads * size  # keys and values of one token
        self.ends = set(end_tokens(model.generation_config))

    def begin(self) -> None:
        """Forgets the text."""
        self.cache, self.start = DynamicCache(), 0

    def begin_question(self) -> None:
        """Lets a question begin with the next token."""

    def state_bytes(self) -> int:
        """Returns the bytes of what is kept of the text."""
        return self.start * self.column_bytes

    @torch.no_grad()
    def read(self, ids: Tensor) -> Tensor:
        """Reads the next tokens (T,), and returns the log probabilities after each of them (T, V)."""
        self.start += len(ids)
        return self.model(ids[None], cache=self.cache, use_cache=True).logits[0].float().log_softmax(-1)

    def read_on(self, ids: Tensor) -> None:
        """Reads tokens (T,) in pieces, without what is said after them."""
        for piece in ids.split(self.piece):
            self.read(piece)

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Reads in a branch until its end: then the reader is where it was."""
        kept = self.__dict__.copy()
        self.cache = self.copied(self.cache)
        yield
        self.__dict__ = kept

    def after(self, ids: Tensor) -> Tensor:
        """Returns the log probabilities after each of the next tokens (T, V); the reader stays where it is."""
        with self.branch():
            return self.read(ids)

    def generate(self, ids: Tensor, most: int, is_done: Callable[[list[int]], bool] = lambda said: False) -> list[int]:
        """Reads tokens (T,), and answers greedily by at most `most`. All but the last token of the answer are read."""
        *pieces, last = ids.split(self.piece)
        for piece in pieces:
            self.read(piece)
        row, said = self.read(last)[-1], []
        while True:
            said.append(int(row.argmax()))
            if len(said) == most or said[-1] in self.ends or is_done(said):
                return said
            row = self.read(torch.tensor(said[-1:]))[-1]


class Remember(Reader):
    """A model with `titans_hf.remember`, which recalls where it is asked, if it has passages."""

    piece = 512
    copied = staticmethod(copy.copy)  # a MemoryCache is a value

    def __init__(self, model: PreTrainedModel, window: int, passages: Passages | None):
        super().__init__(model)
        self.window, self.recalls = window, passages is not None
        remember(model, window, passages=passages)

    def begin(self) -> None:
        self.cache, self.start = MemoryCache(self.model), 0

    def begin_question(self) -> None:
        self.cache.start_prompt()

    def state_bytes(self) -> int:
        """Returns the bytes of keys and values, and of the text."""
        held = min(self.start, self.window + self.model.memory.extra_columns)
        return held * self.column_bytes + self.cache.num_bytes()["text"]

    @torch.no_grad()
    def after(self, ids: Tensor) -> Tensor:
        """Returns the log probabilities after each of the next tokens (T, V), of a branch that recalls before them."""
        options = {"recall": True} if self.recalls and self.start else {}
        output = self.model(ids[None], cache=copy.copy(self.cache), **options)
        return output.logits[0].float().log_softmax(-1)

    def generate(self, ids: Tensor, most: int, is_done: Callable[[list[int]], bool] = lambda said: False) -> list[int]:
        """Reads tokens (T,), and answers greedily, as `generate()` does. All but the last token are read."""
        self.cache.start_prompt()
        stop = StoppingCriteriaList([lambda rows, _, **__: torch.tensor([is_done(rows[0, len(ids) :].tolist())])])
        made = self.model.generate(
            ids[None], attention_mask=torch.ones_like(ids)[None], cache=self.cache, max_new_tokens=most,
            do_sample=False, stopping_criteria=stop, pad_token_id=min(self.ends, default=None),
        )  # fmt: skip
        self.start += made.shape[1] - 1
        return made[0, len(ids) :].tolist()


class Search(Remember):
    """The token after the longest suffix of the text, of at most LONGEST tokens, that occurred before; the last time.

    Without a match, a window's model says what follows.
    """

    def __init__(self, model: PreTrainedModel, window: int):
        super().__init__(model, window, None)

    def begin(self) -> None:
        super().begin()
        self.ids, self.next = [], {}

    def state_bytes(self) -> int:
        """Returns the bytes of the window and of the text, which could be searched anew at each token."""
        return super().state_bytes() + TOKEN_BYTES * len(self.ids)

    def read(self, ids: Tensor) -> Tensor:
        log_p = super().read(ids) + torch.log(torch.tensor(1 - CERTAIN))
        for row, token in zip(log_p, ids.tolist(), strict=True):
            for n in range(1, min(LONGEST, len(self.ids)) + 1):
                self.next[tuple(self.ids[-n:])] = token
            self.ids.append(token)
            suffixes = (tuple(self.ids[-n:]) for n in range(min(LONGEST, len(self.ids)), 0, -1))
            found = next((self.next[x] for x in suffixes if x in self.next), None)
            if found is None:
                row -= torch.log(torch.tensor(1 - CERTAIN))
            else:
                row[found] = torch.logaddexp(row[found], torch.log(torch.tensor(CERTAIN)))
        return log_p

    @contextmanager
    def branch(self) -> Iterator[None]:
        with super().branch():
            self.ids, self.next = list(self.ids), dict(self.next)
            yield

    after, generate = Reader.after, Reader.generate


class Pasted(Reader):
    """Plain retrieval: where it is asked, a fresh window reads the begin token, the passages that `remember` would read
    again, as text, and the last tokens. It keeps the ids alone, and reads nothing before it is asked.
    """

    def __init__(self, model: PreTrainedModel, window: int):
        super().__init__(model)
        self.window, self.passages, self.asked = window, Passages(), 0
        self.first = model.config.get_text_config(decoder=True).bos_token_id or 0

    def begin(self) -> None:
        super().begin()
        self.ids, self.asked = torch.zeros(0, dtype=torch.int64), 0

    def begin_question(self) -> None:
        self.asked = len(self.ids)

    def state_bytes(self) -> int:
        """Returns the bytes of the text."""
        return TOKEN_BYTES * len(self.ids)

    def read_on(self, ids: Tensor) -> None:
        """Notes tokens (T,)."""
        self.ids = torch.cat([self.ids, ids])

    def after(self, ids: Tensor) -> Tensor:
        """Returns the log probabilities after each of the next tokens (T, V) in a fresh window."""
        text = torch.cat([self.ids, ids])
        super().begin()
        return super().read(self.prompt(text, len(ids)))[-len(ids) :]

    def prompt(self, text: Tensor, num_asked: int) -> Tensor:
        """Returns what a fresh window reads: at most `window` tokens. Passages are chosen before the last `num_asked`
        tokens, by the question before these; of too many, the newest are read.
        """
        known = text[: len(text) - num_asked]
        choice = self.passages.choose(known, len(known), self.window, len(known) - self.asked)
        passage = text[:0] if choice is None else torch.cat([text[begin:end] for begin, end in choice.pieces])
        passage = passage[-self.window // 2 :] if len(passage) > self.window // 2 else passage
        rest = text[max(0, len(text) - (self.window - 1 - len(passage))) :]
        return torch.cat([torch.tensor([self.first] if len(text) > self.window else []).long(), passage, rest])

    def generate(self, ids: Tensor, most: int, is_done: Callable[[list[int]], bool] = lambda said: False) -> list[int]:
        """Reads tokens (T,) in a fresh window, and answers greedily. A chat goes on after all but the last token."""
        self.begin_question()
        self.read_on(ids)
        super().begin()
        said = super().generate(self.prompt(self.ids, 0), most, is_done)
        self.read_on(torch.tensor(said[:-1], dtype=torch.int64))
        return said
