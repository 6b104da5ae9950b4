"""Makes the table of runs of train_and_score.py: mean and spread over seeds, and paired differences between rows.

    python -m experiments.language.compare_runs runs/language/*.json --pairs lmm:lmm-stopped mag:mag-stopped

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
from titans_hf_scripts.shared.figures import (
    line_styles,
    loss_by_position_axes,
    mark_trained_length,
    plot_with_spread,
    save_figure,
)
from titans_hf_scripts.shared.markdown_tables import markdown_table

NUM_RESAMPLES = 2000


class Row(NamedTuple):
    """The runs of one kind: by seed, losses (stretches, ranges) and the text of each stretch."""

    name: str
    parameters: int
    edges: list[int]
    texts: list[str]
    losses: dict[int, np.ndarray]
    block_length: int

    def mean_losses(self) -> np.ndarray:
        """Averages over the stretches: (seeds, ranges)."""
        return np.stack([losses.mean(0) for losses in self.losses.values()])


def read_rows(files: list[Path]) -> dict[str, Row]:
    """Reads the runs, by name, in the order of the files. Raises ValueError for runs of one name that differ in more
    than the seed, and for rows that were not scored at the same positions.
    """
    rows: dict[str, Row] = {}
    for file in files:
        record = json.loads(file.read_text(encoding="utf-8"))
        name = re.sub(r"-seed\d+$", "", file.stem)
        texts, losses = [x[0] for x in record["stretches"]], np.array([x[1:] for x in record["stretches"]])
        training = record["training"]
        new = Row(name, record["parameters"], record["edges"], texts, {}, training["block_length"])
        row = rows.setdefault(name, new)
        if new.edges != next(iter(rows.values())).edges:
            raise ValueError(f"{file} was scored at other positions than {files[0]}")
        if (row.parameters, row.texts) != (new.parameters, new.texts):
            raise ValueError(f"{file} differs from the other runs named {name} in its size or in what was scored")
        row.losses[training["seed"]] = losses
    return rows


def mean_with_spread(row: Row) -> list[str]:
    """Formats the mean over seeds of every range, with the standard deviation where there are several."""
    means = row.mean_losses()
    if len(means) == 1:
        return [f"{x:.3f}" for x in means[0]]
    return [f"{x:.3f} ± {s:.3f}" for x, s in zip(means.mean(0), means.std(0, ddof=1), strict=True)]


def paired_difference(row: Row, baseline: Row) -> list[str]:
    """Formats the difference in every range, of the seeds that both have, with its interval."""
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


def tables(rows: dict[str, Row], pairs: list[tuple[Row, Row]]) -> str:
    """Makes the table of losses and, with pairs of a row and its baseline, that of their differences."""
    edges = next(iter(rows.values())).edges
    ranges = [f"{low:,} to {high:,}" for low, high in pairwise(edges)]
    losses = [[row.name, f"{row.parameters:,}", len(row.losses), *mean_with_spread(row)] for row in rows.values()]
    parts = [markdown_table(["model", "parameters", "seeds", *ranges], losses)]
    if pairs:
        differences = [
            [f"{row.name} less {base.name}", len(row.losses.keys() & base.losses.keys()), *paired_difference(row, base)]
            for row, base in pairs
        ]
        parts.append(markdown_table(["difference", "seeds", *ranges], differences))
    return "\n\n".join(parts)


def plot(rows: dict[str, Row], path: Path) -> None:
    """Draws loss against position, the mean over seeds with a band from the least to the greatest."""
    ends, styles = next(iter(rows.values())).edges[1:], line_styles(rows)
    axes = loss_by_position_axes(ends, "nats per token")
    for name, row in rows.items():
        plot_with_spread(axes, ends, row.mean_losses(), styles[name])
    lengths = {row.block_length for row in rows.values()}
    if len(lengths) == 1:
        mark_trained_length(axes, lengths.pop())
    save_figure(axes.figure, path)


def parse_pairs(pairs: list[str], rows: dict[str, Row]) -> list[tuple[Row, Row]]:
    """Looks up NAME:BASELINE pairs. Raises ValueError for a name that no row has, or what is no pair."""
    found = []
    for pair in pairs:
        names = pair.split(":")
        if len(names) != 2 or not rows.keys() >= set(names):
            raise ValueError(f"--pairs must be NAME:BASELINE, both of {', '.join(rows)}, but has {pair}")
        found.append((rows[names[0]], rows[names[1]]))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="JSON files of train_and_score.py, in the table's order")
    parser.add_argument("--baseline", help="the name of the row that all others are compared with")
    parser.add_argument("--pairs", nargs="+", default=[], metavar="NAME:BASELINE", help="rows to be compared")
    parser.add_argument("--plot", type=Path, help="an image file of the losses by position")
    args = parser.parse_args(argv)
    rows = read_rows(args.runs)
    if args.baseline and args.baseline not in rows:
        raise ValueError(f"--baseline must be one of {', '.join(rows)}, but is {args.baseline}")
    against = [f"{name}:{args.baseline}" for name in rows if args.baseline and name != args.baseline]
    print(tables(rows, parse_pairs(against + args.pairs, rows)))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    run_command(main)
