"""BABILong with its own instruction and examples: the stories of bAbI lie in a text, and the places are options."""

import re
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from eval.needles.babilong import load_task_config, make_samples, read_questions

# A question, and the beginning of its answer in the form that the instruction asks for.
BEGUN = {
    "qa1": (r"Where is (\w+)\?", r"The most recent location of \1 is"),
    "qa2": (r"Where is the (\w+)\?", r"The \1 is in the"),
    "qa3": (r"Where was the (\w+) before the (\w+)\?", r"Before the \2 the \1 was in the"),
}


class Story(NamedTuple):
    """A prompt; a question and its begun answer; the place that ends it, and all places."""

    prompt: str
    question: str
    value: str
    options: list[str]


def make_stories(
    task: str, folder: Path, books: Path, tokenizer: PreTrainedTokenizerBase, length: int, number: int
) -> list[Story]:
    """Makes `number` stories of a length, drawn evenly from the test file; fewer, if facts do not fit."""
    questions, config = list(read_questions(folder, task)), load_task_config(task)
    places = sorted({x.answer for x in questions})
    shots = "".join(f"{x['input']}\n{x['question']} {x['target']}\n\n" for x in config["fewshot_config"]["samples"])
    samples = make_samples(iter(questions[:: max(1, len(questions) // number)][:number]), books, tokenizer, length)
    return [
        Story(
            f"{config['description']}{shots}{x['input']}",
            f"\n{x['question']} {re.sub(*BEGUN[task], x['question'])}", x["target"], places,
        )
        for x in samples
    ]  # fmt: skip
