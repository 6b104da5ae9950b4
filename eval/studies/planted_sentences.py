"""Measures whether the memory's surprise stands out at sentences planted in novels.

    python -m eval.studies.planted_sentences MODEL --text FOLDER --output DIR

Each of six sentences that no novelist of the time would have written is planted in the middle of a stretch of every
.txt file of the folder. Counted are the files where the mean over the sentence is higher than over any other stretch of
that length: of the surprise, of theta (the inner learning rate), and of their product; by layer, as the mean of the
heads.
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np
from tqdm import tqdm

from titans_hf.cli.shared.checkpoints import load_titans
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.markdown_tables import markdown_table
from titans_hf.cli.shared.text_files import find_files
from titans_hf.cli.surprise import QUANTITIES, measure, tokenize

SENTENCES = {
    "taxes": "The tax form 8843-B must be uploaded as a ZIP archive before 23:59 UTC, or the cluster reboots. ",
    "German": "Der Zug nach Zwickau fährt heute wegen Bauarbeiten an Gleis zwölf ab; bitte Durchsagen beachten. ",
    "random letters": "Xq zjkw vvbrt ppqx zzklm wqxj hhgvb kkzr xxv qqpl jzzw bvcx mnnq wwzx plkj zxcv qwrt. ",
    "code": "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; } return sum / (n - 1); // O(n) ",
    "digits": "3.14159265358979 2.71828182845904 1.61803398874989 0.57721566490153 1.41421356237309. ",
    "capitals": "THE NUCLEAR REACTOR IN SECTOR SEVEN HAS BEEN SHUT DOWN; EVACUATE ALL PERSONNEL NOW. ",
}
NUM_SKIPPED_TOKENS = 512  # tokens at the beginning that are not compared: the memory is still almost empty


def plant(text: str, length: int, sentence: str) -> tuple[str, int]:
    """Returns the middle `length` characters of a text with the sentence planted where another ends, and its place."""
    middle = text[max(0, (len(text) - length) // 2) :][:length]
    ends = [match.end() for match in re.finditer(r"[a-z]{3}\. ", middle)]
    if not ends:
        raise ValueError("no sentence ends in the text, so that none can follow")
    place = min(ends, key=lambda end: abs(end - length // 2))
    return middle[:place] + sentence + middle[place:], place


def stands_out(values: np.ndarray, first: int, last: int) -> np.ndarray:
    """Compares the mean over tokens `first` to `last` - 1 with all stretches of that length that do not overlap it.

    values (..., tokens); returns (...) bool, True where the mean is higher than all others.
    """
    size = last - first
    sums = np.cumsum(np.pad(values, [(0, 0)] * (values.ndim - 1) + [(1, 0)]), axis=-1)
    means = sums[..., size:] - sums[..., :-size]
    others = np.concatenate([means[..., NUM_SKIPPED_TOKENS : first - size + 1], means[..., last:]], axis=-1)
    return means[..., first] > others.max(-1)


def count(highest: np.ndarray) -> str:
    """Counts the files of every layer: (files, layers) bool -> "0 6 6 4"."""
    return " ".join(map(str, highest.sum(0)))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a Titans checkpoint: a folder or a name on the Hub")
    parser.add_argument("--text", type=Path, required=True, help="a folder of .txt files")
    parser.add_argument("--length", type=int, default=6000, help="characters of each file that are read")
    parser.add_argument("--output", type=Path, required=True, help="the folder for planted_sentences.json and .md")
    parser.add_argument("--device", help="cpu, cuda, ...; a GPU if there is one")
    args = parser.parse_args(argv)
    files = find_files(args.text, "--text")
    if args.length < 2000:
        raise ValueError(f"--length must be at least 2000, but is {args.length}: a sentence is compared with others")
    model, tokenizer = load_titans(args.model, args.device)
    rows, highest = [], {}
    for name, sentence in SENTENCES.items():
        per_file = []
        for file in tqdm(files, desc=name):
            text, place = plant(file.read_text(encoding="utf-8"), args.length, sentence)
            ids, spans = tokenize(tokenizer, text)
            first, last = np.searchsorted([start for start, _ in spans], (place, place + len(sentence)))
            values = measure(model, ids)
            surprise, theta = (values[list(QUANTITIES).index(part)] for part in ("gradient_norm", "inner_lr"))
            per_file.append(stands_out(np.stack([surprise, theta, surprise * theta]), first, last))
        highest[name] = np.stack(per_file, axis=1)  # (quantities, files, layers)
        rows.append([name, *map(count, highest[name])])
    table = markdown_table([f"in how many of {len(files)}, by layer", "surprise", "theta", "theta × surprise"], rows)
    args.output.mkdir(parents=True, exist_ok=True)
    record = {"files": [file.name for file in files], "stands out": {k: v.tolist() for k, v in highest.items()}}
    (args.output / "planted_sentences.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    (args.output / "planted_sentences.md").write_text(table + "\n", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    run_command(main)
