"""Makes BABILong from bAbI's own files and a folder of books: facts hidden in a novel, in order, at random places."""

import random
import re
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from titans_hf.cli.shared.text_files import find_files, read_text

SEED = 42
# A full stop after a title or an initial ends no sentence.
SENTENCE_END = re.compile(r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\b[A-Z]\.)(?<=[.!?])([\"')]*)\s+")


class Question(NamedTuple):
    """A question, its answer, and all earlier facts of its story, in order."""

    facts: list[str]
    text: str
    answer: str


def load_task_config(task: str) -> dict[str, Any]:
    """Loads lm-eval's configuration of BABILong's qa1, qa2, ...: its description, examples and score."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    return load_yaml(Path(lm_eval.tasks.__file__).parent / "babilong" / f"babilong_{task}.yaml")


def read_questions(folder: Path, task: str) -> Iterator[Question]:
    """Yields the questions of the test file of qa1, qa2, ... in a folder of bAbI's files."""
    files = list(folder.glob(f"{task}_*_test.txt"))
    if len(files) != 1:
        raise ValueError(f"--stories {folder} must hold one {task}_*_test.txt, but holds {len(files)}")
    facts: list[str] = []
    for line in read_text(files[0], "--stories").splitlines():
        number, _, text = line.partition(" ")
        if number == "1":
            facts = []
        if "\t" in text:
            question, answer, _ = text.split("\t")
            yield Question(list(facts), question.strip(), answer)
        else:
            facts.append(text.strip())


def split_sentences(text: str) -> list[str]:
    """Splits a text where white space follows the end of a sentence; other white space becomes a blank."""
    return SENTENCE_END.sub(r"\1\n", " ".join(text.split())).split("\n")


def make_samples(
    questions: Iterator[Question], books: Path, tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[dict[str, str]]:
    """Makes a sample of each question, in the schema of BABILong's data sets.

    The context ("input") fills `length` tokens to the sentence of the books, as the tokens of the sentences add up; the
    books start anew where they end. Length 0 is the facts alone. A question whose facts do not fit is left out.
    """
    sentences = [x for file in find_files(books, "--books") for x in split_sentences(read_text(file, "--books"))]
    sizes = [len(ids) for ids in tokenizer([f" {x}" for x in sentences], verbose=False).input_ids]
    for index, (facts, question, answer) in enumerate(questions):
        context = " ".join(facts)
        rest = length - len(tokenizer(context, verbose=False).input_ids)
        if length and rest < 0:
            continue
        if length:
            rng = random.Random(f"{SEED}/{length}/{index}")
            start = rng.randrange(len(sentences))
            ends = np.cumsum(np.tile(np.roll(sizes, -start), rest // sum(sizes) + 1))
            chosen = list(islice(cycle(sentences), start, start + int((ends <= rest).sum())))
            places = sorted(rng.randint(0, len(chosen)) for _ in facts)
            for place, fact in reversed(list(zip(places, facts, strict=True))):
                chosen.insert(place, fact)
            context = " ".join(chosen)
        yield {"input": context, "question": question, "target": answer}
