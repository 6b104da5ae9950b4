"""A small data folder in the published formats, and a model with rule-based answers, for the tests of eval/."""

import bz2
import hashlib
import json
import re
from pathlib import Path

import pytest
from datasets import Dataset
from lm_eval.api.model import LM

EVAL = Path(__file__).parents[2] / "src" / "titans_hf" / "cli" / "evaluation"
SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the texts of docs/results.md are absent")
BOOK = "It was dark. Mr. Darcy came! 'Who is there?' she said. Nobody was. The wind (it blew.) fell.\n" * 400
STORIES = {
    "qa1_single-supporting-fact": "1 Mary went to the hall.\n2 John ran to the garden.\n3 Where is Mary? \thall\t1\n"
    "4 Mary left for the office.\n5 Where is Mary? \toffice\t4\n1 Sandra moved to the garden.\n"
    "2 Where is Sandra? \tgarden\t1\n",
}


def _jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_data(folder: Path) -> Path:
    """Writes a data folder with one to three items of every data set; returns it."""
    _make_commonsense(folder / "commonsense")
    for name in ("lambada", "wikitext/wikitext-2", "babi/en-10k", "books/test"):
        (folder / name).mkdir(parents=True)
    _jsonl(folder / "lambada/lambada_test.jsonl", [{"text": "He saw a dog"}, {"text": 'one two "three" four'}])
    layout = [
        " ",
        " = A = ",
        " ",
        " first , <unk> ",
        " ",
        " = = B = = ",
        " ",
        " x @-@ y ",
        " ",
        " = C = ",
        " ",
        " z . ",
        " ",
        "",
    ]
    (folder / "wikitext/wikitext-2/test.txt").write_text("\n".join(layout))
    raw = "\n".join(line for line in layout if line.strip()).replace("<unk>", "Quux") + "\n"
    (folder / "wikitext/wiki.test.raw").write_text(raw)
    (folder / "books/test/a.txt").write_text(BOOK)
    for name in ("qa1_a", "qa2_b", "qa3_c", "qa4_d", "qa5_e"):
        (folder / f"babi/en-10k/{name}_test.txt").write_text(STORIES["qa1_single-supporting-fact"])
    return folder


def _make_commonsense(commonsense: Path) -> None:
    for name in ("piqa", "hellaswag", "arc", "winogrande/winogrande_xl/validation", "boolq/validation"):
        (commonsense / name).mkdir(parents=True)
    _jsonl(
        commonsense / "piqa/valid.jsonl",
        [{"goal": "g", "sol1": "a", "sol2": "b"}, {"goal": "h?", "sol1": "c d", "sol2": "e"}],
    )
    (commonsense / "piqa/valid-labels.lst").write_text("1\n0\n")
    lines = ["Canoeing: Two sit in a boat. the man", "2", "rows.", "sinks fast.", "sings.", "stops."]
    lines += ['Youth: How to eat. Sit. Eat "well".', "0", "Do.", "Don't.", "Wait. Then eat.", "No more."]
    with bz2.open(commonsense / "hellaswag/hellaswag_val_full.txt.bz2", "wt") as file:
        file.write("\n".join(lines) + "\n")
    for level in ("easy", "challenge"):
        _jsonl(
            commonsense / f"arc/arc_{level}_test.jsonl",
            [
                {"id": "x", "question": "Why?", "choices": ["so", "not so"], "gold": 1},
                {"id": "y", "question": "Who?", "choices": ["me", "you", "they"], "gold": 0},
            ],
        )
    _arrow(
        commonsense / "winogrande/winogrande_xl/validation",
        [{"sentence": "Ann gave Bea _ keys.", "option1": "Ann", "option2": "Bea", "answer": "2"}],
    )
    _arrow(commonsense / "boolq/validation", [{"question": "is it", "answer": True, "passage": "It is."}])


def _arrow(folder: Path, rows: list[dict]) -> None:
    Dataset.from_list(rows).save_to_disk(folder)


class RuleLM(LM):
    """Returns log-likelihoods from a hash of the texts, and the needle of every second prompt."""

    def _draw(self, *texts: str) -> float:
        return -int(hashlib.sha256("\0".join(texts).encode()).hexdigest()[:6], 16) / 1e5

    def loglikelihood(self, requests):
        return [(self._draw(*r.args), self._draw("greedy", *r.args) > -80) for r in requests]

    def loglikelihood_rolling(self, requests):
        return [self._draw(*r.args) for r in requests]

    def generate_until(self, requests):
        answers = [re.search(r" is: (\S+)\.", r.args[0]) for r in requests]
        return [f" {a[1].upper()}. And" if a and i % 2 else "hall \x00" for i, a in enumerate(answers)]
