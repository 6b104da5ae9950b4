"""cli/shared/figures.py: the place of the legend, and names that are no formula."""

from matplotlib.figure import Figure

from titans_hf.cli.shared.figures import save_figure


def test_the_legend_covers_no_data(tmp_path):
    """One legend lies beside all panels and names a line once. Names that are no formula are drawn as they are."""
    figure = Figure(layout="constrained")
    panels = figure.subplots(1, 2)
    for axes in panels:
        axes.plot([1, 2], [3, 4], label="run$_{x$")
        axes.set_title("$_{")
    save_figure(figure, tmp_path / "figure.png")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["run$_{x$"]
    assert legend.get_window_extent().x0 > max(axes.get_window_extent().x1 for axes in panels)
