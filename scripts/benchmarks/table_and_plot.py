"""The rows of a benchmark as a Markdown table and as a plot."""

from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from titans_hf_scripts.shared.markdown_tables import markdown_table


class Plot(NamedTuple):
    """A line for each value of the columns `line`, one panel for each of the columns `y`, over the column `x`."""

    line: tuple[str, ...]
    x: str
    y: tuple[str, ...]
    yscale: str = "linear"


def table(rows: list[dict]) -> str:
    """Formats rows as Markdown; a value that a row lacks is a dash."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return markdown_table(columns, ([_cell(row.get(name)) for name in columns] for row in rows))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def save_plot(rows: list[dict], plot: Plot, path: Path) -> None:
    figure = Figure(figsize=(5 * len(plot.y), 4), layout="constrained")
    for axes, y in zip(figure.subplots(1, len(plot.y), squeeze=False)[0], plot.y, strict=True):
        lines: dict[str, list[tuple]] = {}
        for row in rows:
            if row.get(y) is not None:
                names = [f"{column} {row[column]}" for column in plot.line]
                name = ", ".join(names) if len(names) > 1 else str(row[plot.line[0]])
                lines.setdefault(name, []).append((row[plot.x], row[y]))
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(xlabel=plot.x, ylabel=y, xscale="log", yscale=plot.yscale)
        if plot.yscale == "linear":
            axes.set_ylim(0)
        axes.grid(alpha=0.3)
    if lines:
        axes.legend()
    figure.savefig(path, dpi=120)
