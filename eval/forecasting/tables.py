"""The tables of forecasts, with the paper's figures."""

from collections.abc import Iterable
from statistics import mean

from eval.common.records import Record
from eval.common.tables import Report, Rows, extremes, group_runs, of_complete_seeds, read_paper, with_spread
from titans_hf.cli.shared.markdown_tables import markdown_table

PAPER = read_paper("forecasting")
METRICS = ("mse", "mae")
ALIKE = {
    ("data",): ("digest", "split"),
    ("data", "look_back", "row"): ("settings", "learning_rate", "batch_size", "max_steps", "eval_steps", "patience"),
}
NOTES = (
    "- Mean squared / mean absolute error of values scaled by the training part, over all windows of the test part.",
    '- The column "mean" is of the seeds that have all horizons; ± is the standard deviation over seeds.',
    "- Rows of the paper are quoted from arXiv 2501.00663, which has the means over horizons only.",
)


def cell(runs: list[Record], horizons: Iterable[int]) -> str:
    """Formats both metrics, of each seed the mean over `horizons`, with their spread where there are several seeds."""
    of_seeds = of_complete_seeds({(run["run"]["seed"], run["run"]["horizon"]): run for run in runs}, horizons)
    values = [[mean(run["test"][metric] for run in of_seed) for of_seed in of_seeds] for metric in METRICS]
    return " / ".join(map(with_spread, values)) if of_seeds else "–"


def table(rows: Rows, data: str, look_back: int, horizons: list[int]) -> str:
    """Makes the table of a series: a row per model, a column per horizon, and their mean."""
    columns = [*([horizons] if len(horizons) > 1 else []), *([horizon] for horizon in horizons)]
    lines = []
    for row, runs in rows.items():
        seeds = {run["run"]["seed"] for run in runs}
        lines.append([row, extremes(x["parameters"] for x in runs), len(seeds), *(cell(runs, x) for x in columns)])
    paper = look_back == PAPER["look_back"] and horizons == PAPER["horizons"] and data in PAPER["columns"]
    for name, figures in PAPER["rows"].items() if paper else ():
        of_data = " / ".join(f"{x:.3f}" for x in figures[PAPER["columns"].index(data)])
        lines.append([f"paper: {name}", "", "", of_data, *["–"] * len(horizons)])
    headings = [numbers(x) if len(x) == 1 else f"mean of {numbers(x)}" for x in columns]
    return f"## {data}, look-back {look_back}\n\n" + markdown_table(["model", "parameters", "seeds", *headings], lines)


def numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def make_report(records: list[Record], baselines: list[str]) -> Report:
    """Makes the tables: one for each series and look-back. No row is compared with baselines."""
    tables = ["# Forecasts", "\n".join(NOTES)]
    for look_back in sorted({record["run"]["look_back"] for record in records}):
        chosen = [record for record in records if record["run"]["look_back"] == look_back]
        horizons = sorted({record["run"]["horizon"] for record in chosen})
        for data, rows in sorted(group_runs(chosen, (), "data", "row").items()):
            tables.append(table(rows, data, look_back, horizons))
    return tables, {}
