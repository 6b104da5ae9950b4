"""Ways in which a frozen model reads a text in pieces, and answers what is asked after it.

`begin()` forgets the text, `read(ids)` reads the next piece, `after(ids)` reads on in a branch, which leaves no trace,
`generate(ids)` reads on and answers. Keys and values count two bytes a number, as they are kept in practice.
"""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from sklearn.feature_extraction.text import CountVectorizer
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import StoppingCriteriaList

from eval.streaming.babilong import split_sentences
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

    def start_prompt(self, message: str | None = None) -> None:
        """Says that a question begins with the next token; message: its text, where it is a message of a chat."""

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

    def start_prompt(self, message: str | None = None) -> None:
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
        self.start_prompt()
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


class Retrieved(Reader):
    """Plain retrieval: what is found for a question and the question alone, in a fresh context.

    In a chat they are one message of the user, in the model's chat template. The reader keeps the ids, and reads
    nothing before it is asked.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
        super().__init__(model)
        self.tokenizer = tokenizer

    def begin(self) -> None:
        super().begin()
        self.ids = torch.zeros(0, dtype=torch.int64)
        self.start_prompt()

    def start_prompt(self, message: str | None = None) -> None:
        self.asked, self.message = len(self.ids), message

    def state_bytes(self) -> int:
        """Returns the bytes of the text."""
        return TOKEN_BYTES * len(self.ids)

    def read_on(self, ids: Tensor) -> None:
        """Notes tokens (T,)."""
        self.ids = torch.cat([self.ids, ids])

    def after(self, ids: Tensor) -> Tensor:
        """Returns the log probabilities after the last token of the question and each token of an answer (T, V)."""
        prompt = self.prompt(ids[:1])
        super().begin()
        return super().read(torch.cat([prompt, ids[1:]]))[-len(ids) :]

    def generate(self, ids: Tensor, most: int, is_done: Callable[[list[int]], bool] = lambda said: False) -> list[int]:
        """Ends the question with tokens (T,), and answers greedily. The text goes on after all but the last token."""
        prompt = self.prompt(ids)
        super().begin()
        said = super().generate(prompt, most, is_done)
        self.read_on(torch.cat([ids, torch.tensor(said[:-1], dtype=torch.int64)]))
        return said

    def prompt(self, ids: Tensor) -> Tensor:
        """Returns what a fresh context reads; ids (T,): the last tokens of the question."""
        question = torch.cat([self.ids[self.asked :], ids])
        found = self.find(self.ids[: self.asked], question).strip()
        if self.message is None:
            return torch.cat([self._tokenize(f"{found}\n\n"), question])
        roles = [{"role": "user", "content": f"{found}\n\n{self.message}"}]
        return self._tokenize(self.tokenizer.apply_chat_template(roles, tokenize=False, add_generation_prompt=True))

    def find(self, text: Tensor, question: Tensor) -> str:
        """Returns what is read before a question (Q,) after a text (N,)."""
        raise NotImplementedError

    def _tokenize(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.int64)


class RetrievedPassages(Retrieved):
    """The best passage of the whole text, the newest of those that tie for `remember`, and the question alone."""

    passages = Passages()

    def find(self, text: Tensor, question: Tensor) -> str:
        ids, settings = torch.cat([text, question]), self.passages
        whole = replace(settings, before=0, after=0)  # up to the text's last token
        spans = whole.spans(ids, len(ids), len(question) + 1, min(whole.query, len(question)))
        if not spans:
            return ""
        begin, end = max(0, spans[-1] - settings.before), spans[-1] + 2 * settings.block + settings.after
        return self.tokenizer.decode(text[begin:end]).strip()


class RetrievedSentences(Retrieved):
    """The best sentences of the text by BM25, in the text's order, and the question alone.

    Source: Robertson and Zaragoza (2009), equation 3.15, with k_1 = 1.2, b = .75; terms are lower-case words.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, number: int):
        super().__init__(model, tokenizer)
        self.number = number
        self.settings["sentences"] = number

    def find(self, text: Tensor, question: Tensor) -> str:
        lines = self.tokenizer.decode(text).splitlines()
        sentences = [x for line in lines for x in split_sentences(line) if re.search(r"\w", x)]
        if not sentences:
            return ""
        scores = self.scores(sentences, self.message or self.tokenizer.decode(question))
        best = sorted(np.argsort(-scores, kind="stable")[: self.number])
        return " ".join(sentences[i] for i in best)

    @staticmethod
    def scores(sentences: list[str], question: str) -> np.ndarray:
        """Returns the score of each sentence."""
        words = CountVectorizer(token_pattern=r"\w+")
        counts = words.fit_transform(sentences).toarray()  # (sentences, words)
        wanted = words.transform([question]).toarray()[0] > 0
        with_word = (counts > 0).sum(0)
        idf = np.log1p((len(counts) - with_word + 0.5) / (with_word + 0.5))
        length = counts.sum(1, keepdims=True)
        parts = idf * counts * 2.2 / (counts + 1.2 * (0.25 + 0.75 * length / length.mean()))
        return parts[:, wanted].sum(1)
