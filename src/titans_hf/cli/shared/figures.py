"""How plots are saved: the legend beside the data, names as they are."""

from pathlib import Path

from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path) -> None:
    """Writes the figure, with one legend for all panels to their right. Labels and titles are shown literally, even
    with a `$`.
    """
    panels = [axes.get_legend_handles_labels() for axes in figure.axes]
    lines = {label: line for handles, labels in panels for line, label in zip(handles, labels, strict=True)}
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="outside right upper", frameon=False)
    labels = (text for legend in figure.legends for text in legend.get_texts())
    for text in (*labels, *(axes.title for axes in figure.axes)):
        text.set_parse_math(False)
    figure.savefig(path, dpi=150)
