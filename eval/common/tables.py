"""The tables and plots that the benchmarks share."""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.common.records import Record, read_records
from titans_hf.cli.shared.command_line import HelpFormatter
from titans_hf.cli.shared.figures import line_styles, plot_with_spread, save_figure
from titans_hf.cli.shared.markdown_tables import markdown_table

Alike = dict[tuple[str, ...], tuple[str, ...]]  # runs equal in the fields of a key are equal in those of its value
Report = tuple[list[str], dict[str, Figure]]  # tables, and plots by name
MakeReport = Callable[[list[Record], list[str], Path], Report]  # of runs, baselines and the path of the runs


def read_paper(benchmark: str) -> dict[str, Any]:
    """Returns the paper's figures of a benchmark, such as "mad"."""
    return json.loads(Path(__file__).with_name("paper_tables.json").read_text(encoding="utf-8"))[benchmark]


def check_alike(runs: Iterable[dict[str, Any]], alike: Alike) -> None:
    """Raises ValueError, naming the setting, for runs that were not made alike. Old runs may lack a field."""
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


def choose_records(path: Path, benchmark: str, alike: Alike, rows: Sequence[str] = ()) -> list[Record]:
    """Reads the runs of a file or folder, only `rows` if there are any.

    Raises ValueError for a file without runs, for a row that none of them has, and as `check_alike` does.
    """
    records = read_records(path, benchmark)
    if not records:
        raise ValueError(f"RUNS {path} has no runs of eval.{benchmark}.run")
    check_alike((record["run"] for record in records), alike)
    check_names("--rows", rows, {record["run"]["row"] for record in records})
    return [record for record in records if not rows or record["run"]["row"] in rows]


def check_names(option: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for a name that is not known."""
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{option} must be of {', '.join(sorted(known))}, but has {unknown[0]}")


def with_spread(values: Sequence[float], form: str = ".3f", factor: float = 1) -> str:
    """Formats a mean, with the standard deviation of several values, both times a factor."""
    spread = f" ± {factor * stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{factor * mean(values):{form}}{spread}"


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


def plot_curves(panels: dict[str, dict[str, np.ndarray]], label: str) -> Figure:
    """Draws a panel for each title: for each row the mean of its curves (runs, evaluations, 2) of epoch and accuracy,
    and a band from the least to the greatest, in percent.
    """
    columns = min(3, len(panels))
    figure = Figure(figsize=(4 * columns + 2, 3 * -(-len(panels) // columns)), layout="constrained")
    axes_of = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).ravel()
    styles = line_styles(dict.fromkeys(row for rows in panels.values() for row in rows))
    for axes, (title, rows) in zip(axes_of, panels.items(), strict=False):
        for row, curves in rows.items():
            style = styles[row] | {"markevery": max(1, curves.shape[1] // 8), "markersize": 4}
            plot_with_spread(axes, curves[..., 0].mean(0), 100 * curves[..., 1], style)
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


def report_command(doc: str, benchmark: str, alike: Alike, make: MakeReport, argv: list[str] | None) -> None:
    """Prints the tables of a file of runs, and writes them where asked to."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=HelpFormatter)
    parser.add_argument("runs", metavar="RUNS", type=Path, help="a JSON Lines file of runs, or its folder")
    parser.add_argument("--rows", nargs="+", default=[], help="the rows that are shown; all")
    parser.add_argument("--baselines", nargs="*", default=[], help="rows that the others are compared with")
    parser.add_argument("--output", type=Path, help="a folder for table.md and the plots")
    args = parser.parse_args(argv)
    records = choose_records(args.runs, benchmark, alike, args.rows)
    check_names("--baselines", args.baselines, {record["run"]["row"] for record in records})
    report = make(records, args.baselines, args.runs)
    print("\n\n".join(report[0]))
    if args.output:
        write_report(report, args.output)
