"""Makes the table of runs of train_and_score: mean and spread over seeds, and paired differences between rows.

    python -m eval.language.compare_runs runs/language.jsonl --pairs lmm:lmm-off mag:mag-off

Runs that differ in their seed alone are one row, which has their name. A difference is the mean over seeds and texts of
(loss - loss of the baseline with the same seed on the same stretches), in nats per token. Its 95 % interval is a
bootstrap over both seeds and texts (not over stretches, because stretches of one novel resemble each other); a row of
one seed has none. The share of a gap that a model closes is (loss of the window - its loss) / (loss of the window -
loss of full attention).
"""

import argparse
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eval.common.records import Record, read_records
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.markdown_tables import markdown_table

NUM_RESAMPLES = 2000
PAIR, GAP = "NAME:BASELINE", "NAME:WINDOW:FULL"


class Row(NamedTuple):
    """The runs of one kind: by seed, losses (stretches, ranges) and the text of each stretch."""

    name: str
    parameters: int
    edges: list[int]
    texts: list[str]
    losses: dict[int, np.ndarray]


def read_rows(files: list[Path], patterns: list[str], texts: list[str] | None = None) -> dict[str, Row]:
    """Reads the runs whose names match a pattern, by name, in the order of the patterns and of the files, with their
    losses on all texts, or on those of `texts`.

    Raises ValueError for a pattern without runs, for a text that a run was not scored on, for runs of one name that
    differ in more than the seed, and for rows that were not scored at the same positions.
    """
    records = [record for file in files for record in read_records(file, "language")]
    rows: dict[str, Row] = {}
    for pattern in patterns:
        found = [record for record in records if fnmatchcase(record["name"], pattern)]
        if not found:
            raise ValueError(f"--rows {pattern}: no run in {', '.join(map(str, files))} has such a name")
        _add_rows(rows, found, texts)
    return rows


def _add_rows(rows: dict[str, Row], records: list[Record], only: list[str] | None) -> None:
    for record in records:
        name, stretches = record["name"], record["stretches"]
        if only is not None:
            if missing := sorted(set(only) - {x[0] for x in stretches}):
                raise ValueError(f"--texts: {name} was not scored on {', '.join(missing)}")
            stretches = [x for x in stretches if x[0] in only]
        texts, losses = [x[0] for x in stretches], np.array([x[1:] for x in stretches])
        new = Row(name, record["parameters"], record["edges"], texts, {})
        row = rows.setdefault(name, new)
        if new.edges != next(iter(rows.values())).edges:
            raise ValueError(f"{name} was scored at other positions than {next(iter(rows))}")
        if (row.parameters, row.texts) != (new.parameters, new.texts):
            raise ValueError(f"runs of the name {name} differ in their size or in the texts that were scored")
        row.losses[record["training"]["seed"]] = losses


def mean_with_spread(row: Row) -> list[str]:
    """Formats the mean over seeds of every range, with the standard deviation where there are several."""
    means = np.stack([losses.mean(0) for losses in row.losses.values()])  # (seeds, ranges)
    if len(means) == 1:
        return [f"{x:.3f}" for x in means[0]]
    return [f"{x:.3f} ± {s:.3f}" for x, s in zip(means.mean(0), means.std(0, ddof=1), strict=True)]


def common_seeds(*rows: Row) -> list[int]:
    """Returns the seeds that all rows have; none if they were scored on different texts."""
    if any(row.texts != rows[0].texts for row in rows):
        return []
    return sorted(set.intersection(*(set(row.losses) for row in rows)))


def differences(row: Row, baseline: Row, seeds: list[int]) -> np.ndarray:
    """Averages the difference of each seed over the stretches of each text: (seeds, texts, ranges)."""
    difference = np.stack([row.losses[seed] - baseline.losses[seed] for seed in seeds])
    chosen = [[text == name for text in row.texts] for name in sorted(set(row.texts))]
    return np.stack([difference[:, mask].mean(1) for mask in chosen], axis=1)


def resampled_means(by_seed_and_text: np.ndarray) -> np.ndarray:
    """Draws seeds and texts with replacement, the same ones in every call, and averages: (resamples, ranges)."""
    seeds, texts = by_seed_and_text.shape[:2]
    rng = np.random.default_rng(0)
    picked_seeds = rng.integers(seeds, size=(NUM_RESAMPLES, seeds, 1))
    picked_texts = rng.integers(texts, size=(NUM_RESAMPLES, 1, texts))
    return by_seed_and_text[picked_seeds, picked_texts].mean((1, 2))


def with_intervals(values: np.ndarray, samples: np.ndarray, seeds: int, form: str) -> list[str]:
    """Formats the number of seeds and the values (ranges,), with 95 % intervals over the samples (resamples, ranges)
    if there are several seeds: an interval over the texts of one seed would leave out the effect of the seed.
    """
    if seeds == 1:
        return ["1", *(f"{x:{form}}" for x in values)]
    low, high = np.quantile(samples, [0.025, 0.975], axis=0)
    return [str(seeds), *(f"{x:{form}} [{a:{form}}, {b:{form}}]" for x, a, b in zip(values, low, high, strict=True))]


def paired_difference(row: Row, baseline: Row) -> list[str]:
    """Formats the number of seeds that both have, and the difference in every range with its interval."""
    seeds = common_seeds(row, baseline)
    if not seeds:
        return ["0"] + ["-"] * (len(row.edges) - 1)
    found = differences(row, baseline, seeds)
    return with_intervals(found.mean((0, 1)), resampled_means(found), len(seeds), "+.3f")


def share_of_gap(row: Row, window: Row, full: Row) -> list[str]:
    """Formats the number of seeds that all have, and (window - row) / (window - full) by range, with intervals."""
    seeds = common_seeds(row, window, full)
    if not seeds:
        return ["0"] + ["-"] * (len(row.edges) - 1)
    gained, gap = (differences(window, other, seeds) for other in (row, full))
    share = gained.mean((0, 1)) / gap.mean((0, 1))
    return with_intervals(share, resampled_means(gained) / resampled_means(gap), len(seeds), ".2f")


def tables(rows: dict[str, Row], pairs: list[list[Row]], gaps: list[list[Row]]) -> str:
    """Formats three tables: losses; differences from a baseline (`pairs`); shares of the gap to full attention that are
    closed (`gaps`).
    """
    edges = next(iter(rows.values())).edges
    ranges = [f"{low:,} to {high:,}" for low, high in pairwise(edges)]
    losses = [[row.name, f"{row.parameters:,}", len(row.losses), *mean_with_spread(row)] for row in rows.values()]
    parts = [markdown_table(["model", "parameters", "seeds", *ranges], losses)]
    if pairs:
        differences = [[f"{row.name} less {base.name}", *paired_difference(row, base)] for row, base in pairs]
        parts.append(markdown_table(["difference", "seeds", *ranges], differences))
    if gaps:
        shares = [[f"{row.name}, from {a.name} to {b.name}", *share_of_gap(row, a, b)] for row, a, b in gaps]
        parts.append(markdown_table(["share of the gap closed", "seeds", *ranges], shares))
    return "\n\n".join(parts)


def parse_names(option: str, form: str, given: list[str], rows: dict[str, Row]) -> list[list[Row]]:
    """Looks up rows given as `form`, such as NAME:BASELINE. Raises ValueError for other names and forms."""
    found = []
    for text in given:
        names = text.split(":")
        if len(names) != len(form.split(":")) or not rows.keys() >= set(names):
            raise ValueError(f"{option} must be {form}, all of {', '.join(rows)}, but has {text}")
        found.append([rows[name] for name in names])
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="JSON Lines files of train_and_score")
    parser.add_argument(
        "--rows", nargs="+", default=["*"], help="names of rows, in the table's order; * stands for any"
    )
    parser.add_argument("--texts", nargs="+", metavar="TEXT", help="texts that count; by default all that were scored")
    parser.add_argument("--pairs", nargs="+", default=[], metavar=PAIR, help="rows to be compared")
    parser.add_argument(
        "--gaps", nargs="+", default=[], metavar=GAP, help="gaps; the table shows the share of each that NAME closes"
    )
    args = parser.parse_args(argv)
    rows = read_rows(args.runs, args.rows, args.texts)
    pairs = parse_names("--pairs", PAIR, args.pairs, rows)
    print(tables(rows, pairs, parse_names("--gaps", GAP, args.gaps, rows)))


if __name__ == "__main__":
    run_command(main)
