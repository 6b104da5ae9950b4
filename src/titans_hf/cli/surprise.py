"""Draws the memory's surprise at each word of a text: surprise.html, the text itself, and surprise.png.

    titans-hf surprise MODEL TEXT --output DIR

TEXT is a file, or - for standard input. For a Titans, the page colours each word by the surprise of its tokens, the
norm of the gradient by which the memory learns them (paper, eq. 12), or by a gate of that update: theta (learning
rate), eta (momentum decay, 0 without momentum), alpha (forgetting rate). It shows one layer, or the mean of all layers.
The plot shows all quantities by layer and token. Any other model gets a memory. Its surprise is the loss of a token;
the memory's gain is the loss with learning off minus this loss.
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

from titans_hf.cli.shared.argument_checks import add_model_options, check_folder, check_minimums
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.memories import load_with_memory, new_cache
from titans_hf.cli.shared.text_ids import encode, normalize_newlines

PIECE = 2048  # tokens read at once
WHOLE_MODEL = "whole model"  # the row of a model other than a Titans
QUANTITIES = {
    "gradient_norm": "gradient norm (surprise)",
    "inner_lr": "learning rate θ",
    "momentum_decay": "momentum decay η",
    "forget": "forgetting rate α",
}
LOSSES = {"loss": "loss (surprise), nats", "gain": "gain by the memory, nats"}  # of models other than a Titans
EXPLANATIONS = {
    "loss": "its surprise, -log of its probability",
    "gain": "the loss that the memory has saved by learning from the words before",
    "gradient_norm": "its surprise, the norm of the gradient by which the memory learns it",
    "inner_lr": "the learning rate θ of the step by which the memory learns it",
    "momentum_decay": "the share η of the previous steps that the memory adds to the step for it",
    "forget": "the share α of its contents that the memory forgets at it",
}
PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 17px/1.9 Georgia, serif; max-width: 46em; margin: 0 auto; padding: 0 1em 2em; color: #222; }}
body {{ overflow-wrap: anywhere; }}
header, #explanation {{ font: 14px/1.5 sans-serif; }}
header {{ position: sticky; top: 0; background: #fff; padding: .6em 0; }}
header p {{ margin: .3em 0; }}
select {{ font-size: 16px; max-width: 100%; }}
.scale {{ display: inline-block; width: 6em; height: .8em; background: linear-gradient(90deg, #fff, #e4572e); }}
.scale {{ border: 1px solid #ccc; vertical-align: middle; }}
#text {{ white-space: pre-wrap; }}
#text span {{ background: rgba(228, 87, 46, var(--s)); border-radius: 2px; }}
#text span.chosen {{ outline: 2px solid #222; }}
</style>
<p id="explanation"></p>
<header><b>{title}</b>
<p><select id="choice" aria-label="quantity and layer"></select></p>
<p><span id="low"></span> <i class="scale"></i> <span id="high"></span> (2nd to 98th percentile of the words)</p>
<p><output id="value">Tap or click a word for its value.</output></p></header>
<p id="text">{text}</p>
<script>
const rows = {values};
const explanations = {explanations};
const words = [...document.querySelectorAll("#text span")], $ = id => document.getElementById(id);
let chosen = null;
function showValue() {{
  if (chosen === null) return;
  words.forEach((word, i) => word.classList.toggle("chosen", i === chosen));
  $("value").textContent = "“" + words[chosen].textContent.trim() + "”: " + rows[$("choice").value][chosen];
}}
function colour() {{
  const name = $("choice").value, values = rows[name];
  const sorted = [...values].sort((a, b) => a - b), at = share => sorted[Math.round(share * (sorted.length - 1))];
  const low = at(.02), width = Math.max(at(.98) - low, 1e-9);
  words.forEach((word, i) => {{
    word.style.setProperty("--s", Math.min(1, Math.max(0, (values[i] - low) / width)).toFixed(3));
    word.title = name + ": " + values[i];
  }});
  $("low").textContent = low;
  $("high").textContent = at(.98);
  $("explanation").textContent = explanations[name];
  showValue();
}}
$("text").onclick = event => {{
  if (!words.includes(event.target)) return;
  chosen = words.indexOf(event.target);
  showValue();
}};
for (const name in rows) $("choice").add(new Option(name));
$("choice").onchange = colour;
colour();
</script>
"""


def measure(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Reads ids and returns (quantities, layers, tokens): for a Titans the QUANTITIES, means over heads; for another
    model the LOSSES, as one layer.
    """
    if hasattr(model, "memory"):
        losses = _losses(model, ids)
        model.set_memory_learning(False)
        return np.stack([losses, _losses(model, ids) - losses])[:, None]
    cache, values = new_cache(model), []
    with torch.inference_mode():
        for piece in _pieces(model, ids):
            surprise = model.base_model(piece[None], cache=cache, output_surprise=True).surprise
            layers = [
                torch.stack([getattr(layer, name)[0].mean(0).nan_to_num() for name in QUANTITIES]) for layer in surprise
            ]
            values.append(torch.stack(layers, dim=1).float().cpu().numpy())
    return np.concatenate(values, axis=-1)


def _pieces(model: PreTrainedModel, ids: list[int]) -> tqdm:
    return tqdm(torch.tensor(ids, device=model.device).split(PIECE), desc="reading", unit="piece")


@torch.no_grad()
def _losses(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Reads ids and returns -log p of each token; 0 for the first token, which follows nothing."""
    cache, last, losses = new_cache(model), None, [np.zeros(1)]
    for piece in _pieces(model, ids):
        logits = model(piece[None], cache=cache).logits[0].float()
        before = logits[:-1] if last is None else torch.cat([last, logits[:-1]])
        targets, last = piece[len(piece) - len(before) :], logits[-1:]
        losses.append(torch.nn.functional.cross_entropy(before, targets, reduction="none").cpu().numpy())
    return np.concatenate(losses)


def word_means(text: str, spans: list[tuple[int, int]], values: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Returns the words of a text, each with the white space after it, and the means (..., words) of their tokens'
    values (..., tokens).

    spans: the characters of each token. Tokens belong to the word in which they end; words without tokens join the next
    word.
    """
    ends = np.array([match.end() for match in re.finditer(r"\S+\s*|^\s+", text)])
    word = np.searchsorted(ends, [max(end - 1, start) for start, end in spans], side="right")
    used = np.unique(word)
    cuts = [0, *ends[used[:-1]], len(text)]
    words = [text[start:end] for start, end in pairwise(cuts)]
    return words, np.stack([values[:, word == i].mean(1) for i in used], axis=1)


def write_page(path: Path, title: str, words: list[str], values: np.ndarray, is_titans: bool) -> None:
    """Writes the page of a text. values (quantities, layers, words), as `measure` returns them: a Titans has a row for
    each layer, another model has one row.
    """
    rows_by_name, explanations, quantities = {}, {}, QUANTITIES if is_titans else LOSSES
    for quantity, layers in zip(quantities, values, strict=True):
        rows = {WHOLE_MODEL: layers[0]}
        if is_titans:
            rows = {"mean of the layers": layers.mean(0)}
            rows |= {f"layer {i}": layer for i, layer in enumerate(layers, 1)}
        for layer_name, row in rows.items():
            name = f"{quantities[quantity]}, {layer_name}"
            rows_by_name[name] = [float(f"{x:.4g}") for x in row]
            mean = "the word's tokens and the memory's heads" if is_titans else "the word's tokens"
            explanations[name] = (
                f"The darker a word, the larger {EXPLANATIONS[quantity]} ({layer_name}; mean of {mean})."
            )
    text = "".join(f"<span>{html.escape(word)}</span>" for word in words)
    values, explanations = json.dumps(rows_by_name), json.dumps(explanations)
    page = PAGE.format(title=html.escape(title), text=text, values=values, explanations=explanations)
    path.write_text(page, encoding="utf-8")


def draw(path: Path, title: str, values: np.ndarray, is_titans: bool) -> None:
    """Plots values (quantities, layers, tokens), as `write_page` takes them. Every layer has its own colour scale:
    beside a layer with large values, another layer would look constant.
    """
    num_rows, num_tokens = values.shape[1:]
    quantities = QUANTITIES if is_titans else LOSSES
    low, high = np.quantile(values, (0.01, 0.99), axis=-1, keepdims=True)
    shares = ((values - low) / np.maximum(high - low, 1e-12)).clip(0, 1)
    figure = Figure(figsize=(12, 1.2 + 4 * (0.5 + 0.22 * num_rows)), layout="constrained")
    panels = figure.subplots(len(quantities), 1, sharex=True)
    for axes, (quantity, name), rows in zip(panels, quantities.items(), shares, strict=True):
        image = axes.imshow(
            rows,
            aspect="auto",
            interpolation="none",
            cmap="magma" if quantity in ("gradient_norm", "loss") else "viridis",
            vmin=0,
            vmax=1,
            extent=(0, num_tokens, num_rows + 0.5, 0.5),
        )
        axes.set_yticks(range(1, num_rows + 1), range(1, num_rows + 1) if is_titans else [WHOLE_MODEL])
        axes.set_ylabel("layer")
        axes.set_title(name, loc="left", fontsize=10)
        bar = figure.colorbar(image, ax=axes, pad=0.01, ticks=[0, 1])
        bar.ax.set_yticklabels(["1st", "99th"], fontsize=8)
    panels[-1].set_xlabel("token position")
    # A file name may contain $ and _, which matplotlib would read as mathematics.
    figure.suptitle(f"{title} (colours: from the 1st to the 99th percentile of each layer)", parse_math=False)
    figure.savefig(path, dpi=120)


def read_text(path: str) -> str:
    """Reads a file, or standard input for -, without its byte order mark. Raises ValueError if it is not UTF-8."""
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return normalize_newlines(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"TEXT {path} is not UTF-8: {error}") from error


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns ids and the characters (start, end) of each. Raises ValueError for a tokenizer without offsets."""
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer {type(tokenizer).__name__} has no character offsets of its tokens")
    encoding = encode(tokenizer, text, return_offsets_mapping=True)
    return encoding.input_ids, encoding.offset_mapping


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add_model_options(parser)
    parser.add_argument("text", metavar="TEXT", help="a file, or - for standard input")
    parser.add_argument("--output", type=Path, required=True, help="the folder for surprise.html and surprise.png")
    parser.add_argument("--max_tokens", type=int, default=20_000, help="the longest text that is drawn")
    args = parser.parse_args(argv)
    check_minimums(args, max_tokens=1)
    check_folder(args.output, "--output")
    text, title = read_text(args.text), " ".join(f"{Path(args.model).name}: {Path(args.text).name}".split())
    model, tokenizer = load_with_memory(args, ("fast_weights",))  # the part that learns
    ids, spans = tokenize(tokenizer, text)
    if not 0 < len(ids) <= args.max_tokens:
        raise ValueError(f"TEXT {args.text} has {len(ids)} tokens; it may have 1 to {args.max_tokens} (--max_tokens)")
    values = measure(model, ids)
    args.output.mkdir(parents=True, exist_ok=True)
    words, means = word_means(text, spans, values.reshape(-1, len(ids)))
    is_titans = not hasattr(model, "memory")
    write_page(args.output / "surprise.html", title, words, means.reshape(*values.shape[:2], -1), is_titans)
    draw(args.output / "surprise.png", title, values, is_titans)
    print(f"{args.output / 'surprise.html'}\n{args.output / 'surprise.png'}")


if __name__ == "__main__":
    run_command(main)
