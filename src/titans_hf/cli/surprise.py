"""Draws the memory's surprise at each token of a text: surprise.png."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from titans_hf import TitansCache, TitansForCausalLM
from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf.cli.shared.checkpoints import load_config, load_model, load_tokenizer
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.devices import choose_device
from titans_hf.cli.shared.text_files import read_text
from titans_hf.cli.shared.text_ids import encode
from titans_hf_console import parse

TOKENS_OF_A_CALL = 2048
QUANTITIES = {
    "gradient_norm": "gradient norm (surprise)",
    "inner_lr": "learning rate θ",
    "momentum_decay": "momentum decay η",
    "forget": "forgetting rate α",
}


def measure(model: TitansForCausalLM, ids: list[int]) -> np.ndarray:
    """Reads ids and returns (quantities, layers, tokens): the QUANTITIES, means over heads."""
    cache, values = TitansCache(model.config), []
    pieces = torch.tensor(ids, device=model.device).split(TOKENS_OF_A_CALL)
    with torch.inference_mode():
        for piece in tqdm(pieces, desc="reading", unit="piece"):
            surprise = model.base_model(piece[None], cache=cache, output_surprise=True).surprise
            layers = [
                torch.stack([getattr(layer, name)[0].mean(0).nan_to_num() for name in QUANTITIES]) for layer in surprise
            ]
            values.append(torch.stack(layers, dim=1).float().cpu().numpy())
    return np.concatenate(values, axis=-1)


def draw(path: Path, title: str, values: np.ndarray) -> None:
    """Plots values (quantities, layers, tokens), as `measure` returns them. Every layer has its own colour scale:
    beside a layer with large values, another layer would look constant.
    """
    num_rows, num_tokens = values.shape[1:]
    low, high = np.quantile(values, (0.01, 0.99), axis=-1, keepdims=True)
    shares = ((values - low) / np.maximum(high - low, 1e-12)).clip(0, 1)
    figure = Figure(figsize=(12, 1.2 + 4 * (0.5 + 0.22 * num_rows)), layout="constrained")
    panels = figure.subplots(len(QUANTITIES), 1, sharex=True)
    for axes, (quantity, name), rows in zip(panels, QUANTITIES.items(), shares, strict=True):
        image = axes.imshow(
            rows,
            aspect="auto",
            interpolation="none",
            cmap="magma" if quantity == "gradient_norm" else "viridis",
            vmin=0,
            vmax=1,
            extent=(0, num_tokens, num_rows + 0.5, 0.5),
        )
        axes.set_yticks(range(1, num_rows + 1))
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
    if (kind := load_config(args.model, "MODEL").model_type) != "titans":
        raise ValueError(f"MODEL {args.model} must be a Titans, but is a {kind}")
    device, tokenizer = choose_device(args.device), load_tokenizer(args.model, "MODEL")
    model = load_model(args.model, "MODEL").to(device).eval()
    ids = encode(tokenizer, text).input_ids
    if not 0 < len(ids) <= args.max_tokens:
        raise ValueError(f"TEXT {args.text} has {len(ids)} tokens; it may have 1 to {args.max_tokens} (--max_tokens)")
    picture = args.output / "surprise.png"
    values = measure(model, ids)
    args.output.mkdir(parents=True, exist_ok=True)
    draw(picture, title, values)
    print(picture)


if __name__ == "__main__":
    run_command(main)
