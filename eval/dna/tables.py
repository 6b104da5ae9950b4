"""The tables of DNA, with the paper's figures.

A figure is the accuracy on the test part, in percent. The mean and standard deviation are over folds; the accuracy of a
fold is the mean of its seeds. The column "each seed" has the mean over folds of each seed that has all folds.
"""

from collections.abc import Iterable
from statistics import mean  # rounds less than pandas' own

import pandas as pd

from eval.common.records import Record
from eval.common.tables import frame_of, read_paper, with_spread
from eval.dna.models import NAMES
from titans_hf.cli.shared.markdown_tables import markdown_table

HEADING = ["model", "parameters", "folds", "accuracy", "each seed", "validation accuracy", "learning rate", "minutes"]


def results_of(records: list[Record]) -> dict[str, dict[str, pd.DataFrame]]:
    """Returns the runs of each data and row by seed and fold, those at the rate that is best on the first fold's
    validation part with the first seed. A row without such a run has no rate yet and is left out.
    """
    results: dict[str, dict[str, pd.DataFrame]] = {}
    runs = frame_of(records, "seed", "fold").sort_values(
        "model", key=lambda names: names.map(NAMES.index), kind="stable"
    )
    for (data, row), of_row in runs.groupby(["data", "row"], sort=False):
        first = of_row.index.min()[0], 0
        rates = [of_rate for _, of_rate in of_row.groupby("learning_rate") if first in of_rate.index]
        if rates:  # of equal rates one has all folds
            best = max(rates, key=lambda of_rate: (of_rate["valid"][first], len(of_rate)))
            results.setdefault(data, {})[row] = best
    return results


def percent(values: Iterable[float], sign: str = "") -> str:
    """Formats the mean of shares in percent, with the standard deviation of several."""
    return with_spread(list(values), f"{sign}.1f", 100).replace("-0.0", f"{sign}0.0")


def summary(scores: pd.Series, sign: str = "") -> tuple[int, str, str]:
    """Formats the number of folds, the mean and deviation over them, and the mean of each seed that has all folds."""
    of_folds, of_seeds = scores.groupby("fold").agg(mean), scores.unstack("fold").dropna().mean(axis=1)
    return len(of_folds), percent(of_folds, sign), ", ".join(percent([score], sign) for score in of_seeds)


def table(data: str, rows: dict[str, pd.DataFrame]) -> str:
    """Formats a row per model, and the paper's below them where the data are of GenomicBenchmarks."""
    lines = []
    for row, runs in rows.items():
        scores = [*summary(runs["test"]), summary(runs["valid"])[1]]
        rest = [f"{runs['learning_rate'].iloc[0]:g}", f"{runs['minutes'].mean():.1f}"]
        lines.append([row, f"{runs['parameters'].iloc[0]:,}", *scores, *rest])
    paper = read_paper("dna")
    column = next((i for i, name in enumerate(paper["columns"]) if data.startswith(name)), None)
    for name, figures in paper["rows"].items() if column is not None else ():
        if figures[column] is not None:
            lines.append([f"the paper's {name}", "–", "–", figures[column], *["–"] * 4])
    return markdown_table(HEADING, lines)


def differences(rows: dict[str, pd.DataFrame], baseline: str) -> str:
    """Formats the differences of accuracy from a baseline, of equal seed and fold, in percentage points."""
    changes = {row: (runs["test"] - rows[baseline]["test"]).dropna() for row, runs in rows.items() if row != baseline}
    lines = [(row, *summary(change, "+")) for row, change in changes.items() if len(change)]
    cells = [[row, *both, number] for row, number, *both in lines]
    return markdown_table([f"less {baseline}", "accuracy", "each seed", "folds"], cells)


def make_report(records: list[Record], baselines: list[str]) -> list[str]:
    """Makes the tables: for each data one of all rows, and one of the differences from each baseline."""
    tables = ["# DNA"]
    for data, rows in results_of(records).items():
        tables += [f"## {data}", table(data, rows)]
        tables += [differences(rows, baseline) for baseline in baselines if baseline in rows]
    return tables
