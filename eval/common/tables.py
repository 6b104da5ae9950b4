"""The tables and plots that the benchmarks share."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.stats import t as student

from eval.common.records import Record
from titans_hf.cli.shared.figures import line_styles, plot_with_spread, save_figure

Alike = dict[tuple[str, ...], tuple[str, ...]]  # runs that are equal in the key's fields must be equal in the value's
Report = tuple[list[str], dict[str, Figure]]  # tables, and plots by name


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


def frame_of(records: Sequence[Record], *index: str) -> pd.DataFrame:
    """Returns a line for each record, with the fields of its run and its results; `index` are those of its index."""
    return pd.DataFrame([{**record["run"], **record} for record in records]).set_index(list(index)).sort_index()


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


def plot_curves(title: str, rows: dict[str, pd.DataFrame], column: int, label: str) -> Figure:
    """Draws for each row the mean of its runs' curves against the epoch, their first column, with a band from the least
    to the greatest; in percent.
    """
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes, styles = figure.subplots(), line_styles(rows)
    for row, runs in rows.items():
        length = runs["curve"].map(len).min()
        curves = np.array([curve[:length] for curve in runs["curve"]], float)
        style = styles[row] | {"markevery": max(1, length // 8), "markersize": 4}
        plot_with_spread(axes, curves[..., 0].mean(0), 100 * curves[..., column], style)
    axes.set(title=title, xlabel="epoch", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def write_report(report: Report, output: Path) -> None:
    """Writes table.md and the plots to a folder."""
    output.mkdir(parents=True, exist_ok=True)
    tables, figures = report
    for name, figure in figures.items():
        save_figure(figure, output / f"{name}.png")
    (output / "table.md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    print(f"wrote {output / 'table.md'}")
