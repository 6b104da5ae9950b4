"""Make the table of runs of train_and_score.py: mean and spread over seeds, and paired differences from one of them.

    python -m experiments.language.compare_runs experiments/language/results/*.json --baseline lmm-stopped

Runs that differ in their seed alone are one row; its name is the file's without the "-seed0" at its end. A difference
is the mean over texts of (loss - loss of the baseline with the same seed on the same stretches), in nats per token,
with its 95 % interval by a bootstrap over the texts (not over stretches: those of a novel resemble each other).
"""

import argparse
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titans_hf_scripts.shared.command_line import run_command
from titans_hf_scripts.shared.markdown_tables import markdown_table

NUM_RESAMPLES = 2000


class Row(NamedTuple):
    """The runs of one kind: by seed, losses (stretches, ranges) and the text of each stretch."""

    name: str
    parameters: int
    edges: list[int]
    texts: list[str]
    losses: dict[int, np.ndarray]


def read_rows(files: list[Path]) -> dict[str, Row]:
    """Read the runs, by name. Raises ValueError for runs of one name that differ in more than the seed."""
    rows: dict[str, Row] = {}
    for file in sorted(files):
        record = json.loads(file.read_text(encoding="utf-8"))
        name = re.sub(r"-seed\d+$", "", file.stem)
        texts, losses = [x[0] for x in record["stretches"]], np.array([x[1:] for x in record["stretches"]])
        row = rows.setdefault(name, Row(name, record["parameters"], record["edges"], texts, {}))
        if (row.parameters, row.edges, row.texts) != (record["parameters"], record["edges"], texts):
            raise ValueError(f"{file} differs from the other runs named {name} in its size or in what was scored")
        row.losses[record["training"]["seed"]] = losses
    return rows


def mean_with_spread(row: Row) -> list[str]:
    """Format the mean over seeds of every range, with the standard deviation where there are several."""
    means = np.stack([losses.mean(0) for losses in row.losses.values()])
    if len(means) == 1:
        return [f"{x:.3f}" for x in means[0]]
    return [f"{x:.3f} ± {s:.3f}" for x, s in zip(means.mean(0), means.std(0, ddof=1), strict=True)]


def paired_difference(row: Row, baseline: Row) -> list[str]:
    """Format the difference in every range, of the seeds that both have, with its interval."""
    seeds = sorted(row.losses.keys() & baseline.losses.keys())
    if row.texts != baseline.texts or not seeds:
        return ["-"] * (len(row.edges) - 1)
    difference = np.mean([row.losses[seed] - baseline.losses[seed] for seed in seeds], axis=0)
    names = sorted(set(row.texts))
    by_text = np.stack([difference[[text == name for text in row.texts]].mean(0) for name in names])
    generator = np.random.default_rng(0)
    samples = by_text[generator.integers(len(names), size=(NUM_RESAMPLES, len(names)))].mean(1)
    low, high = np.quantile(samples, [0.025, 0.975], axis=0)
    return [f"{x:+.3f} [{a:+.3f}, {b:+.3f}]" for x, a, b in zip(by_text.mean(0), low, high, strict=True)]


def tables(rows: dict[str, Row], baseline: str | None) -> str:
    """Make the tables of losses and, with a baseline, of differences from it."""
    edges = next(iter(rows.values())).edges
    ranges = [f"{low:,} to {high:,}" for low, high in pairwise(edges)]
    losses = [[row.name, f"{row.parameters:,}", len(row.losses), *mean_with_spread(row)] for row in rows.values()]
    parts = [markdown_table(["model", "parameters", "seeds", *ranges], losses)]
    if baseline:
        pairs = [(row, rows[baseline]) for row in rows.values() if row.name != baseline]
        differences = [
            [row.name, len(row.losses.keys() & base.losses.keys()), *paired_difference(row, base)]
            for row, base in pairs
        ]
        parts.append(markdown_table([f"less {baseline}", "seeds", *ranges], differences))
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="JSON files of train_and_score.py")
    parser.add_argument("--baseline", help="the name of the row that the others are compared with")
    args = parser.parse_args(argv)
    rows = read_rows(args.runs)
    if args.baseline and args.baseline not in rows:
        raise ValueError(f"--baseline must be one of {', '.join(rows)}, but is {args.baseline}")
    print(tables(rows, args.baseline))


if __name__ == "__main__":
    run_command(main)
