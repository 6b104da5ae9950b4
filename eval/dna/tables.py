"""The tables of DNA, with the paper's figures.

A figure is the accuracy on the test part, in percent: the mean and standard deviation over folds, of each the mean of
its seeds.
"""

from statistics import mean  # rounds less than pandas' own

import pandas as pd

from eval.common.records import Record
from eval.common.tables import frame_of, read_paper, with_spread
from titans_hf.cli.shared.markdown_tables import markdown_table

HEADING = ["model", "parameters", "folds", "accuracy", "validation accuracy", "learning rate", "minutes"]


def percent(scores: pd.Series, sign: str = "") -> str:
    """Formats the mean over folds in percent, with the standard deviation of several."""
    return with_spread(list(scores.groupby("fold").agg(mean)), f"{sign}.1f", 100)


def table(data: str, rows: dict[str, pd.DataFrame]) -> str:
    """Formats a row per model, and the paper's below them where the data are of GenomicBenchmarks."""
    lines = []
    for row, runs in rows.items():
        first, folds = runs.iloc[0], runs.index.unique("fold").size
        scores = [percent(runs[name]) for name in ("test", "valid")]
        minutes = f"{runs['minutes'].mean():.1f}"
        lines.append([row, f"{first['parameters']:,}", folds, *scores, f"{first['learning_rate']:g}", minutes])
    paper = read_paper("dna")
    column = next((i for i, name in enumerate(paper["columns"]) if data.startswith(name)), None)
    figures = {name: x[column] for name, x in paper["rows"].items() if column is not None}
    lines += [[f"the paper's {name}", "–", "–", x, "–", "–", "–"] for name, x in figures.items() if x is not None]
    return markdown_table(HEADING, lines)


def differences(rows: dict[str, pd.DataFrame], baseline: str) -> str:
    """Formats the differences of accuracy from a baseline, of equal seed and fold, in percentage points."""
    changes = {row: (runs["test"] - rows[baseline]["test"]).dropna() for row, runs in rows.items() if row != baseline}
    lines = [[row, percent(x, "+"), x.index.unique("fold").size] for row, x in changes.items() if len(x)]
    return markdown_table([f"less {baseline}", "accuracy", "folds"], lines)


def make_report(records: list[Record], baselines: list[str]) -> list[str]:
    """Makes the tables: for each data one of all rows, and one of the differences from each baseline."""
    tables, runs = ["# DNA"], frame_of(records, "seed", "fold")
    for data, of_data in runs.groupby("data", sort=False):
        # At the rate of most runs; the others have tried another rate on a fold.
        rows = {row: x[x["learning_rate"] == x["learning_rate"].mode()[0]] for row, x in of_data.groupby("row")}
        tables += [f"## {data}", table(data, rows)]
        tables += [differences(rows, baseline) for baseline in baselines if baseline in rows]
    return tables
