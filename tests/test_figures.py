"""scripts/shared/figures.py: styles of lines and the place of the legend."""

from matplotlib.figure import Figure

from titans_hf_scripts.shared.figures import line_styles, mark_failures, save_figure


def test_baselines_look_unlike_titans():
    """Baselines are dashed and stopped memories dotted, each with a colour and marker of its own: otherwise a plot
    would not show what is compared.
    """
    styles = line_styles(["tiny-mag", "Titans MAG, not learning", "Mistral", "tiny-llama", "tiny-mac"])
    assert [style["linestyle"] for style in styles.values()] == ["-", ":", "--", "--", "-"]
    assert len({(style["color"], style["marker"]) for style in styles.values()}) == 5


def test_lines_of_no_variant_are_solid():
    """Lines of settings have no line style of their own: otherwise the chunk sizes of one memory would look like
    baselines.
    """
    assert all("linestyle" not in style for style in line_styles(["chunk 16", "chunk 64"]).values())


def test_the_legend_covers_no_data(tmp_path):
    """One legend lies beside all panels and names failures too: otherwise it would hide points."""
    figure = Figure(layout="constrained")
    panels = figure.subplots(1, 2)
    for axes in panels:
        axes.plot([1, 2], [3, 4], label="mag")
        mark_failures(axes, [2], [3], label="did not finish")
    save_figure(figure, tmp_path / "figure.png")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["mag", "did not finish"]
    assert legend.get_window_extent().x0 > max(axes.get_window_extent().x1 for axes in panels)


def test_names_with_dollars_are_shown(tmp_path):
    """A label or title that is no formula is drawn as it is: otherwise a run's name would end a plot in an error."""
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.plot([1, 2], [3, 4], label="run$_{x$")
    axes.set_title("$_{")
    save_figure(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size
