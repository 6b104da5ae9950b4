"""Makes the tables and plots of forecasting runs from their file.

python -m eval.forecasting.tables runs/forecasting --rows lmm lmm-off rlinear --output runs/tables
"""

from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from matplotlib.figure import Figure

from eval.common.records import Record, read_lines
from eval.common.tables import Report, extremes, read_paper, report_command, with_spread
from eval.forecasting.training import EXAMPLES
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.figures import line_styles
from titans_hf.cli.shared.markdown_tables import markdown_table

PAPER = read_paper("forecasting")
METRICS = ("mse", "mae")
ALIKE = {
    ("data",): ("digest", "split"),
    ("data", "look_back", "row"): ("settings", "learning_rate", "batch_size", "max_steps", "eval_steps", "patience"),
}
WITHOUT_LAST = "test_without_last_batch"  # the field of a record
NOTES = (
    "- Mean squared / mean absolute error of values scaled by the training part, over all windows of the test part.",
    "- Code that drops the last incomplete batch of the test part leaves out the end of the series: a second table.",
    '- The column "mean" is of the seeds that have all horizons; ± is the standard deviation over seeds.',
    "- Rows of the paper are quoted from arXiv 2501.00663, which has the means over horizons only.",
)


class Key(NamedTuple):
    """The settings in which the runs of one look-back differ."""

    data: str
    row: str
    horizon: int
    seed: int


class Results:
    """The records of a folder with one look-back, by data, row, horizon and seed."""

    def __init__(self, records: list[Record]):
        self.records = {Key(*(record["run"][name] for name in Key._fields)): record for record in records}
        self.data, self.rows, self.horizons, self.seeds = (
            sorted(set(values)) for values in zip(*self.records, strict=True)
        )

    def runs_of_seeds(self, data: str, row: str, horizons: list[int]) -> list[list[Record]]:
        """Returns the records of each seed that has all `horizons`."""
        keys = [[Key(data, row, horizon, seed) for horizon in horizons] for seed in self.seeds]
        return [[self.records[key] for key in of_seed] for of_seed in keys if self.records.keys() >= set(of_seed)]

    def of_seeds(self, data: str, row: str, horizons: list[int], metric: str) -> list[float]:
        """Returns the mean of a test metric over `horizons`, one value per seed that has them all."""
        return [mean(run["test"][metric] for run in runs) for runs in self.runs_of_seeds(data, row, horizons)]

    def cell(self, data: str, row: str, horizons: list[int]) -> str:
        """Formats both metrics, with their spread where there are several seeds."""
        values = [self.of_seeds(data, row, horizons, metric) for metric in METRICS]
        return " / ".join(map(with_spread, values)) if values[0] else "–"


def by_look_back(records: list[Record]) -> dict[int, Results]:
    """Groups the records by look-back."""
    look_backs = sorted({record["run"]["look_back"] for record in records})
    return {n: Results([record for record in records if record["run"]["look_back"] == n]) for n in look_backs}


def table(results: Results, data: str, look_back: int) -> str:
    """Makes the table of a series: a row per model, a column per horizon, and their mean."""
    several = len(results.horizons) > 1
    heading = ["model", "parameters", "seeds", *([f"mean of {numbers(results.horizons)}"] if several else [])]
    rows = []
    for row in results.rows:
        found = [x for key, x in results.records.items() if (key.data, key.row) == (data, row)]
        if not found:
            continue
        parameters = extremes(x["parameters"] for x in found)
        means = [results.cell(data, row, results.horizons)] if several else []
        cells = [results.cell(data, row, [horizon]) for horizon in results.horizons]
        rows.append([row, parameters, len({x["run"]["seed"] for x in found}), *means, *cells])
    paper = look_back == PAPER["look_back"] and results.horizons == PAPER["horizons"] and data in PAPER["columns"]
    for name, figures in PAPER["rows"].items() if paper else ():
        cell = " / ".join(f"{x:.3f}" for x in figures[PAPER["columns"].index(data)])
        rows.append([f"paper: {name}", "", "", cell, *["–"] * len(results.horizons)])
    return f"## {data}, look-back {look_back}\n\n" + markdown_table([*heading, *results.horizons], rows)


def last_batch_table(results: Results, data: str) -> str:
    """Makes the table of what dropping the last incomplete batch changes, of the seeds that were scored without it at
    all horizons; "" where there are none.
    """
    rows, sizes = [], sorted({int(size) for x in results.records.values() for size in x.get(WITHOUT_LAST, {})})
    for row in results.rows:
        runs = [x for x in results.runs_of_seeds(data, row, results.horizons) if all(WITHOUT_LAST in run for run in x)]
        if runs:
            of_all = with_spread([mean(run["test"]["mse"] for run in x) for x in runs])
            rows.append([row, len(runs), of_all, *(cell_without_last_batch(runs, str(size)) for size in sizes)])
    heading = ["model", "seeds", "all windows", *(f"batches of {size}" for size in sizes)]
    title = f"### {data}, mean squared error without the last incomplete batch, mean of {numbers(results.horizons)}"
    return f"{title}\n\n{markdown_table(heading, rows)}" if rows else ""


def cell_without_last_batch(runs: list[list[Record]], size: str) -> str:
    """Formats the mean squared error of each seed's runs over the windows that fill batches of `size`; a dash where one
    of them has fewer windows.
    """
    scores = [[run[WITHOUT_LAST].get(size) for run in of_seed] for of_seed in runs]
    return with_spread([mean(x["mse"] for x in of_seed) for of_seed in scores]) if all(map(all, scores)) else "–"


def numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def read_examples(runs: Path) -> dict[str, Record]:
    """Reads the example forecasts beside a file of runs, by the run's name; none where there is no such file."""
    file = (runs.parent if runs.suffix == ".jsonl" else runs) / EXAMPLES
    return {example["name"]: example for example in read_lines(file)} if file.exists() else {}


def plot(results: Results, examples: dict[str, Record], data: str) -> Figure:
    """Plots forecasts of the first seed against what was measured, a panel per horizon."""
    figure = Figure(figsize=(9, 2.6 * len(results.horizons)), layout="constrained")
    panels = figure.subplots(len(results.horizons), 1, squeeze=False)[:, 0]
    styles = line_styles(results.rows)
    for axes, horizon in zip(panels, results.horizons, strict=True):
        keys = [Key(data, row, horizon, results.seeds[0]) for row in results.rows]
        names = {key.row: results.records[key]["name"] for key in keys if key in results.records}
        shown = {row: examples[name] for row, name in names.items() if name in examples}
        for before, after in [(x["before"], x["after"]) for x in shown.values()][:1]:
            axes.plot(range(-len(before), horizon), before + after, color="lightgray", linewidth=2, label="measured")
        for row, of_row in shown.items():
            style = {name: x for name, x in styles[row].items() if name in ("label", "color", "linestyle")}
            axes.plot(range(horizon), of_row["forecast"], linewidth=1, **style)
            title = f"{data}, {of_row['channel']}, horizon {horizon}"
            absent = ", ".join(style["label"] for row, style in styles.items() if row not in shown)
            axes.set(title=title + (f" (without {absent})" if absent else ""))
            axes.set(xlabel="rows after the last one read", ylabel="standardized value")
    return figure


def make_report(records: list[Record], baselines: list[str], path: Path) -> Report:
    """Makes the tables, and a plot per series and look-back where there are examples beside the runs."""
    tables, figures, examples = ["# Forecasts", "\n".join(NOTES)], {}, read_examples(path)
    for look_back, results in by_look_back(records).items():
        for data in results.data:
            tables += filter(None, (table(results, data, look_back), last_batch_table(results, data)))
            if any(record["name"] in examples for key, record in results.records.items() if key.data == data):
                figures[f"{data}-{look_back}"] = plot(results, examples, data)
    return tables, figures


def main(argv: list[str] | None = None) -> None:
    report_command(__doc__, "forecasting", ALIKE, make_report, argv)


if __name__ == "__main__":
    run_command(main)
