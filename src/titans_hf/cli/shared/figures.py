"""The style of all plots: lines by model, the legend beside the data, a line at the trained length."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

VARIANTS = {"mac": "tab:blue", "mag": "tab:orange", "mal": "tab:green", "lmm": "tab:red"}
MEMORY_OFF = ("-off", " off")
OTHERS = ("black", "tab:gray", "tab:brown", "tab:purple", "tab:olive", "tab:cyan")
MARKERS = "os^Dv<>P"
PALER = 0.18  # share of white that each further line of a variant adds to its colour
MODELS = {
    "gated-deltanet": "Gated DeltaNet",
    "olmo-hybrid": "OLMo hybrid",
    "qwen3-next": "Qwen3-Next",
    "repeat-last": "last value repeated",
    "llama": "Llama",
    "mistral": "Mistral",
    "mamba2": "Mamba2",
    "patchtst": "PatchTST",
    "rlinear": "RLinear",
    "dlinear": "DLinear",
    "cnn": "CNN",
} | {variant: variant.upper() for variant in VARIANTS}
SETTINGS = {"off": "memory off", "token": "token memory", "conv": "with convolutions", "late": "with Titans' start"}


def labels_in_words(names: Iterable[str]) -> dict[str, str]:
    """Returns the legend's label of each line by its name: "mag-off" is "MAG, memory off".

    A name without a known model is its own label, and so are names that would share a label.
    """
    labels = {name: _in_words(name) for name in names}
    counts = Counter(labels.values())
    return {name: label if counts[label] == 1 else name for name, label in labels.items()}


def _in_words(name: str) -> str:
    found = re.fullmatch(rf"(?:(.*)[- ])?({'|'.join(MODELS)})(?:[- ]([^,]+))?(,.*)?", name)
    if not found:
        return name
    before, model, settings, after = found.groups(default="")
    words = [re.sub(r"(\D)(\d+)$", r"\1 \2", SETTINGS.get(word, word)) for word in re.findall(r"[^- ]+", settings)]
    return ", ".join([f"{before} {MODELS[model]}".strip(), *words]) + after


def line_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the keyword arguments of `Axes.plot` for each line by its name, its label in words among them.

    A variant of Titans is solid in its own colour; with its memory off it is dotted. Anything else, a baseline, is
    dashed with hollow markers. Where no line is of a variant, all are solid.
    """
    labels = labels_in_words(names)
    return {name: {"label": labels[name]} | style for name, style in _styles(labels).items()}


def _styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    variants = {name: _variant_in(name) for name in names}
    if not any(variants.values()):
        return {name: {"marker": MARKERS[i % len(MARKERS)]} for i, name in enumerate(variants)}
    styles, num_lines, others = {}, dict.fromkeys(VARIANTS, 0), 0
    for name, variant in variants.items():
        if variant is None:
            style = {"color": OTHERS[others % len(OTHERS)], "linestyle": "--", "marker": MARKERS[others % len(MARKERS)]}
            styles[name] = style | {"markerfacecolor": "white"}
            others += 1
        else:
            white = PALER * num_lines[variant]
            color = tuple(white + (1 - white) * channel for channel in to_rgb(VARIANTS[variant]))
            off = any(word in name for word in MEMORY_OFF)
            marker = MARKERS[num_lines[variant] % len(MARKERS)]
            styles[name] = {"color": color, "linestyle": ":" if off else "-", "marker": marker}
            num_lines[variant] += 1
    return styles


def _variant_in(name: str) -> str | None:
    return next((word for word in re.split(r"[^a-z]+", name.lower()) if word in VARIANTS), None)


def loss_by_position_axes(ends: Sequence[int], unit: str) -> Axes:
    """Returns axes for losses by position; its ranges end at `ends`, and `unit` is the loss's, as "nats per token"."""
    axes = Figure(figsize=(7.5, 4), layout="constrained").subplots()
    axes.set_xscale("log", base=2)
    axes.set_xticks(ends, [f"{end:,}" for end in ends])
    axes.set(
        xlabel="position in the text (tokens; end of each range)",
        ylabel=f"loss ({unit})",
        title="Loss by position in the text",
    )
    return axes


def plot_with_spread(axes: Axes, x: Sequence[float], ys: np.ndarray, style: dict[str, Any]) -> None:
    """Draws the mean of `ys` (seeds, points) as a line, and a band from the least to the greatest."""
    axes.plot(x, ys.mean(0), **style)
    axes.fill_between(x, ys.min(0), ys.max(0), alpha=0.15, color=style.get("color"))


def mark_trained_length(axes: Axes, x: float, label: str = "longest in training") -> None:
    """Draws a vertical line at `x`, the largest length in training."""
    axes.axvline(x, color="gray", linestyle="-.", linewidth=1, label=label, zorder=0)


def mark_failures(axes: Axes, x: Sequence[float], y: Sequence[float], label: str) -> None:
    """Draws a cross over every point (x, y); `label` names what failed there."""
    if len(x):
        axes.plot(x, y, "x", color="crimson", markersize=9, markeredgewidth=2, label=label, clip_on=False, zorder=5)


def save_figure(figure: Figure, path: Path) -> None:
    """Writes the figure, with one legend for all panels to their right. Labels and titles are shown literally, also
    names of runs with a `$`.
    """
    panels = [axes.get_legend_handles_labels() for axes in figure.axes]
    lines = {label: line for handles, labels in panels for line, label in zip(handles, labels, strict=True)}
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="outside right upper", frameon=False)
    labels = (text for legend in figure.legends for text in legend.get_texts())
    for text in (*labels, *(axes.title for axes in figure.axes)):
        text.set_parse_math(False)
    figure.savefig(path, dpi=150)
