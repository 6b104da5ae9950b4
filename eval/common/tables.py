"""The tables and plots that the benchmarks share."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.stats import t as student

from eval.common.records import Record
from titans_hf.cli.shared.figures import line_styles, plot_with_spread, save_figure
from titans_hf.cli.shared.markdown_tables import markdown_table

Alike = dict[tuple[str, ...], tuple[str, ...]]  # runs that are equal in the key's fields must be equal in the value's
Report = tuple[list[str], dict[str, Figure]]  # tables, and plots by name
Rows = dict[str, list[Record]]
Scores = dict[tuple[int, int], Any]  # by seed, and by fold or horizon


def read_paper(benchmark: str) -> dict[str, Any]:
    """Returns the paper's figures of a benchmark, such as "dna"."""
    return json.loads(Path(__file__).with_name("paper_tables.json").read_text(encoding="utf-8"))[benchmark]


def check_alike(runs: Iterable[dict[str, Any]], alike: Alike) -> None:
    """Raises ValueError, naming the setting, for runs that were made with different settings. Old runs may lack
    a field."""
    first: dict[tuple, dict[str, Any]] = {}
    for run in runs:
        for names, shared in alike.items():
            other = first.setdefault((names, *(run[name] for name in names)), run)
            for name in shared:
                if run.get(name) != other.get(name) and None not in (run.get(name), other.get(name)):
                    raise ValueError(
                        f"{run['data']}, {run['row']}: {name} is {run[name]}, elsewhere {other[name]}: give another "
                        "--label or --output"
                    )


def group_runs(records: list[Record], models: Sequence[str], outer: str, inner: str) -> dict[str, Rows]:
    """Groups runs by two fields, in the order of `models`, rows, seeds and folds."""

    def order(record: Record) -> tuple:
        run = record["run"]
        return models.index(run["model"]) if models else 0, run["row"], run["seed"], run.get("fold", 0)

    groups: dict[str, Rows] = {}
    for record in sorted(records, key=order):
        groups.setdefault(record["run"][outer], {}).setdefault(record["run"][inner], []).append(record)
    return groups


def best_rate(runs: list[Record], score: Callable[[list[Record]], Any]) -> list[Record]:
    """Returns the runs at the learning rate whose runs have the highest score."""
    rates: dict[float, list[Record]] = {}
    for run in runs:
        rates.setdefault(run["run"]["learning_rate"], []).append(run)
    return max(rates.values(), key=score)


def of_complete_seeds(scores: Scores, parts: Iterable[int]) -> list[list[Any]]:
    """Returns the scores of each seed that has all parts (folds or horizons), in the order of the parts."""
    seeds = sorted({seed for seed, _ in scores})
    found = [[scores.get((seed, part)) for part in parts] for seed in seeds]
    return [of_seed for of_seed in found if None not in of_seed]


def with_spread(values: Sequence[float], form: str = ".3f", factor: float = 1) -> str:
    """Formats a mean, with the standard deviation of several values, both times a factor."""
    spread = f" ± {factor * stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{factor * mean(values):{form}}{spread}"


def with_interval(values: Sequence[float], form: str = ".4f") -> str:
    """Formats a mean with its 95 % interval over seeds, by Student's t; one seed has none."""
    if len(values) < 2:
        return f"{mean(values):{form}}"
    half = student.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{mean(values):{form}} [{mean(values) - half:{form}}, {mean(values) + half:{form}}]"


def extremes(numbers: Iterable[int]) -> str:
    """Formats the least and the greatest of some numbers, once if they are equal."""
    numbers = list(numbers)
    return " to ".join(f"{x:,}" for x in sorted({min(numbers), max(numbers)}))


def difference_table(
    baseline: str, columns: Sequence[str], rows: dict[str, Any], cells: Callable[[Any, Any], list[str] | None]
) -> str:
    """Formats a row of `cells(row, baseline's row)` for each other row that has any."""
    found = {name: cells(row, rows[baseline]) for name, row in rows.items() if name != baseline}
    return markdown_table([f"less {baseline}", *columns], [[name, *x] for name, x in found.items() if x])


def plot_curves(panels: dict[str, dict[str, list[Record]]], column: int, label: str) -> Figure:
    """Draws a panel for each title: for each row the mean of its runs' curves against the epoch, their first column,
    with a band from the least to the greatest; in percent.
    """
    columns = min(3, len(panels))
    figure = Figure(figsize=(4 * columns + 2, 3 * -(-len(panels) // columns)), layout="constrained")
    axes_of = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).ravel()
    styles = line_styles(dict.fromkeys(row for rows in panels.values() for row in rows))
    for axes, (title, rows) in zip(axes_of, panels.items(), strict=False):
        for row, runs in rows.items():
            length = min(len(run["curve"]) for run in runs)
            curves = np.array([run["curve"][:length] for run in runs], float)
            style = styles[row] | {"markevery": max(1, length // 8), "markersize": 4}
            plot_with_spread(axes, curves[..., 0].mean(0), 100 * curves[..., column], style)
        axes.set(title=title, xlabel="epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in axes_of[::columns]:
        axes.set_ylabel(label)
    for axes in axes_of[len(panels) :]:
        axes.remove()
    return figure


def write_report(report: Report, output: Path) -> None:
    """Writes table.md and the plots to a folder."""
    output.mkdir(parents=True, exist_ok=True)
    tables, figures = report
    for name, figure in figures.items():
        save_figure(figure, output / f"{name}.png")
    (output / "table.md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    print(f"wrote {output / 'table.md'}")
