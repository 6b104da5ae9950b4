"""Trains one language model on texts, scores it by position on texts it has not seen, and records the run.

    python -m eval.language.train_and_score lmm --train_text DIR --score_text DIR [DIR ...] \
        --output runs/language.jsonl [--label lmm-off --set memory_max_lr=0] [--seed 0]

The score of a stretch of text is the mean cross entropy (nats per token) between positions 0, 64, 256, 512, 1024, ...
"""

import argparse
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, set_seed

from eval.common.compared_models import NAMES, build_model, fit_config, parse_settings, scale_outputs
from eval.common.records import append_record, describe_commit, read_records
from eval.language.token_blocks import cut_blocks, cut_stretches, make_tokenizer, read_documents
from eval.language.training_loop import TrainingOptions, train
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.devices import choose_device
from titans_hf.cli.shared.text_files import find_files

FIRST_EDGES = (0, 64, 256, 512)
TOKENS_AT_ONCE = 1 << 14  # scored in a batch


def edges_to(length: int) -> list[int]:
    """Returns 0, 64, 256, 512, 1024, ..., length."""
    doubled = [512 << i for i in range(1, length.bit_length()) if 512 << i < length]
    return [edge for edge in (*FIRST_EDGES, *doubled) if edge < length] + [length]


@torch.inference_mode()
def losses_by_position(model: PreTrainedModel, stretches: np.ndarray) -> np.ndarray:
    """Computes the mean loss of (N, T + 1) ids between `edges_to`, nats per token: (N, ranges)."""
    model.eval()
    edges, parts = edges_to(stretches.shape[1] - 1), []
    for ids in torch.from_numpy(stretches).split(max(1, TOKENS_AT_ONCE // stretches.shape[1])):
        ids = ids.to(model.device)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.float().mT, ids[:, 1:], reduction="none").double()
        parts.append(torch.stack([loss[:, low:high].mean(1) for low, high in pairwise(edges)], dim=1).cpu())
    return torch.cat(parts).numpy()


def scores(losses: np.ndarray, names: list[str], length: int) -> dict[str, list]:
    """Returns the fields of a record for the losses by position (N, ranges) of stretches, with their texts' names."""
    return {
        "edges": edges_to(length),
        "mean": [round(float(x), 4) for x in losses.mean(0)],
        "stretches": [[name, *(round(float(x), 4) for x in row)] for name, row in zip(names, losses, strict=True)],
    }


class CurveRecorder:
    """Keeps the training loss, and prints it."""

    def __init__(self, label: str, steps: int):
        self.label, self.steps, self.curve, self.start = label, steps, [], time.time()

    def __call__(self, step: int, loss: float) -> None:
        self.curve.append([step, round(loss, 4)])
        print(f"{self.label} step {step}/{self.steps} loss {loss:.4f} {time.time() - self.start:.0f} s", flush=True)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("model", choices=NAMES)
    parser.add_argument("--train_text", type=Path, required=True, help="a folder of .txt files")
    parser.add_argument("--score_text", type=Path, nargs="+", required=True, help="folders of .txt files")
    parser.add_argument("--output", type=Path, required=True, help="the JSON Lines file to add the run to")
    parser.add_argument("--label", help="the name of the table's row; default: the model's")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="fields of the model's config")
    parser.add_argument(
        "--scale_outputs",
        action="store_true",
        help="baselines: the mixers' last projections start at a tenth, as Titans'",
    )
    parser.add_argument("--parameters", type=int, default=1_200_000)
    parser.add_argument("--vocab_size", type=int, default=2048)
    parser.add_argument("--block_length", type=int, default=2048)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="matrix products in bf16")
    parser.add_argument("--device", help="cpu, cuda, ...; a GPU if there is one")
    parser.add_argument("--graph", action="store_true", help="on a GPU: a training step as one CUDA graph")
    parser.add_argument("--score_length", type=int, default=4096)
    parser.add_argument("--stretches", type=int, default=4, help="stretches of each text to be scored")
    parser.add_argument("--cache", type=Path, default=Path("runs/language"), help="for the tokenizer and token ids")
    parser.add_argument("--save_model", type=Path, help="a folder for the trained model")
    args = parser.parse_args(argv)
    args.label, args.device = args.label or args.model, str(choose_device(args.device))
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.output.suffix != ".jsonl":
        raise ValueError(f"--output must end in .jsonl, but is {args.output}")
    for record in read_records(args.output, "language"):
        if (record["name"], record["training"]["seed"]) == (args.label, args.seed):
            raise ValueError(f"--output {args.output} has {args.label} with seed {args.seed}: give another --label")
    train_files = find_files(args.train_text, "--train_text")
    score_files = [file for folder in args.score_text for file in find_files(folder, "--score_text")]
    tokenizer = make_tokenizer(train_files, args.vocab_size, args.cache)
    blocks = cut_blocks(read_documents(train_files, tokenizer, args.cache), args.block_length)
    scored = cut_stretches(read_documents(score_files, tokenizer, args.cache), args.score_length, args.stretches)
    settings = parse_settings(args.set)
    set_seed(args.seed)
    config = fit_config(args.model, args.parameters, {"vocab_size": args.vocab_size} | settings)
    set_seed(args.seed)
    model = build_model(args.model, config).to(args.device)
    if args.scale_outputs:
        scale_outputs(model)
    start, commit, recorder = time.time(), describe_commit(), CurveRecorder(args.label, args.steps)
    train(model, blocks, TrainingOptions(*(getattr(args, name) for name in TrainingOptions._fields)), recorder)
    losses = losses_by_position(model, scored)
    names = [file.stem for file in score_files for _ in range(args.stretches)]
    record = {
        "benchmark": "language",
        "name": args.label,
        "model": args.model,
        "settings": settings | ({"scale_outputs": True} if args.scale_outputs else {}),
        "parameters": model.num_parameters(),
        "config": config.to_diff_dict(),
        "training": {
            "texts": len(train_files),
            "vocab_size": args.vocab_size,
            "block_length": args.block_length,
            "batch_size": args.batch_size,
            "steps": args.steps,
            "learning_rate": args.learning_rate,
            "seed": args.seed,
            "bf16": args.bf16,
            "device": args.device,
            "loss": recorder.curve,
        },
        "commit": commit,
        "minutes": round((time.time() - start) / 60, 1),
    } | scores(losses, names, args.score_length)
    append_record(record, args.output)
    if args.save_model:
        model.save_pretrained(args.save_model)
    print(args.label, record["parameters"], " ".join(f"{x:.4f}" for x in record["mean"]), record["minutes"], "min")


if __name__ == "__main__":
    run_command(main)
