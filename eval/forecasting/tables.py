"""The tables of forecasts, with the paper's figures."""

import pandas as pd

from eval.common.records import Record
from eval.common.tables import frame_of, read_paper, with_spread
from titans_hf.cli.shared.markdown_tables import markdown_table

PAPER = read_paper("forecasting")
METRICS = ("mse", "mae")
NOTES = (
    "- Mean squared / mean absolute error of values scaled by the training part, over all windows of the test part.",
    '- The column "mean" is of the seeds that have all horizons; ± is the standard deviation over seeds.',
    "- Rows of the paper are quoted from arXiv 2501.00663, which has the means over horizons only.",
)


def cell(runs: pd.DataFrame, horizons: list[int]) -> str:
    """Formats both metrics, of each seed the mean over `horizons`, with their spread over several seeds."""
    values = [runs[metric].unstack("horizon").reindex(columns=horizons).dropna().mean(axis=1) for metric in METRICS]
    return " / ".join(with_spread(list(x)) for x in values) if len(values[0]) else "–"


def table_of(runs: pd.DataFrame, data: str, look_back: int, horizons: list[int]) -> str:
    """Makes the table of a series: a row per model, a column for the mean over horizons and one per horizon."""
    columns = [horizons, *([x] for x in horizons)]
    lines = []
    for row, of_row in runs.groupby("row"):
        sizes = " to ".join(f"{x:,}" for x in sorted({of_row["parameters"].min(), of_row["parameters"].max()}))
        lines.append([row, sizes, of_row.index.unique("seed").size, *(cell(of_row, x) for x in columns)])
    if look_back == PAPER["look_back"] and horizons == PAPER["horizons"] and data in PAPER["columns"]:
        for name, figures in PAPER["rows"].items():
            of_data = " / ".join(f"{x:.3f}" for x in figures[PAPER["columns"].index(data)])
            lines.append([f"paper: {name}", "", "", of_data, *["–"] * len(horizons)])
    table = markdown_table(["model", "parameters", "seeds", "mean", *horizons], lines)
    return f"## {data}, look-back {look_back}\n\n{table}"


def make_report(records: list[Record], baselines: list[str]) -> list[str]:
    """Makes the tables: one for each series and look-back. No row is compared with baselines."""
    tables = ["# Forecasts", "\n".join(NOTES)]
    runs = frame_of(records, "seed", "horizon")
    runs[list(METRICS)] = pd.DataFrame(runs["test"].tolist(), runs.index)
    for look_back, of_length in runs.groupby("look_back"):
        horizons = sorted(of_length.index.unique("horizon"))
        tables += [table_of(of_data, data, look_back, horizons) for data, of_data in of_length.groupby("data")]
    return tables
