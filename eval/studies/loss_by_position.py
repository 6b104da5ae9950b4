"""Measures the loss by position in a text, also beyond the lengths that the models were trained on.

    python -m eval.studies.loss_by_position MODEL [MODEL ...] --text FOLDER --output DIR
    python -m eval.studies.loss_by_position checkpoints/novels-mag --memory_off --text FOLDER --output DIR

Of every .txt file of the folder, `--stretches` of `--length` tokens, evenly spread over it, are each read as a text of
their own. The table and the plot have the mean loss between positions 0, 256, 512, 1024, ..., in bits per token (of a
tokenizer of bytes: per byte).
"""

import argparse
import json
import math
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf.cli.shared.checkpoints import check_checkpoint, load_model, load_tokenizer
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.devices import choose_device
from titans_hf.cli.shared.figures import (
    line_styles,
    loss_by_position_axes,
    mark_failures,
    mark_trained_length,
    save_figure,
)
from titans_hf.cli.shared.markdown_tables import markdown_table
from titans_hf.cli.shared.text_files import find_files, read_text
from titans_hf.cli.shared.text_ids import encode
from titans_hf.cli.training.checkpoints import RECORD

FIRST_EDGE = 256


def stretches_of(folder: Path, tokenizer: PreTrainedTokenizerBase, length: int, number: int) -> Tensor:
    """Cuts `number` stretches from every file: token ids (files x number, length).

    Raises ValueError for a file that is too short, or a folder without files.
    """
    stretches = []
    for file in find_files(folder, "--text"):
        ids = encode(tokenizer, read_text(file, "--text")).input_ids
        if len(ids) < number * length:
            raise ValueError(f"{file} has {len(ids)} tokens: too few for {number} stretches of {length}")
        starts = [(len(ids) - number * length) // (number + 1) * (i + 1) + i * length for i in range(number)]
        stretches += [ids[start : start + length] for start in starts]
    return torch.tensor(stretches)


def edges_to(length: int) -> list[int]:
    """Returns 0, 256, 512, 1024, ..., length."""
    doubled = [FIRST_EDGE << i for i in range(length.bit_length()) if FIRST_EDGE << i < length]
    return [0, *doubled, length]


@torch.inference_mode()
def bits_by_position(model: PreTrainedModel, stretches: Tensor, label: str) -> list[float]:
    """Returns the mean loss between `edges_to`, over all tokens but the first."""
    total = torch.zeros(stretches.shape[1] - 1, dtype=torch.float64)
    for ids in tqdm(stretches.to(model.device), desc=label):
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        total += cross_entropy(logits.float(), ids[1:], reduction="none").cpu()
    bits = total / len(stretches) / math.log(2)
    # index i has the loss of the token at position i + 1
    return [bits[max(0, low - 1) : high - 1].mean().item() for low, high in pairwise(edges_to(stretches.shape[1]))]


def table(losses: dict[str, list[float]], length: int) -> str:
    """Makes the table of losses: a row per model, a column per range of positions."""
    heading = ["model", *(f"{low:,} to {high:,}" for low, high in pairwise(edges_to(length)))]
    return markdown_table(heading, [[label, *(f"{x:.2f}" for x in bits)] for label, bits in losses.items()])


def trained_length(paths: list[str]) -> int | None:
    """Returns the block length that all models were trained on, by run.json; None if one has none or they differ."""
    runs = [Path(path) / RECORD for path in paths]
    lengths = {json.loads(run.read_text(encoding="utf-8"))["block_length"] if run.is_file() else None for run in runs}
    return lengths.pop() if len(lengths) == 1 else None


def plot(losses: dict[str, list[float]], length: int, trained: int | None, path: Path) -> None:
    """Draws loss against position; a cross is where a model's loss is more than a tenth above its lowest."""
    edges, styles, failed = edges_to(length)[1:], line_styles(losses), []
    axes = loss_by_position_axes(edges, "bits per token")
    for label, bits in losses.items():
        axes.plot(edges, bits, **styles[label])
        failed += [point for point in zip(edges, bits, strict=True) if point[1] > 1.1 * min(bits)]
    mark_failures(
        axes, *zip(*failed, strict=True) if failed else ((), ()), label="loss more than 10 % above its lowest"
    )
    if trained:
        mark_trained_length(axes, trained)
    save_figure(axes.figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="checkpoints with a tokenizer, the same in all")
    parser.add_argument("--text", type=Path, required=True, help="a folder of .txt files")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a stretch")
    parser.add_argument("--stretches", type=int, default=4, help="stretches of each file")
    parser.add_argument("--output", type=Path, required=True, help="the folder for loss_by_position.json, .md and .png")
    parser.add_argument("--memory_off", action="store_true", help="score each Titans with memory off as well")
    parser.add_argument("--device", help="cpu, cuda, ...; a GPU if there is one")
    args = parser.parse_args(argv)
    check_minimums(args, length=2, stretches=1)
    check_folder(args.output, "--output")
    find_files(args.text, "--text")  # before the models are loaded
    device = choose_device(args.device)
    labels = [Path(path).resolve().name for path in args.models]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(f"two models are called {twice[0]}: their folders' names label the results")
    for path in args.models:
        check_checkpoint(path, "MODEL")
    first, *others = (load_tokenizer(path, "MODEL") for path in args.models)
    stretches = stretches_of(args.text, first, args.length, args.stretches)
    for path, other in zip(args.models[1:], others, strict=True):
        if other.get_vocab() != first.get_vocab():
            raise ValueError(f"{path} has another tokenizer than {args.models[0]}: bits cannot be compared")
    args.output.mkdir(parents=True, exist_ok=True)
    losses = {}
    for name, path in zip(labels, args.models, strict=True):
        model = load_model(path, "MODEL").to(device).eval()
        losses[name] = bits_by_position(model, stretches, name)
        if args.memory_off and hasattr(model, "set_memory_learning"):
            label = f"{name}, memory off"
            model.set_memory_learning(False)
            losses[label] = bits_by_position(model, stretches, label)
        record = {"edges": edges_to(args.length), "bits per token": losses}
        (args.output / "loss_by_position.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (args.output / "loss_by_position.md").write_text(table(losses, args.length) + "\n", encoding="utf-8")
        plot(losses, args.length, trained_length(args.models), args.output / "loss_by_position.png")
    print(table(losses, args.length))


if __name__ == "__main__":
    run_command(main)
