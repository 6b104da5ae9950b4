"""cli/shared/figures.py: the place of the legend, and names that are no formula."""

from matplotlib.figure import Figure

from titans_hf.cli.shared.figures import save_figure


def test_the_legend_covers_no_data(tmp_path):
    """One legend lies beside all panels and names a line once."""
    figure = Figure(layout="constrained")
    panels = figure.subplots(1, 2)
    for axes in panels:
        axes.plot([1, 2], [3, 4], label="mag")
    save_figure(figure, tmp_path / "figure.png")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["mag"]
    assert legend.get_window_extent().x0 > max(axes.get_window_extent().x1 for axes in panels)


def test_names_with_dollars_are_shown(tmp_path):
    """A label or title that is no formula is drawn as it is."""
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.plot([1, 2], [3, 4], label="run$_{x$")
    axes.set_title("$_{")
    save_figure(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size
