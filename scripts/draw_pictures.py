"""Draws the pictures of docs/how-it-works.md; run from a checkout as `python -m scripts.draw_pictures`."""

import copy
from importlib.resources import files
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from transformers import AutoModelForCausalLM, AutoTokenizer

import titans_hf  # noqa: F401 registers the model

DOCS = Path(__file__).parents[1] / "docs"
INK, LINE, ATTENTION, MEMORY, TEXT = "#1f2430", "#5b6475", "#cfe3f7", "#fbd9b5", "#eceff4"
ATTENTION_EDGE, MEMORY_EDGE = "#2a6fb0", "#c8690c"
BLUE = {"facecolor": ATTENTION, "edgecolor": ATTENTION_EDGE}
ORANGE = {"facecolor": MEMORY, "edgecolor": MEMORY_EDGE}


def new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Makes a picture of `width` x `height` inches whose coordinates are inches; 6.4 of them are 640 pixels."""
    figure = Figure(figsize=(width, height), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str = "", **style) -> None:
    """Draws a box around (x, y), its centre."""
    size = style.pop("size", 10)
    style = {"facecolor": TEXT, "edgecolor": LINE, "linewidth": 1.2} | style
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle="round,pad=0,rounding_size=0.06", **style))
    axes.text(x, y, text, ha="center", va="center", size=size, color=INK)


def arrow(axes: Axes, start: tuple, end: tuple, color: str = LINE, bend: float = 0.0) -> None:
    """Draws an arrow; `bend` curves it."""
    style = dict(arrowstyle="-|>", mutation_scale=11, color=color, linewidth=1.3, shrinkA=0, shrinkB=0)
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", **style))


def draw_variants() -> None:
    """MAC, MAG, MAL and LMM side by side: what a layer's attention and memory read, and how they are joined."""
    figure, axes = new_axes(6.4, 3.55)
    columns = {"MAC": 0.97, "MAG": 3.05, "MAL": 4.65, "LMM": 5.8}
    under = {"MAC": "memory as context", "MAG": "memory as a gate", "MAL": "memory first", "LMM": "memory alone"}
    for name, x in columns.items():
        axes.text(x, 3.33, name, ha="center", va="center", size=13, weight="bold", color=INK)
        axes.text(x, 3.06, under[name], ha="center", va="center", size=9, color=LINE)
        axes.text(x, 0.16, "tokens", ha="center", va="center", size=10, color=INK)
    x = columns["MAC"]
    box(axes, x - 0.5, 0.9, 0.86, 0.46, "memory\nis asked", **ORANGE)
    box(axes, x + 0.1, 1.48, 1.66, 0.32, "recalled | segment")
    box(axes, x + 0.1, 2.0, 1.02, 0.36, "attention", **BLUE)
    box(axes, x - 0.5, 2.55, 0.86, 0.46, "memory\nlearns", **ORANGE)
    box(axes, x + 0.5, 2.55, 0.56, 0.34, "gate")
    arrow(axes, (x, 0.28), (x - 0.35, 0.66))
    arrow(axes, (x - 0.45, 1.13), (x - 0.4, 1.32))
    arrow(axes, (x, 0.28), (x + 0.5, 1.32))
    arrow(axes, (x + 0.1, 1.64), (x + 0.1, 1.82))
    arrow(axes, (x - 0.05, 2.18), (x - 0.35, 2.32))
    arrow(axes, (x + 0.25, 2.18), (x + 0.45, 2.38))
    arrow(axes, (x - 0.07, 2.55), (x + 0.22, 2.55))
    arrow(axes, (x + 0.5, 2.72), (x + 0.5, 2.95))
    x = columns["MAG"]
    box(axes, x - 0.5, 1.3, 0.98, 0.36, "attention", **BLUE)
    box(axes, x + 0.5, 1.3, 0.86, 0.36, "memory", **ORANGE)
    box(axes, x, 2.2, 0.56, 0.34, "gate")
    arrow(axes, (x, 0.28), (x - 0.5, 1.12))
    arrow(axes, (x, 0.28), (x + 0.5, 1.12))
    arrow(axes, (x - 0.5, 1.48), (x - 0.12, 2.03))
    arrow(axes, (x + 0.5, 1.48), (x + 0.12, 2.03))
    arrow(axes, (x, 2.37), (x, 2.95))
    x = columns["MAL"]
    box(axes, x, 1.0, 0.86, 0.36, "memory", **ORANGE)
    box(axes, x, 2.0, 0.98, 0.36, "attention", **BLUE)
    for start, end in ((0.28, 0.82), (1.18, 1.82), (2.18, 2.95)):
        arrow(axes, (x, start), (x, end))
    x = columns["LMM"]
    box(axes, x, 1.5, 0.86, 0.36, "memory", **ORANGE)
    arrow(axes, (x, 0.28), (x, 1.32))
    arrow(axes, (x, 1.68), (x, 2.95))
    figure.savefig(DOCS / "variants.png", dpi=200)


def draw_learning() -> None:
    """How probable the trained recall-lmm finds each fact after each word that it reads, at first and much later."""
    folder = files("titans_hf") / "checkpoints" / "recall-lmm"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    facts = {"Ada": "Rome", "Ben": "Oslo", "Cleo": "Lima", "Dan": "Cairo"}
    words = [*(word for fact in facts.items() for word in fact), *"the of and to".split() * 2]
    later = " ".join("the of and to in a is that".split() * 125)
    table, cache = [], None

    def encode(text: str) -> dict:
        return tokenizer(text, return_tensors="pt")

    def known() -> list[float]:
        """The probability of each fact's city after its name, on branches of the cache."""
        answers = {name: model(**encode(name), cache=copy.copy(cache)).logits[0, -1].softmax(-1) for name in facts}
        return [float(answers[name][encode(city)["input_ids"][0, 0]]) for name, city in facts.items()]

    with torch.no_grad():
        for word in [*words, later]:
            cache = model(**encode(word), cache=cache, use_cache=True).cache
            table.append(known())
    figure = Figure(figsize=(6.4, 2.5), facecolor="white", layout="constrained")
    axes = figure.subplots()
    shown = torch.tensor(table).T
    picture = axes.pcolormesh(shown, cmap="Oranges", vmin=0, vmax=1, edgecolors="white", linewidth=2)
    axes.set_xticks([i + 0.5 for i in range(len(table))], [*words, "1,000 more"], rotation=60, ha="right", size=9)
    axes.set_yticks([i + 0.5 for i in range(len(facts))], [f"{a} → {b}" for a, b in facts.items()], size=10)
    axes.invert_yaxis()
    axes.set_title("How probable the model finds each answer after each word read", size=10, loc="left")
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    bar = figure.colorbar(picture, ax=axes, pad=0.01, ticks=[0, 0.5, 1], format=lambda x, _: f"{100 * x:.0f} %")
    bar.ax.tick_params(labelsize=9, length=0)
    bar.outline.set_visible(False)
    figure.savefig(DOCS / "learning.png", dpi=200)


def draw_remember() -> None:
    """A text longer than the window, the prompt at its end, and the passage that is read again for it."""
    figure, axes = new_axes(6.4, 3.1)
    fact, question = "Mr. Varga was born in Tuscania.", "Mr. Varga was born in …"
    axes.text(0.15, 2.9, "The text, as token ids (4 bytes each)", size=10, weight="bold", color=INK, va="center")
    axes.text(4.42, 2.9, "the window", size=10, weight="bold", color=ATTENTION_EDGE, va="center")
    box(axes, 2.2, 2.45, 4.1, 0.5, facecolor=TEXT)
    box(axes, 1.55, 2.45, 2.15, 0.36, fact, size=9, **ORANGE)
    axes.text(3.45, 2.45, "3,000 tokens", ha="center", va="center", size=9, color=LINE)
    box(axes, 5.3, 2.45, 1.9, 0.5, **BLUE)
    box(axes, 5.4, 2.45, 1.62, 0.36, question, size=9, facecolor="white", edgecolor=ATTENTION_EDGE)
    axes.text(2.3, 1.3, "What the model attends to when it answers", size=10, weight="bold", color=INK, va="center")
    box(axes, 0.57, 0.76, 0.84, 0.56, "first token", size=9)
    box(axes, 1.88, 0.76, 1.62, 0.56, "… Mr. Varga was born\nin Tuscania. …", size=9, **ORANGE)
    box(axes, 3.77, 0.76, 1.98, 0.56, **BLUE)
    box(axes, 3.83, 0.76, 1.66, 0.38, question, size=9, facecolor="white", edgecolor=ATTENTION_EDGE)
    arrow(axes, (4.82, 0.76), (5.2, 0.76))
    axes.text(5.28, 0.76, "Tuscania", ha="left", va="center", size=11, weight="bold", color=INK)
    for x, text, color in ((1.88, "the passage", MEMORY_EDGE), (3.77, "the window", ATTENTION_EDGE)):
        axes.text(x, 0.3, text, ha="center", va="center", size=9, color=color)
    arrow(axes, (5.4, 2.27), (1.7, 2.2), color=ATTENTION_EDGE, bend=-0.14)
    axes.text(3.75, 1.75, "1. the prompt's words find a passage", ha="left", va="center", size=9, color=ATTENTION_EDGE)
    arrow(axes, (1.2, 2.2), (1.75, 1.05), color=MEMORY_EDGE, bend=0.15)
    axes.text(0.15, 1.6, "2. the passage\nis read again", ha="left", va="center", size=9, color=MEMORY_EDGE)
    figure.savefig(DOCS / "remember.png", dpi=200)


if __name__ == "__main__":
    draw_variants()
    draw_learning()
    draw_remember()
