"""Makes BABILong from bAbI's own files and a folder of books: facts hidden in a novel, in order, at random places."""

import random
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from titans_hf.cli.evaluation.needles import SEED, largest, split_sentences, token_counter


class Question(NamedTuple):
    """A question, its answer, and all earlier facts of its story, in order."""

    facts: list[str]
    text: str
    answer: str


def read_stories(data: str | Path, task: str) -> str:
    """Reads the test file of qa1, qa2, ..."""
    files = list(Path(data).glob(f"babi/en-10k/{task}_*_test.txt"))
    if len(files) != 1:
        raise FileNotFoundError(f"the data folder {data} holds no babi/en-10k/{task}_*_test.txt")
    return files[0].read_text(encoding="utf-8")


def check_facts(stories: str, count: Callable[[str], int], length: int) -> None:
    """Raises if the facts of no question fit into `length` tokens."""
    if not any(count(" ".join(question.facts)) <= length for question in read_questions(stories)):
        raise ValueError(f"length {length} is too short for the facts of any question")


def read_questions(stories: str) -> Iterator[Question]:
    """Yields the questions of a file of stories."""
    facts: list[str] = []
    for line in stories.splitlines():
        number, _, text = line.partition(" ")
        if number == "1":
            facts = []
        if "\t" in text:
            question, answer, _ = text.split("\t")
            yield Question(list(facts), question.strip(), answer)
        else:
            facts.append(text.strip())


def hide(facts: list[str], places: list[float], sentences: list[str]) -> str:
    """Inserts facts among sentences; `places`, ascending, are the shares of the sentences that precede each fact."""
    pieces, done = [], 0
    for fact, place in zip(facts, places, strict=True):
        until = int(place * (len(sentences) + 1))
        pieces += [*sentences[done:until], fact]
        done = until
    return " ".join(pieces + sentences[done:])


class Book:
    """The sentences of books, and about how many of them fill a number of tokens."""

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase):
        self.sentences, self.count = split_sentences(text), token_counter(tokenizer)
        tokens = tokenizer([f" {sentence}" for sentence in self.sentences], verbose=False).input_ids
        self._ends = np.cumsum([0, *map(len, tokens)])
        self.mean = self._ends[-1] / len(self.sentences)

    def read(self, start: int, size: int) -> list[str]:
        """Returns `size` sentences from `start` on; the books start anew where they end."""
        return list(islice(cycle(self.sentences), start, start + size))

    def size(self, start: int, num_tokens: int) -> int:
        """Estimates how many sentences from `start` on fill `num_tokens` tokens."""
        rounds, rest = divmod(num_tokens + int(self._ends[start]), int(self._ends[-1]))
        return rounds * len(self.sentences) + int(np.searchsorted(self._ends, rest, side="right")) - 1 - start


def make_samples(stories: str, book: Book, length: int, seed: int = SEED) -> Iterator[dict]:
    """Makes samples in the schema of BABILong's data sets, one per question in a bAbI file.

    `input` fills `length` tokens to the sentence of the books, which start anew where they end; length 0 is the facts
    alone. Questions whose facts are longer than `length` are left out.
    """
    for index, (facts, question, answer) in enumerate(read_questions(stories)):
        context = " ".join(facts)
        if length:
            available = length - book.count(context)
            if available < 0:
                continue
            rng = random.Random(f"{seed}/{length}/{index}")
            places, start = sorted(rng.random() for _ in facts), rng.randrange(len(book.sentences))

            def hidden(size: int, facts=facts, places=places, start=start) -> str:
                return hide(facts, places, book.read(start, size))

            size = book.size(start, available)
            for _ in range(2):  # joined sentences take other numbers of tokens; counting a million takes long
                size = max(0, size + int((length - book.count(hidden(size))) / book.mean))
            context = hidden(largest(lambda n, hidden=hidden: book.count(hidden(n)) <= length, size))
        yield {"input": context, "question": question, "target": answer}
