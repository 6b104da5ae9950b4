"""Kills titans-hf read while it reads a long text with needles, resumes it, and asks for the needles.

    python -m eval.studies.interrupted_reading MODEL --text data/books/train --output DIR

Pass-keys as RULER words them stand in novels at the given shares of the text. titans-hf read reads it, a token a byte,
in processes that are killed (SIGKILL) at shares of it and started anew; titans-hf ask is then asked for every key.
Writes interrupted_reading.json, .md and .png: resident memory against tokens read.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path

from matplotlib.figure import Figure

from titans_hf.cache_files import DESCRIPTION, read_description
from titans_hf.cli import read as read_command
from titans_hf.cli.evaluation.needles import KINDS, PREFIX, PROMPT, draw_key, draw_value, needle_of
from titans_hf.cli.shared.checkpoints import load_tokenizer
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.figures import save_figure
from titans_hf.cli.shared.markdown_tables import markdown_table
from titans_hf.cli.shared.text_files import find_files

SCRIPTS = Path(read_command.__file__).parent

PASSKEY = KINDS["niah_single_1"]
PROMPT_NAMES = {"value_name": "number"}
SAMPLE_SECONDS = 0.5  # between two samples of the reading process


def write_text(path: Path, books: list[Path], length: int, depths: list[float], seed: int) -> list[dict]:
    """Writes about `length` bytes of novels, repeated if need be; returns the needles: key, value, place in bytes."""
    rng = random.Random(seed)
    needles = [{"key": draw_key(rng), "value": draw_value(rng, PASSKEY), "depth": x} for x in sorted(depths)]
    begin, written = PROMPT.split("{context}")[0], 0
    with path.open("w", encoding="utf-8") as stream:

        def write(text: str) -> None:
            nonlocal written
            stream.write(text)
            written += len(text.encode())

        write(begin.format(**PROMPT_NAMES))
        waiting = list(needles)
        for book in cycle(books):
            for line in book.read_text(encoding="utf-8").splitlines(keepends=True):
                while waiting and written >= waiting[0]["depth"] * length:
                    needle = waiting.pop(0)
                    needle["place"] = written
                    write(needle_of(PASSKEY, needle["key"], needle["value"]) + "\n")
                if written >= length and not waiting:
                    return needles
                write(line)


def start(args: argparse.Namespace, text: Path) -> subprocess.Popen:
    options = ["--memory", args.output / "memory", "--save_every", args.save_every]
    command = [sys.executable, SCRIPTS / "read.py", args.model, text, *options]
    return subprocess.Popen(list(map(str, command)))


def saved(folder: Path) -> dict[str, int | None]:
    if not (folder / DESCRIPTION).exists():
        return {"tokens saved": 0, "memory file bytes": None}
    description = read_description(folder)
    return {"tokens saved": sum(description["tokens_seen"]), "memory file bytes": description["bytes"]}


def resident_bytes(process: int) -> int:
    """Returns the resident memory of a process in bytes. Raises OSError if it has ended."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def read(args: argparse.Namespace, text: Path, length: int) -> tuple[list[dict], list[dict]]:
    """Reads the whole text with kills; returns samples of the processes over time, and the state at each kill."""
    folder, samples, kills = args.output / "memory", [], []
    at = [share * length for share in sorted(args.kills)]
    begun, process = time.monotonic(), start(args, text)
    while process.poll() is None:
        time.sleep(SAMPLE_SECONDS)
        row = saved(folder) | {"process": len(kills) + 1, "seconds": time.monotonic() - begun}
        with contextlib.suppress(OSError):  # it may have ended
            samples.append(row | {"resident bytes": resident_bytes(process.pid)})
        if at and row["tokens saved"] >= at[0]:
            at.pop(0)
            process.kill()
            process.wait()
            kills.append(saved(folder) | {"seconds": time.monotonic() - begun})
            process = start(args, text)
    if process.returncode:
        raise RuntimeError(f"titans-hf read ended with {process.returncode}")
    return samples, kills


def ask(args: argparse.Namespace, needles: list[dict]) -> None:
    """Adds to each needle the model's answer; all are asked in one batch."""
    question = PROMPT.split("{context}\n")[1]
    prompts = [f"{question} {PREFIX}".format(**PROMPT_NAMES, key=needle["key"]) for needle in needles]
    command = [sys.executable, SCRIPTS / "ask.py", args.model, "--memory", args.output / "memory"]
    command += ["--max_new_tokens", args.max_new_tokens, *(f"--prompt={prompt}" for prompt in prompts)]
    output = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout
    for needle, prompt in zip(needles, prompts, strict=True):
        answer = output[output.index(prompt) + len(prompt) :].split("What is the special")[0]
        needle |= {"answer": answer.strip(), "right": needle["value"] in answer}


def draw(path: Path, samples: list[dict], kills: list[dict], title: str) -> None:
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for process in range(1, len(kills) + 2):
        rows = [row for row in samples if row["process"] == process]
        axes.plot(
            [row["tokens saved"] / 1e6 for row in rows],
            [row["resident bytes"] / 2**20 for row in rows],
            label=f"process {process}" + (", killed" if process <= len(kills) else ""),
        )
    axes.set(xlabel="tokens saved (millions)", ylabel="resident memory (MiB)", ylim=(0, None), title=title)
    save_figure(figure, path)


def table(needles: list[dict], length: int) -> str:
    rows = []
    for needle in needles:
        after = f"{length - needle['place']:,}"
        verdict = "right" if needle["right"] else "wrong"
        rows.append([f"{needle['depth']:.1%}", after, needle["value"], needle["answer"], verdict])
    return markdown_table(["needle at", "tokens after it", "asked for", "answered", ""], rows) + "\n"


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a Titans checkpoint that reads bytes, as passkey-lmm")
    parser.add_argument("--text", type=Path, required=True, help="a folder of .txt files to hide the needles in")
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--depths", type=float, nargs="+", default=[0.5])
    parser.add_argument("--kills", type=float, nargs="*", default=[1 / 3, 2 / 3])
    parser.add_argument("--save_every", type=int, default=20_000)
    parser.add_argument("--max_new_tokens", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    books = find_files(args.text, "--text")
    for name in ("depths", "kills"):
        if not all(0 <= share < 1 for share in getattr(args, name)):
            raise ValueError(f"--{name} {getattr(args, name)} must be from 0 to below 1")
    if len(load_tokenizer(args.model, "MODEL")("é", add_special_tokens=False).input_ids) != 2:
        raise ValueError(f"MODEL {args.model} does not read bytes: the lengths here are in bytes")
    if args.output.exists():
        raise ValueError(f"--output {args.output} exists")
    args.output.mkdir(parents=True)
    text = args.output / "text.txt"
    needles = write_text(text, books, args.tokens, args.depths, args.seed)
    length = text.stat().st_size
    samples, kills = read(args, text, length)
    ask(args, needles)
    sizes = sorted({row["memory file bytes"] for row in samples if row["memory file bytes"]})
    record = {"tokens": length, "needles": needles, "kills": kills, "memory file bytes": sizes, "samples": samples}
    (args.output / "interrupted_reading.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.output / "interrupted_reading.md").write_text(table(needles, length))
    draw(args.output / "interrupted_reading.png", samples, kills, f"{Path(args.model).name} reads {length:,} tokens")
    print(table(needles, length))
    peak = [max(x["resident bytes"] for x in samples if x["process"] == i + 1) / 2**20 for i in range(len(kills) + 1)]
    print(f"killed at {[kill['tokens saved'] for kill in kills]} tokens saved; memory file {sizes} bytes")
    print(f"most resident memory of each process: {', '.join(f'{x:.0f} MiB' for x in peak)}")
    return record


if __name__ == "__main__":
    run_command(main)
