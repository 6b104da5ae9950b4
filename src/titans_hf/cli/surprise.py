"""Draws the memory's surprise at each token of a text: surprise.png."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import PreTrainedModel

from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.memories import load_with_memory, new_cache
from titans_hf.cli.shared.text_files import read_text
from titans_hf.cli.shared.text_ids import encode
from titans_hf_console import parse

TOKENS_OF_A_CALL = 2048
WHOLE_MODEL = "whole model"  # the row of a model other than a Titans
QUANTITIES = {
    "gradient_norm": "gradient norm (surprise)",
    "inner_lr": "learning rate θ",
    "momentum_decay": "momentum decay η",
    "forget": "forgetting rate α",
}
LOSSES = {"loss": "loss (surprise), nats", "gain": "gain by the memory, nats"}  # of models other than a Titans


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
    return tqdm(torch.tensor(ids, device=model.device).split(TOKENS_OF_A_CALL), desc="reading", unit="piece")


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


def draw(path: Path, title: str, values: np.ndarray, is_titans: bool) -> None:
    """Plots values (quantities, layers, tokens), as `measure` returns them. Every layer has its own colour scale:
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


def main(argv: list[str] | None = None) -> None:
    args = parse("surprise", argv)
    check_minimums(args, max_tokens=1)
    check_folder(args.output, "--output")
    text = read_text(Path(args.text), "TEXT")
    title = " ".join(f"{Path(args.model).name}: {Path(args.text).name}".split())
    model, tokenizer = load_with_memory(args, ("fast_weights",))  # the part that learns
    ids = encode(tokenizer, text).input_ids
    if not 0 < len(ids) <= args.max_tokens:
        raise ValueError(f"TEXT {args.text} has {len(ids)} tokens; it may have 1 to {args.max_tokens} (--max_tokens)")
    picture = args.output / "surprise.png"
    values = measure(model, ids)
    args.output.mkdir(parents=True, exist_ok=True)
    draw(picture, title, values, not hasattr(model, "memory"))
    print(picture)


if __name__ == "__main__":
    run_command(main)
