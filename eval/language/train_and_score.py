"""Trains one language model on texts, scores it by position on texts it has not seen, and records the run.

    python -m eval.language.train_and_score lmm --train_text DIR --score_text DIR [DIR ...] \
        --output runs/language.jsonl [--label lmm-off --set memory_max_lr=0] [--seed 0]

The score of a stretch of text is the mean cross entropy (nats per token) between positions 0, 64, 256, 512, 1024, ...
"""

import argparse
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments, set_seed

from eval.common.compared_models import NAMES, fit_config, parse_settings, scale_outputs
from eval.common.records import append_record, describe_commit, read_records
from eval.language.token_blocks import cut_blocks, cut_stretches, make_tokenizer, read_documents
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.text_files import find_files

FIRST_EDGES = (0, 64, 256, 512)
TOKENS_AT_ONCE = 1 << 14  # scored in a batch
NUM_REPORTS = 16  # points of a training curve
RECORDED = ("vocab_size", "block_length", "batch_size", "steps", "learning_rate", "seed", "bf16")


def edges_to(length: int) -> list[int]:
    """Returns 0, 64, 256, 512, 1024, ..., length."""
    doubled = [512 << i for i in range(1, length.bit_length()) if 512 << i < length]
    return [edge for edge in (*FIRST_EDGES, *doubled) if edge < length] + [length]


def train(model: PreTrainedModel, blocks: np.ndarray, args: argparse.Namespace) -> list[list[float]]:
    """Trains on blocks (N, T) in random order by AdamW, with a warm-up and a cosine to a tenth of the learning rate;
    returns the curve, pairs of a step and the mean loss since the pair before.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            dataloader_drop_last=True,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            warmup_steps=int(0.05 * args.steps),
            weight_decay=0.1,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            bf16=args.bf16,
            seed=args.seed,
            logging_steps=max(1, args.steps // NUM_REPORTS),
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=not sys.stderr.isatty(),
        )
        trainer = Trainer(model, options, train_dataset=[{"input_ids": x, "labels": x} for x in torch.tensor(blocks)])
        trainer.train()
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # scored in float32
    return [[x["step"], round(x["loss"], 4)] for x in trainer.state.log_history if "loss" in x]


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
    parser.add_argument("--score_length", type=int, default=4096)
    parser.add_argument("--stretches", type=int, default=4, help="stretches of each text to be scored")
    args = parser.parse_args(argv)
    args.label = args.label or args.model
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
    tokenizer = make_tokenizer(train_files, args.vocab_size)
    blocks = cut_blocks(read_documents(train_files, tokenizer), args.block_length)
    scored = cut_stretches(read_documents(score_files, tokenizer), args.score_length, args.stretches)
    settings = parse_settings(args.set)
    set_seed(args.seed)
    config = fit_config(args.model, args.parameters, {"vocab_size": args.vocab_size} | settings)
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_config(config)
    if args.scale_outputs:
        scale_outputs(model)
    start, commit = time.time(), describe_commit()
    curve = train(model, blocks, args)
    losses = losses_by_position(model, scored)
    names = [file.stem for file in score_files for _ in range(args.stretches)]
    record = {
        "benchmark": "language",
        "name": args.label,
        "model": args.model,
        "settings": settings | ({"scale_outputs": True} if args.scale_outputs else {}),
        "parameters": model.num_parameters(),
        "config": config.to_diff_dict(),
        "training": {name: getattr(args, name) for name in RECORDED}
        | {"texts": len(train_files), "device": model.device.type, "loss": curve},
        "commit": commit,
        "minutes": round((time.time() - start) / 60, 1),
        "edges": edges_to(args.score_length),
        "mean": losses.mean(0).round(4).tolist(),
        "stretches": [[name, *row] for name, row in zip(names, losses.round(4).tolist(), strict=True)],
    }
    append_record(record, args.output)
    print(args.label, record["parameters"], " ".join(f"{x:.4f}" for x in record["mean"]), record["minutes"], "min")


if __name__ == "__main__":
    run_command(main)
