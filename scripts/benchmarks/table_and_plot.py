"""The rows of a benchmark as a Markdown table and as a plot."""

from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from titans_hf.cli.shared.figures import line_styles, mark_failures, save_figure
from titans_hf.cli.shared.markdown_tables import markdown_table


class Plot(NamedTuple):
    """A line for each value of the columns `line`, over the column `x`, one panel for each column in `y`, which has
    the labels of their axes.
    """

    title: str
    line: tuple[str, ...]
    x: str
    y: dict[str, str]
    xscale: str = "log"
    yscale: str = "linear"
    xlabel: str = "sequence length (tokens)"


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
    """Draws the rows. A row without a value of `y` is a cross at the bottom: the work did not finish there. The legend
    names, for each line, where others have a row and it has none: it was not run there.
    """
    figure = Figure(figsize=(4.5 * len(plot.y) + 2, 4), layout="constrained")
    figure.suptitle(plot.title)
    names = [_name(row, plot) for row in rows]
    styles = line_styles(names)
    labels = _labels({name: styles[name]["label"] for name in names}, names, [row[plot.x] for row in rows])
    xs = sorted({row[plot.x] for row in rows})
    for axes, y in zip(figure.subplots(1, len(plot.y), squeeze=False)[0], plot.y, strict=True):
        lines: dict[str, list[tuple]] = {}
        for name, row in zip(names, rows, strict=True):
            if row.get(y) is not None:
                lines.setdefault(name, []).append((row[plot.x], row[y]))
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), **styles[name] | {"label": labels[name]})
        axes.set(xlabel=plot.xlabel, ylabel=plot.y[y], xscale=plot.xscale, yscale=plot.yscale)
        if plot.xscale == "log":
            axes.set_xticks(xs, [f"{x:,}" for x in xs])
            axes.set_xticks([], minor=True)
        else:
            axes.locator_params(axis="x", nbins=5)
            axes.xaxis.set_major_formatter("{x:,.0f}")
        if plot.yscale == "linear":
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
            axes.yaxis.set_major_formatter("{x:,g}")
        bottom, missing = axes.get_ylim()[0], {}
        for name, row in zip(names, rows, strict=True):
            if row.get(y) is None:
                missing.setdefault(row[plot.x], []).append(styles[name]["label"])
        mark_failures(axes, list(missing), [bottom] * len(missing), label="did not finish")
        for x, failed in missing.items():
            axes.annotate("\n".join(failed), (x, bottom), (0, 8), textcoords="offset points", ha="right", fontsize=7)
        axes.grid(alpha=0.3)
    save_figure(figure, path)


def _labels(words: dict[str, str], names: list[str], xs: list[int]) -> dict[str, str]:
    """Makes the legend's label of each line: its name in words, and the points of other lines where it was not run."""
    absent = {name: sorted(set(xs) - {x for x, of in zip(xs, names, strict=True) if of == name}) for name in names}
    return {
        name: words[name] + (f"\n(not run at {', '.join(f'{x:,}' for x in missing)})" if missing else "")
        for name, missing in absent.items()
    }


def _name(row: dict, plot: Plot) -> str:
    """Returns the name of the line that a row belongs to."""
    if len(plot.line) == 1:
        return str(row[plot.line[0]])
    return ", ".join(f"{column} {row[column]}" for column in plot.line)
