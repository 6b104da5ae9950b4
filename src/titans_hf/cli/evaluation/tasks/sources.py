"""Data of a local folder in the schema of the Hub's data sets, so that lm-eval's own processing fits it.

lm-eval calls these with its `metadata`: "data" is the folder; needles and BABILong also take "max_seq_lengths",
"samples" and the tokenizer.
"""

import bz2
import json
import re
from collections.abc import Iterable
from functools import cache
from itertools import islice
from pathlib import Path

from datasets import Dataset, load_dataset
from lm_eval.tasks.ruler.common_utils import get_tokenizer, process_results, resolve_tokenizer_name
from transformers import PreTrainedTokenizerBase

from titans_hf.cli.evaluation import babilong, needles

HAYSTACK = "books/test"


def local_file(data: str | Path | None, name: str) -> Path:
    """Returns a path of the data folder. Raises ValueError without a folder, FileNotFoundError for a missing file."""
    if data is None:
        raise ValueError('this task reads a local folder: name it in --metadata, as in \'{"data": "my_data"}\'')
    path = Path(data) / name
    if not path.exists():
        raise FileNotFoundError(f"the data folder {data} holds no {name}")
    return path


def _rows(path: Path) -> Iterable[dict]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _arrow(folder: Path) -> Dataset:
    # In memory: otherwise `datasets` would write the results of map() beside the file.
    return Dataset.from_file(str(folder / "data-00000-of-00001.arrow"), in_memory=True)


def lambada(data=None, **_) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(list(_rows(local_file(data, "lambada/lambada_test.jsonl"))))}


def piqa(data=None, **_) -> dict[str, Dataset]:
    folder = local_file(data, "commonsense/piqa")
    labels = (folder / "valid-labels.lst").read_text().split()
    rows = zip(_rows(folder / "valid.jsonl"), labels, strict=True)
    return {"validation": Dataset.from_list([row | {"label": int(label)} for row, label in rows])}


def winogrande(data=None, **_) -> dict[str, Dataset]:
    folder = local_file(data, "commonsense/winogrande/winogrande_xl/validation")
    return {"validation": _arrow(folder)}


def boolq(data=None, **_) -> dict[str, Dataset]:
    folder = local_file(data, "commonsense/boolq/validation")
    rows = _arrow(folder)
    return {"validation": rows.map(lambda row: {"label": int(row["answer"])}, remove_columns="answer")}


def arc(data=None, level="easy", **_) -> dict[str, Dataset]:
    rows = _rows(local_file(data, f"commonsense/arc/arc_{level}_test.jsonl"))
    return {"test": Dataset.from_list([_arc_row(**row) for row in rows])}


def _arc_row(id: str, question: str, choices: list[str], gold: int) -> dict:
    labels = list("ABCDEFGH"[: len(choices)])
    return {
        "id": id,
        "question": question,
        "choices": {"text": choices, "label": labels},
        "answerKey": labels[gold],
    }


def hellaswag(data=None, **_) -> dict[str, Dataset]:
    with bz2.open(local_file(data, "commonsense/hellaswag/hellaswag_val_full.txt.bz2"), "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    tasks = zip(*(lines[i::6] for i in range(6)), strict=True)
    return {"validation": Dataset.from_list([_hellaswag_row(*task) for task in tasks])}


def _hellaswag_row(context: str, label: str, *endings: str) -> dict:
    """Makes a row of the text form, which has lost where ctx_b begins: with the sentence to be finished. lm-eval
    capitalises that.
    """
    activity, _, context = context.partition(": ")
    begun = re.search(r"(?<=[.!?\"'] )[a-z][^.!?]*$", context)
    start = begun.start() if begun else len(context)
    return {
        "activity_label": activity,
        "ctx_a": context[:start].rstrip(),
        "ctx_b": context[start:],
        "endings": list(endings),
        "label": label,
    }


def wikitext_pages(data) -> list[str]:
    """Cuts the articles as EleutherAI/wikitext_document_level does; lost blank lines are taken from another copy."""
    lines = iter(local_file(data, "wikitext/wiki.test.raw").read_text(encoding="utf-8").split("\n"))
    layout = local_file(data, "wikitext/wikitext-2/test.txt").read_text(encoding="utf-8").split("\n")
    pages: list[list[str]] = [[]]
    for line in (next(lines) if model.strip() else model for model in layout):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            pages.append([])
        pages[-1].append(line)
    return ["\n".join(page) for page in pages if "".join(page).strip()]


def wikitext(data=None, **_) -> dict[str, Dataset]:
    return {"test": Dataset.from_dict({"page": wikitext_pages(data)})}


def wikitext_whole(data=None, samples=None, **_) -> dict[str, Dataset]:
    """Loads the whole file as one page; without a folder, from the Hub. `samples` limits the articles it is made of."""
    if data is None:
        pages = load_dataset("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", split="test")["page"]
    else:
        pages = wikitext_pages(data)
    return {"test": Dataset.from_dict({"page": ["\n".join(pages[:samples])]})}


def niah(task, data=None, max_seq_lengths=(4096,), samples=None, **kwargs) -> dict[str, Dataset]:
    tokenizer = get_tokenizer(resolve_tokenizer_name(kwargs))
    text = "" if needles.KINDS[task].in_noise else needles.book_text(local_file(data, HAYSTACK))
    number = needles.NUM_SAMPLES if samples is None else samples
    rows = [row for n in max_seq_lengths for row in needles.make_samples(task, tokenizer, n, number, text)]
    return {"test": Dataset.from_list(rows)}


def niah_accuracy(doc: dict, results: list[str]) -> dict[str, float]:
    """Renames RULER's score, whatever the length: lm-eval has a metric for some lengths only."""
    return {"acc": process_results(doc, results)[str(doc["max_length"])]}


def babilong_books(qa_split, data=None, max_seq_lengths=0, samples=None, **kwargs) -> dict[str, Dataset]:
    book = _book(local_file(data, HAYSTACK), get_tokenizer(resolve_tokenizer_name(kwargs)))
    rows = babilong.make_samples(babilong.read_stories(data, qa_split), book, max_seq_lengths)
    return {qa_split: Dataset.from_list(list(islice(rows, samples)))}


@cache
def _book(folder: Path, tokenizer: PreTrainedTokenizerBase) -> babilong.Book:
    return babilong.Book(needles.book_text(folder), tokenizer)
