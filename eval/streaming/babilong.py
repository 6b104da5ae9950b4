"""Makes BABILong from bAbI's own files and a folder of books: facts hidden in a novel, in order, at random places.

The instruction and the examples are BABILong's own, and the places are options.
"""

import random
import re
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from eval.streaming.reading import Question
from titans_hf.cli.shared.text_files import find_files, read_text

SEED = 42
# A full stop after a title or an initial ends no sentence.
SENTENCE_END = re.compile(r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\b[A-Z]\.)(?<=[.!?])([\"')]*)\s+")


# A question, and the beginning of its answer in the form that the instruction asks for.
BEGUN = {
    "qa1": (r"Where is (\w+)\?", r"The most recent location of \1 is"),
    "qa2": (r"Where is the (\w+)\?", r"The \1 is in the"),
    "qa3": (r"Where was the (\w+) before the (\w+)\?", r"Before the \2 the \1 was in the"),
}


class Story(NamedTuple):
    """A question, its answer, and all earlier facts of its story, in order."""

    facts: list[str]
    question: str
    answer: str


def read_stories(folder: Path, task: str, part: str = "test") -> Iterator[Story]:
    """Yields the stories of the file of qa1, qa2, ... of a part, "train" or "test", in a folder of bAbI's files."""
    files = list(folder.glob(f"{task}_*_{part}.txt"))
    if len(files) != 1:
        raise ValueError(f"--stories {folder} must hold one {task}_*_{part}.txt, but holds {len(files)}")
    facts: list[str] = []
    for line in read_text(files[0], "--stories").splitlines():
        number, _, text = line.partition(" ")
        if number == "1":
            facts = []
        if "\t" in text:
            question, answer, _ = text.split("\t")
            yield Story(list(facts), question.strip(), answer)
        else:
            facts.append(text.strip())


def split_sentences(text: str) -> list[str]:
    """Splits a text where white space follows the end of a sentence; other white space becomes a blank."""
    return SENTENCE_END.sub(r"\1\n", " ".join(text.split())).split("\n")


def hide_facts(
    stories: Iterator[Story], books: Path, tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[tuple[str, Story]]:
    """Yields a context of each story, and the story.

    The context fills `length` tokens to the sentence of the books, as the tokens of the sentences add up; the books
    start anew where they end. Length 0 is the facts alone. A story whose facts do not fit is left out.
    """
    sentences = [x for file in find_files(books, "--text") for x in split_sentences(read_text(file, "--text"))]
    sizes = [len(ids) for ids in tokenizer([f" {x}" for x in sentences], verbose=False).input_ids]
    for index, story in enumerate(stories):
        context = " ".join(story.facts)
        rest = length - len(tokenizer(context, verbose=False).input_ids)
        if length and rest < 0:
            continue
        if length:
            rng = random.Random(f"{SEED}/{length}/{index}")
            start = rng.randrange(len(sentences))
            ends = np.cumsum(np.tile(np.roll(sizes, -start), rest // sum(sizes) + 1))
            chosen = list(islice(cycle(sentences), start, start + int((ends <= rest).sum())))
            places = sorted(rng.randint(0, len(chosen)) for _ in story.facts)
            for place, fact in reversed(list(zip(places, story.facts, strict=True))):
                chosen.insert(place, fact)
            context = " ".join(chosen)
        yield context, story


def make_stories(
    folder: Path, books: Path, tokenizer: PreTrainedTokenizerBase, number: int, kind: str, length: int
) -> list[tuple[str, list[Question]]]:
    """Makes `number` stories, drawn evenly from the test file of qa1, ...; fewer, if their facts do not fit."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(Path(lm_eval.tasks.__file__).parent / "babilong" / f"babilong_{kind}.yaml")
    shots = "".join(f"{x['input']}\n{x['question']} {x['target']}\n\n" for x in config["fewshot_config"]["samples"])
    stories = list(read_stories(folder, kind))
    places, parts = sorted({x.answer for x in stories}), []
    chosen = stories[:: max(1, len(stories) // number)][:number]
    for context, (_, question, answer) in hide_facts(iter(chosen), books, tokenizer, length):
        asked = f"\n{question} {re.sub(*BEGUN[kind], question)}"
        parts.append((config["description"] + shots + context, [Question(kind, asked, answer, places)]))
    return parts
