"""BABILong with its own instruction and examples: the stories of bAbI lie in a text, and the places are options."""

import re
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from eval.streaming.babilong import load_task_config, make_samples, read_questions
from eval.streaming.reading import Question

# A question, and the beginning of its answer in the form that the instruction asks for.
BEGUN = {
    "qa1": (r"Where is (\w+)\?", r"The most recent location of \1 is"),
    "qa2": (r"Where is the (\w+)\?", r"The \1 is in the"),
    "qa3": (r"Where was the (\w+) before the (\w+)\?", r"Before the \2 the \1 was in the"),
}


def make_stories(
    folder: Path, books: Path, tokenizer: PreTrainedTokenizerBase, number: int, kind: str, length: int
) -> list[tuple[str, list[Question]]]:
    """Makes `number` stories, drawn evenly from the test file of qa1, ...; fewer, if their facts do not fit."""
    found, config = list(read_questions(folder, kind)), load_task_config(kind)
    places = sorted({x.answer for x in found})
    shots = "".join(f"{x['input']}\n{x['question']} {x['target']}\n\n" for x in config["fewshot_config"]["samples"])
    parts = []
    for x in make_samples(iter(found[:: max(1, len(found) // number)][:number]), books, tokenizer, length):
        asked = f"\n{x['question']} {re.sub(*BEGUN[kind], x['question'])}"
        parts.append((config["description"] + shots + x["input"], [Question(kind, asked, x["target"], places)]))
    return parts
