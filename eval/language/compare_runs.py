"""Makes the table of runs of train_and_score: mean and spread over seeds, and paired differences between rows.

    python -m eval.language.compare_runs runs/language.jsonl --pairs lmm:lmm-off mag:mag-off

Runs that differ in their seed alone are one row, which has their name. A difference is the mean over seeds and texts of
(loss - loss of the baseline with the same seed on the same stretches), in nats per token. Its 95 % interval is a
bootstrap over both seeds and texts (not over stretches, because stretches of one novel resemble each other); a row of
one seed has none.
"""

import argparse
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from eval.common.records import read_records
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.markdown_tables import markdown_table

NUM_RESAMPLES = 2000
PAIR = "NAME:BASELINE"
Rows = dict[str, pd.DataFrame]  # losses by position of each row; the index has seed, stretch and text


def read_rows(files: list[Path], patterns: list[str], texts: list[str] | None = None) -> tuple[Rows, dict[str, int]]:
    """Reads the losses of the runs whose names match a pattern, in the order of the patterns and of the files, on all
    texts or on those of `texts`; and the parameters of each row.

    Raises ValueError for a pattern without runs, for a text that a run was not scored on, for runs of one name that
    differ in their size, and for rows that were not scored at the same positions.
    """
    records = [record for file in files for record in read_records(file, "language")]
    parts: dict[str, Rows] = {}
    sizes: dict[str, int] = {}
    for pattern in patterns:
        found = [record for record in records if fnmatchcase(record["name"], pattern)]
        if not found:
            raise ValueError(f"--rows {pattern}: no run in {', '.join(map(str, files))} has such a name")
        for record in found:
            name, ranges = record["name"], [f"{low:,} to {high:,}" for low, high in pairwise(record["edges"])]
            losses = pd.DataFrame(record["stretches"], columns=["text", *ranges]).set_index("text", append=True)
            scored = losses.index.get_level_values("text")
            if missing := sorted(set(texts or ()) - set(scored)):
                raise ValueError(f"--texts: {name} was not scored on {', '.join(missing)}")
            if sizes.setdefault(name, record["parameters"]) != record["parameters"]:
                raise ValueError(f"runs of the name {name} differ in their size")
            chosen = losses[scored.isin(texts)] if texts else losses
            parts.setdefault(name, {})[record["training"]["seed"]] = chosen
    rows = {name: pd.concat(by_seed, names=["seed", "stretch", "text"]) for name, by_seed in parts.items()}
    if len({tuple(losses) for losses in rows.values()}) > 1:
        raise ValueError(f"{', '.join(rows)} were not all scored at the same positions")
    return rows, sizes


def mean_with_spread(losses: pd.DataFrame) -> list[str]:
    """Formats the mean over seeds of every range, with the standard deviation where there are several."""
    means = np.stack([np.array(of_seed, order="C").mean(0) for _, of_seed in losses.groupby("seed", sort=False)])
    if len(means) == 1:
        return [f"{x:.3f}" for x in means[0]]
    return [f"{x:.3f} ± {s:.3f}" for x, s in zip(means.mean(0), means.std(0, ddof=1), strict=True)]


def difference(losses: pd.DataFrame, baseline: pd.DataFrame) -> pd.DataFrame:
    """Averages the difference of each seed over the stretches of each text, of seeds and stretches that both have."""
    return (losses - baseline).dropna().groupby(["seed", "text"]).mean()


def resampled_means(change: pd.DataFrame) -> np.ndarray:
    """Draws seeds and texts with replacement, the same ones in every call, and averages: (resamples, ranges)."""
    seeds, texts = (change.index.unique(level).size for level in ("seed", "text"))
    rng = np.random.default_rng(0)
    picked_seeds = rng.integers(seeds, size=(NUM_RESAMPLES, seeds, 1))
    picked_texts = rng.integers(texts, size=(NUM_RESAMPLES, 1, texts))
    return change.to_numpy().reshape(seeds, texts, -1)[picked_seeds, picked_texts].mean((1, 2))


def paired_difference(losses: pd.DataFrame, baseline: pd.DataFrame) -> list[str]:
    """Formats the number of seeds that both have, and the difference in every range, with its 95 % interval if there
    are several seeds: an interval over the texts of one seed would leave out the effect of the seed.
    """
    change = difference(losses, baseline)
    values, seeds = change.mean(), change.index.unique("seed").size
    if seeds < 2:
        return [str(seeds), *("-" if np.isnan(x) else f"{x:+.3f}" for x in values)]
    low, high = np.quantile(resampled_means(change), [0.025, 0.975], axis=0)
    return [str(seeds), *(f"{x:+.3f} [{a:+.3f}, {b:+.3f}]" for x, a, b in zip(values, low, high, strict=True))]


def parse_pairs(given: list[str], rows: Rows) -> list[list[str]]:
    """Splits names of rows given as NAME:BASELINE. Raises ValueError for other names and forms."""
    for text in given:
        if len(text.split(":")) != 2 or not rows.keys() >= set(text.split(":")):
            raise ValueError(f"--pairs must be {PAIR}, all of {', '.join(rows)}, but has {text}")
    return [text.split(":") for text in given]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="JSON Lines files of train_and_score")
    parser.add_argument(
        "--rows", nargs="+", default=["*"], help="names of rows, in the table's order; * stands for any"
    )
    parser.add_argument("--texts", nargs="+", metavar="TEXT", help="texts that count; by default all that were scored")
    parser.add_argument("--pairs", nargs="+", default=[], metavar=PAIR, help="rows to be compared")
    args = parser.parse_args(argv)
    rows, sizes = read_rows(args.runs, args.rows, args.texts)
    pairs = parse_pairs(args.pairs, rows)
    ranges = list(next(iter(rows.values())))
    lines = [
        [name, f"{sizes[name]:,}", losses.index.unique("seed").size, *mean_with_spread(losses)]
        for name, losses in rows.items()
    ]
    print(markdown_table(["model", "parameters", "seeds", *ranges], lines))
    if pairs:
        lines = [[f"{name} less {base}", *paired_difference(rows[name], rows[base])] for name, base in pairs]
        print("\n" + markdown_table(["difference", "seeds", *ranges], lines))


if __name__ == "__main__":
    run_command(main)
