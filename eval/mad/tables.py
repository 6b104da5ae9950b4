"""The tables and the plot of MAD, with the figures of the paper (table 10 of its version 2).

A figure is the accuracy on the test sequences after the last epoch, in percent, at the learning rate that is best on
the validation sequences, and over several seeds the mean and the standard deviation.
"""

from statistics import mean

from eval.common.records import Record
from eval.common.tables import (
    Report,
    Rows,
    best_rate,
    difference_table,
    extremes,
    group_runs,
    plot_curves,
    read_paper,
    with_spread,
)
from eval.mad.models import NAMES
from eval.mad.tasks import TASKS
from titans_hf.cli.shared.markdown_tables import markdown_table

EPOCH, VALIDATION, TEST = range(3)  # columns of a curve
ALIKE = {("data",): ("epochs", "batch_size", "weight_decay", "bf16", "task_settings")}


def best_results(records: list[Record]) -> dict[str, Rows]:
    """Groups the runs by row and task, those at the rate that is best on validation at the end.

    Raises ValueError for rates that were tried with different seeds.
    """
    results = group_runs(records, NAMES, "row", "data")
    for name, of_row in results.items():
        for task, runs in of_row.items():
            rates = [(run["run"]["learning_rate"], run["run"]["seed"]) for run in runs]
            if len(set(rates)) != len({rate for rate, _ in rates}) * len({seed for _, seed in rates}):
                raise ValueError(f"{name} on {task} has other seeds at one learning rate than at another")
            of_row[task] = best_rate(runs, lambda runs: mean(last(runs, VALIDATION)))
    return results


def last(runs: list[Record], column: int = TEST) -> list[float]:
    """Returns the accuracy of every seed after the last epoch, in percent."""
    return [100 * run["curve"][-1][column] for run in runs]


def table(results: dict[str, Rows], tasks: list[str]) -> str:
    """Formats the accuracies, and the paper's below them."""
    some = {task: next(row[task] for row in results.values() if task in row) for task in tasks}
    columns = (f"{task}, {runs[0]['curve'][-1][EPOCH]:.0f} epochs" for task, runs in some.items())
    rows = []
    for name, row in results.items():
        sizes, seeds = (
            extremes(x["parameters"] for runs in row.values() for x in runs),
            extremes(map(len, row.values())),
        )
        cells = {
            x: f"{with_spread(last(runs), '.1f')} ({runs[0]['run']['learning_rate']:g})" for x, runs in row.items()
        }
        rows.append([name, sizes, seeds, *(cells.get(task, "–") for task in tasks)])
    paper = read_paper("mad")
    for name, figures in paper["rows"].items():
        of_task = dict(zip(paper["tasks"], figures, strict=True))
        rows.append([f"the paper's {name}", "–", "–", *(of_task.get(task, "–") for task in tasks)])
    return markdown_table(["model", "parameters", "seeds", *columns], rows)


def differences(results: dict[str, Rows], tasks: list[str], baseline: str) -> str:
    """Formats every row's means less the baseline's, in percentage points."""

    def cells(row: Rows, base: Rows) -> list[str]:
        both = {task: (row[task], base[task]) for task in tasks if task in row and task in base}
        found = {task: f"{mean(last(runs)) - mean(last(others)):+.1f}" for task, (runs, others) in both.items()}
        return [found.get(task, "–") for task in tasks]

    return difference_table(baseline, tasks, results, cells)


def make_report(records: list[Record], baselines: list[str]) -> Report:
    """Makes the tables, and a plot of accuracy by epoch with a panel per task."""
    results = best_results(records)
    tasks = [task for task in TASKS if any(task in row for row in results.values())]
    panels = {task: {name: row[task] for name, row in results.items() if task in row} for task in tasks}
    tables = [table(results, tasks), *(differences(results, tasks, baseline) for baseline in baselines)]
    return tables, {"mad": plot_curves(panels, TEST, "test accuracy (%)")}
