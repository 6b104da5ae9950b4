"""Draws how much each word of a text taught a model's memory: surprise.html, the text itself, and surprise.png.

    python scripts/surprise.py MODEL TEXT --output DIR

TEXT is a file, or - for standard input. The page colours each word by the surprise of its tokens, the norm of the
gradient by which the memory learns them (paper, eq. 12), or by a gate with which they were learnt: theta (step), eta
(momentum), alpha (forgetting); of a layer, or the mean of all. The picture shows all of it, layers x tokens.
"""

import argparse
import html
import json
import re
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from titans_hf import TitansCache
from titans_hf_scripts.read import load_model

PIECE = 2048  # tokens read at once
QUANTITIES = {
    "gradient_norm": "surprise",
    "inner_lr": "θ, step",
    "momentum_decay": "η, momentum",
    "forget": "α, forgetting",
}
PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 17px/1.9 Georgia, serif; max-width: 46em; margin: 2em auto; padding: 0 1em; color: #222; }}
header {{ font: 14px/1.5 sans-serif; position: sticky; top: 0; background: #fff; padding: .6em 0; }}
.scale {{ display: inline-block; width: 8em; height: .8em; background: linear-gradient(90deg, #fff, #e4572e); }}
#text {{ white-space: pre-wrap; }}
#text span {{ background: rgba(228, 87, 46, var(--s)); border-radius: 2px; }}
</style>
<header><b>{title}</b> <select id="choice"></select>
low <span class="scale"></span> high, but for the lowest and the highest fiftieth of the words</header>
<p id="text">{text}</p>
<script>
const rows = {values};
const words = document.querySelectorAll("#text span"), choice = document.getElementById("choice");
function colour(values) {{
  const sorted = [...values].sort((a, b) => a - b), at = share => sorted[Math.round(share * (sorted.length - 1))];
  const low = at(.02), width = Math.max(at(.98) - low, 1e-9);
  words.forEach((word, i) => {{
    word.style.setProperty("--s", Math.min(1, Math.max(0, (values[i] - low) / width)).toFixed(3));
    word.title = choice.value + ": " + values[i];
  }});
}}
for (const name in rows) choice.add(new Option(name));
choice.onchange = () => colour(rows[choice.value]);
colour(rows[choice.value]);
</script>
"""


@torch.inference_mode()
def measure(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """(quantities, layers, tokens), the mean of the heads."""
    cache, found = TitansCache(model.config), []
    for piece in tqdm(torch.tensor(ids, device=model.device).split(PIECE), desc="reading", unit="piece"):
        told = model.base_model(piece[None], past_key_values=cache, output_surprise=True).surprise
        layers = [torch.stack([getattr(layer, name)[0].mean(0) for name in QUANTITIES]) for layer in told]
        found.append(torch.stack(layers, dim=1).float().cpu().numpy())
    return np.concatenate(found, axis=-1)


def word_means(text: str, spans: list[tuple[int, int]], values: np.ndarray) -> tuple[list[str], np.ndarray]:
    """The words of a text, each with the white space after it, and the means (..., words) of their tokens' values.

    spans: the characters of each token. Tokens belong to the word in which they end; words without any join the next.
    """
    ends = np.array([match.end() for match in re.finditer(r"\S+\s*|^\s+", text)])
    word = np.searchsorted(ends, [max(end - 1, start) for start, end in spans], side="right")
    used = np.unique(word)
    cuts = [0, *ends[used[:-1]], len(text)]
    words = [text[start:end] for start, end in pairwise(cuts)]
    return words, np.stack([values[:, word == i].mean(1) for i in used], axis=1)


def write_page(path: Path, title: str, words: list[str], values: np.ndarray) -> None:
    """values (quantities, layers, words)"""
    shown = {}
    for name, layers in zip(QUANTITIES.values(), values, strict=True):
        shown[f"{name}, mean of the layers"] = layers.mean(0)
        shown |= {f"{name}, layer {i + 1}": layer for i, layer in enumerate(layers)}
    values = json.dumps({name: [float(f"{x:.4g}") for x in row] for name, row in shown.items()})
    text = "".join(f"<span>{html.escape(word)}</span>" for word in words)
    path.write_text(PAGE.format(title=html.escape(title), text=text, values=values), encoding="utf-8")


def draw(path: Path, title: str, values: np.ndarray) -> None:
    """values (quantities, layers, tokens)"""
    num_layers, num_tokens = values.shape[1:]
    figure = Figure(figsize=(12, 1.2 + 4 * (0.5 + 0.22 * num_layers)), layout="constrained")
    panels = figure.subplots(len(QUANTITIES), 1, sharex=True)
    for axes, name, rows in zip(panels, QUANTITIES.values(), values, strict=True):
        low, high = np.quantile(rows, (0.01, 0.99))
        image = axes.imshow(
            rows,
            aspect="auto",
            interpolation="none",
            cmap="magma" if name == "surprise" else "viridis",
            vmin=low,
            vmax=high,
            extent=(0, num_tokens, num_layers + 0.5, 0.5),
        )
        axes.set_yticks(range(1, num_layers + 1))
        axes.set_ylabel("layer")
        axes.set_title(name, loc="left", fontsize=10)
        figure.colorbar(image, ax=axes, pad=0.01)
    panels[-1].set_xlabel("token")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids, and the characters of each."""
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer {type(tokenizer).__name__} does not say which characters a token stands for")
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return found.input_ids, found.offset_mapping


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a Titans checkpoint: a folder or a name on the Hub")
    parser.add_argument("text", metavar="TEXT", help="a file, or - for standard input")
    parser.add_argument("--output", type=Path, required=True, help="the folder for surprise.html and surprise.png")
    parser.add_argument("--max_tokens", type=int, default=20_000, help="a longer text is refused: nobody looks at it")
    parser.add_argument("--device", help="cpu, cuda, ...; a GPU if there is one")
    args = parser.parse_args(argv)
    if args.text != "-" and not Path(args.text).is_file():
        raise ValueError(f"TEXT {args.text} is not a file")
    text = sys.stdin.read() if args.text == "-" else Path(args.text).read_text(encoding="utf-8")
    model, tokenizer = load_model(args.model, args.device)
    ids, spans = tokenize(tokenizer, text)
    if not 0 < len(ids) <= args.max_tokens:
        raise ValueError(f"TEXT {args.text} has {len(ids)} tokens; it may have 1 to {args.max_tokens} (--max_tokens)")
    values = measure(model, ids)
    title = f"{Path(args.model).name}: {Path(args.text).name}"
    args.output.mkdir(parents=True, exist_ok=True)
    words, means = word_means(text, spans, values.reshape(-1, len(ids)))
    write_page(args.output / "surprise.html", title, words, means.reshape(*values.shape[:2], -1))
    draw(args.output / "surprise.png", title, values)
    print(f"{args.output / 'surprise.html'}\n{args.output / 'surprise.png'}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
