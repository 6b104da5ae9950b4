"""Makes the tables and the plot of runs of eval.mad.run, with the figures of the paper (table 10 of its version 2).

    python -m eval.mad.tables eval/results/mad.jsonl --baselines llama gated-deltanet

A figure is the accuracy on the test sequences after the last epoch, in percent, at the learning rate that is best on
the validation sequences, and over several seeds the mean and the standard deviation.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eval.common.records import Record
from eval.common.tables import (
    Report,
    difference_table,
    extremes,
    plot_curves,
    read_paper,
    report_command,
    with_spread,
)
from eval.mad.models import NAMES
from eval.mad.tasks import TASKS
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.markdown_tables import markdown_table

EPOCH, VALIDATION, TEST = range(3)
ALIKE = {("data",): ("epochs", "batch_size", "weight_decay", "bf16", "task_settings")}


class Result(NamedTuple):
    """The runs of a model on a task at its best learning rate: their curves (seeds, evaluations, columns)."""

    curves: np.ndarray
    learning_rate: float
    parameters: int

    @property
    def last(self) -> list[float]:
        """Accuracy of every seed on the test sequences after the last epoch, in percent."""
        return (100 * self.curves[:, -1, TEST]).tolist()

    def cell(self) -> str:
        """Formats mean, spread over several seeds, and learning rate."""
        return f"{with_spread(self.last, '.1f')} ({self.learning_rate:g})"


Results = dict[str, dict[str, Result]]


def best_results(records: Iterable[Record]) -> Results:
    """Groups results by row and task, in the order of the models; the rate is best on validation at the end.

    Raises ValueError for rates that were tried with different seeds.
    """
    curves: dict[tuple[str, str], dict[float, dict[int, list]]] = {}
    sizes = {}
    for record in records:
        run = record["run"]
        key = run["row"], run["data"]
        sizes[key] = record["parameters"]
        curves.setdefault(key, {}).setdefault(run["learning_rate"], {})[run["seed"]] = record["curve"]
    results: Results = {}
    for (name, task), rates in curves.items():
        if len({tuple(sorted(seeds)) for seeds in rates.values()}) > 1:
            raise ValueError(f"{name} on {task} has other seeds at one learning rate than at another: {rates.keys()}")
        arrays = {rate: np.array([seeds[seed] for seed in sorted(seeds)], float) for rate, seeds in rates.items()}
        rate = max(arrays, key=lambda rate: arrays[rate][:, -1, VALIDATION].mean())
        results.setdefault(name, {})[task] = Result(arrays[rate], rate, sizes[name, task])
    return dict(sorted(results.items(), key=lambda item: (NAMES.index(item[0].split()[0]), item[0])))


def table(results: Results, tasks: list[str]) -> str:
    """Formats the accuracies, and the paper's below them."""
    some = {task: next(row[task] for row in results.values() if task in row) for task in tasks}
    columns = (f"{task}, {some[task].curves[0, -1, EPOCH]:.0f} epochs" for task in tasks)
    rows = []
    for name, row in results.items():
        sizes, seeds = extremes(r.parameters for r in row.values()), extremes(len(r.curves) for r in row.values())
        rows.append([name, sizes, seeds, *(row[task].cell() if task in row else "–" for task in tasks)])
    paper = read_paper("mad")
    for name, figures in paper["rows"].items():
        of_task = dict(zip(paper["tasks"], figures, strict=True))
        rows.append([f"the paper's {name}", "–", "–", *(of_task.get(task, "–") for task in tasks)])
    return markdown_table(["model", "parameters", "seeds", *columns], rows)


def differences(results: Results, tasks: list[str], baseline: str) -> str:
    """Formats every row's means less the baseline's, in percentage points."""

    def cells(row: dict[str, Result], base: dict[str, Result]) -> list[str]:
        both = [(row[task], base[task]) if task in row and task in base else None for task in tasks]
        return [f"{np.mean(x[0].last) - np.mean(x[1].last):+.1f}" if x else "–" for x in both]

    return difference_table(baseline, tasks, results, cells)


def make_report(records: list[Record], baselines: list[str], path: Path) -> Report:
    """Makes the tables, and a plot of accuracy by epoch with a panel per task."""
    results = best_results(records)
    tasks = [task for task in TASKS if any(task in row for row in results.values())]
    panels = {task: {name: row[task].curves for name, row in results.items() if task in row} for task in tasks}
    panels = {task: {name: x[..., [EPOCH, TEST]] for name, x in rows.items()} for task, rows in panels.items()}
    tables = [table(results, tasks), *(differences(results, tasks, baseline) for baseline in baselines)]
    return tables, {"mad": plot_curves(panels, "test accuracy (%)")}


def main(argv: list[str] | None = None) -> None:
    report_command(__doc__, "mad", ALIKE, make_report, argv)


if __name__ == "__main__":
    run_command(main)
