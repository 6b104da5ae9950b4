"""Makes the table and the plot of runs of eval.mad.run, with the figures of the paper (table 10 of its version 2).

    python -m eval.mad.tables results/mad --plot results/mad/curves.png --baselines llama gated-deltanet

A figure is the accuracy on the test sequences after the last epoch, in percent, at the learning rate that is best on
the validation sequences, and over several seeds the mean and the standard deviation.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.common.records import read_records
from eval.common.tables import read_paper
from eval.mad.models import NAMES
from eval.mad.tasks import TASKS
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.figures import line_styles, plot_with_spread, save_figure
from titans_hf.cli.shared.markdown_tables import markdown_table

PAPER = read_paper("mad")
EPOCH, VALIDATION, TEST = range(3)
SETUP = ("epochs", "batch_size", "weight_decay", "bf16", "task_settings")  # the same in all runs of a task


class Result(NamedTuple):
    """The runs of a model on a task at its best learning rate: their curves (seeds, evaluations, columns)."""

    curves: np.ndarray
    learning_rate: float
    parameters: int

    @property
    def last(self) -> np.ndarray:
        """Accuracy of every seed on the test sequences after the last epoch, in percent."""
        return 100 * self.curves[:, -1, TEST]

    def cell(self) -> str:
        """Formats mean, spread over several seeds, and learning rate."""
        spread = f" ± {self.last.std(ddof=1):.1f}" if len(self.last) > 1 else ""
        return f"{self.last.mean():.1f}{spread} ({self.learning_rate:g})"


Results = dict[str, dict[str, Result]]


def check_alike(records: Iterable[dict[str, Any]]) -> None:
    """Raises ValueError, naming the setting, for runs of one task that were not made alike."""
    first: dict[str, dict[str, Any]] = {}
    for run in (record["run"] for record in records):
        other = first.setdefault(run["data"], run)
        for name in SETUP:
            if run[name] != other[name]:
                raise ValueError(f"{run['data']}, {run['row']}: {name} is {run[name]}, elsewhere {other[name]}")


def best_results(records: Iterable[dict[str, Any]]) -> Results:
    """Groups results by model and task, in the order of the models; the rate is best on validation at the end.

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


def extremes(numbers: Iterable[int]) -> str:
    """Formats the least and the greatest of some numbers, once if they are equal."""
    return " to ".join(f"{x:,}" for x in sorted({min(numbers), max(numbers)}))


def table(results: Results, tasks: list[str]) -> str:
    """Formats the accuracies, and the paper's below them."""
    some = {task: next(row[task] for row in results.values() if task in row) for task in tasks}
    heading = [
        "model",
        "parameters",
        "seeds",
        *(f"{task}, {some[task].curves[0, -1, EPOCH]:.0f} epochs" for task in tasks),
    ]
    rows = []
    for name, row in results.items():
        sizes, seeds = (extremes(x) for x in zip(*((r.parameters, len(r.curves)) for r in row.values()), strict=True))
        rows.append([name, sizes, seeds, *(row[task].cell() if task in row else "–" for task in tasks)])
    for name, figures in PAPER["rows"].items():
        paper = dict(zip(PAPER["tasks"], figures, strict=True))
        rows.append([f"the paper's {name}", "–", "–", *(paper.get(task, "–") for task in tasks)])
    return markdown_table(heading, rows)


def difference_table(results: Results, tasks: list[str], baseline: str) -> str:
    """Formats every row's means less the baseline's, in percentage points."""
    base = results[baseline]
    rows = []
    for name, row in results.items():
        if name != baseline:
            both = [(row[task], base[task]) if task in row and task in base else None for task in tasks]
            rows.append([name, *(f"{x[0].last.mean() - x[1].last.mean():+.1f}" if x else "–" for x in both)])
    return markdown_table([f"less {baseline}", *tasks], rows)


def plot(results: Results, tasks: list[str], path: Path) -> None:
    """Draws accuracy by epoch, a panel per task: the mean over seeds, and a band from the least to the greatest."""
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(4 * columns + 2, 3 * rows), layout="constrained")
    figure.suptitle("Accuracy on the six tasks of MAD while training")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    styles = line_styles(results)
    for axes, task in zip(panels, tasks, strict=False):
        for name, row in results.items():
            if task in row:
                curves = row[task].curves
                epochs, accuracies = curves[0, :, EPOCH], 100 * curves[..., TEST]
                style = styles[name] | {"markevery": max(1, len(epochs) // 8), "markersize": 4}
                plot_with_spread(axes, epochs, accuracies, style)
        axes.set(title=task, xlabel="epoch", ylim=(0, 102))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in panels[::columns]:
        axes.set_ylabel("test accuracy (%)")
    for axes in panels[len(tasks) :]:
        axes.remove()
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("runs", type=Path, help="a JSON Lines file of runs, or its folder")
    parser.add_argument("--plot", type=Path, help="an image file of accuracy by epoch")
    parser.add_argument("--baselines", nargs="*", default=[], help="rows that the others are compared with")
    args = parser.parse_args(argv)
    records = read_records(args.runs, "mad")
    if not records:
        raise ValueError(f"RUNS {args.runs} has no runs of eval.mad.run")
    check_alike(records)
    results = best_results(records)
    for baseline in args.baselines:
        if baseline not in results:
            raise ValueError(f"--baselines must be of {', '.join(results)}, but has {baseline}")
    tasks = [task for task in TASKS if any(task in row for row in results.values())]
    print(*[table(results, tasks), *(difference_table(results, tasks, x) for x in args.baselines)], sep="\n\n")
    if args.plot:
        plot(results, tasks, args.plot)


if __name__ == "__main__":
    run_command(main)
