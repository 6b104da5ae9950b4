"""Train one language model on texts, score it by position on texts it has not seen, and write all that as JSON.

    python -m experiments.language.train_and_score lmm --train_text DIR --score_text DIR [DIR ...] \
        --output experiments/language/results/lmm.json [--set memory_max_lr=0] [--seed 0]

The score of a stretch of text is the mean cross entropy (nats per token) between positions 0, 64, 256, 512, 1024, ...
"""

import argparse
import json
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from experiments.language.models import NAMES, build_model, fit_config, parse_settings, silence_outputs
from experiments.language.token_blocks import cut_blocks, cut_stretches, make_tokenizer, read_documents
from titans_hf_scripts.shared.command_line import run_command
from titans_hf_scripts.shared.text_files import find_files

FIRST_EDGES = (0, 64, 256, 512)


def edges_to(length: int) -> list[int]:
    """0, 64, 256, 512, 1024, ..., length"""
    doubled = [512 << i for i in range(1, length.bit_length()) if 512 << i < length]
    return [edge for edge in (*FIRST_EDGES, *doubled) if edge < length] + [length]


@torch.inference_mode()
def losses_by_position(model: PreTrainedModel, stretches: np.ndarray) -> np.ndarray:
    """(N, T + 1) ids -> (N, number of ranges) mean loss between `edges_to`, nats per token."""
    model.eval()
    edges, rows = edges_to(stretches.shape[1] - 1), []
    for ids in torch.from_numpy(stretches):
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0]
        loss = cross_entropy(logits.float(), ids[1:], reduction="none").double()
        rows.append([loss[low:high].mean().item() for low, high in pairwise(edges)])
    return np.array(rows)


class CurveRecorder(TrainerCallback):
    """Keeps the training loss of every logged step, and prints it."""

    def __init__(self, label: str):
        self.label, self.curve, self.start = label, [], time.time()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            loss = float(logs["loss"])
            self.curve.append([state.global_step, round(loss, 4)])
            seconds = time.time() - self.start
            print(
                f"{self.label} step {state.global_step}/{state.max_steps} loss {loss:.4f} {seconds:.0f} s", flush=True
            )


def train(model: PreTrainedModel, blocks: np.ndarray, args: argparse.Namespace) -> list[list[float]]:
    """Train on random blocks (N, T) with AdamW, a cosine to a tenth of the rate, and return the curve."""
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.from_numpy(blocks)]
    recorder = CurveRecorder(args.label)
    arguments = TrainingArguments(
        output_dir=args.cache / "trainer",
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=0.05,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=args.bf16,
        use_cpu=not torch.cuda.is_available(),
        seed=args.seed,
        logging_steps=max(1, args.steps // 16),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[recorder])
    trainer.pop_callback(next(x for x in trainer.callback_handler.callbacks if type(x).__name__ == "PrinterCallback"))
    trainer.train()
    return recorder.curve


def describe_commit() -> str:
    """Name the commit of the code, with "+" where files differ from it; empty outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=NAMES)
    parser.add_argument("--train_text", type=Path, required=True, help="a folder of .txt files")
    parser.add_argument("--score_text", type=Path, nargs="+", required=True, help="folders of .txt files")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write; one that exists is kept")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="fields of the model's config")
    parser.add_argument("--silent", action="store_true", help="baselines: attention's last projection begins at 0")
    parser.add_argument("--parameters", type=int, default=1_200_000)
    parser.add_argument("--vocab_size", type=int, default=2048)
    parser.add_argument("--block_length", type=int, default=2048)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="matrix products in bf16")
    parser.add_argument("--score_length", type=int, default=4096)
    parser.add_argument("--stretches", type=int, default=4, help="of each text to be scored")
    parser.add_argument("--cache", type=Path, default=Path("runs/language"), help="for the tokenizer and token ids")
    parser.add_argument("--save_model", type=Path, help="a folder for the trained model")
    args = parser.parse_args(argv)
    args.label = args.output.stem
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.output.exists():
        raise ValueError(f"--output {args.output} exists: a finished run is not made again")
    train_files = find_files(args.train_text, "--train_text")
    score_files = [file for folder in args.score_text for file in find_files(folder, "--score_text")]
    tokenizer = make_tokenizer(train_files, args.vocab_size, args.cache)
    blocks = cut_blocks(read_documents(train_files, tokenizer, args.cache), args.block_length)
    scored = cut_stretches(read_documents(score_files, tokenizer, args.cache), args.score_length, args.stretches)
    settings = parse_settings(args.set)
    set_seed(args.seed)
    config = fit_config(args.model, args.parameters, {"vocab_size": args.vocab_size} | settings)
    set_seed(args.seed)
    model = build_model(args.model, config)
    if args.silent:
        silence_outputs(model)
    start, commit = time.time(), describe_commit()
    curve = train(model, blocks, args)
    losses = losses_by_position(model, scored)
    names = [file.stem for file in score_files for _ in range(args.stretches)]
    record = {
        "model": args.model,
        "settings": settings | ({"silent": True} if args.silent else {}),
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
            "loss": curve,
        },
        "commit": commit,
        "minutes": round((time.time() - start) / 60, 1),
        "edges": edges_to(args.score_length),
        "mean": [round(x, 4) for x in losses.mean(0)],
        "stretches": [[name, *(round(x, 4) for x in row)] for name, row in zip(names, losses, strict=True)],
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(record) + "\n", encoding="utf-8")
    if args.save_model:
        model.save_pretrained(args.save_model)
    print(args.label, record["parameters"], " ".join(f"{x:.4f}" for x in record["mean"]), record["minutes"], "min")


if __name__ == "__main__":
    run_command(main)
