"""cli/shared/figures.py: styles of lines and the place of the legend."""

from covering import in_one_test
from matplotlib.figure import Figure

from titans_hf.cli.shared.figures import labels_in_words, line_styles, mark_failures, save_figure


def test_baselines_look_unlike_titans():
    """Baselines are dashed and memories that are off dotted, each with a colour and marker of its own."""
    styles = line_styles(["tiny-mag", "Titans MAG, memory off", "Mistral", "tiny-llama", "tiny-mac"])
    assert [style["linestyle"] for style in styles.values()] == ["-", ":", "--", "--", "-"]
    assert len({(style["color"], style["marker"]) for style in styles.values()}) == 5


@in_one_test(
    "name,label",
    [
        ("mag-off", "MAG, memory off"),
        ("lmm off", "LMM, memory off"),
        ("lmm-off-cycle24", "LMM, memory off, cycle 24"),
        ("mac-token", "MAC, token memory"),
        ("tiny-mal", "tiny MAL"),
        ("lmm, depth 2", "LMM, depth 2"),
        ("gated-deltanet", "Gated DeltaNet"),
        ("mistral-conv", "Mistral, with convolutions"),
        ("Titans LMM, memory off", "Titans LMM, memory off"),
        ("without memory", "without memory"),
        ("chunk 16", "chunk 16"),
        ("magnet-run", "magnet-run"),
        ("run$_{x$", "run$_{x$"),
        ("", ""),
    ],
)
def test_labels_are_words(name, label):
    """A run's name is a label in words, and any other name stays."""
    assert line_styles([name, "other"])[name]["label"] == label


def test_labels_tell_lines_apart():
    """Names that would have one label keep their own."""
    assert labels_in_words(["mag-off", "mag off", "mal"]) == {
        "mag-off": "mag-off",
        "mag off": "mag off",
        "mal": "MAL",
    }


def test_lines_of_no_variant_are_solid():
    """Lines of settings have no line style of their own."""
    assert all("linestyle" not in style for style in line_styles(["chunk 16", "chunk 64"]).values())


def test_the_legend_covers_no_data(tmp_path):
    """One legend lies beside all panels and names failures too."""
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
    """A label or title that is no formula is drawn as it is."""
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.plot([1, 2], [3, 4], label="run$_{x$")
    axes.set_title("$_{")
    save_figure(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size
