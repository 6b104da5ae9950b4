"""Trains models to classify the DNA sequences of files, each cross-validated in itself.

    python -m eval.dna.run human_nontata_promoters/test.tsv --output results/dna

A model is trained at each learning rate on the first fold with the first seed. On the other folds and with the other
seeds it is trained at the rate that was best in validation. A finished run is kept: the same command again goes on
with the next one.
"""

import hashlib
from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction

from eval.common.compared_models import VARIANTS, num_trained
from eval.common.fitting import fit
from eval.common.harness import check_options, make_parser, record_run
from eval.common.records import Record, read_records
from eval.dna import tables
from eval.dna.models import NAMES, OFF, build_model
from eval.dna.sequences import END, PAD, TOKENS, Fold, make_folds, read_sequences
from titans_hf import TitansConfig
from titans_hf.cli.shared.command_line import run_command

# Of every model but the CNN; Mamba2 has more layers.
SHAPE = {"parameters": 30_000, "hidden_size": 32, "num_hidden_layers": 2}
EVALUATIONS = 10  # of a training


def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Makes input_ids (B, T) and labels (B,). No mask: padding follows the token by which a model classifies."""
    ids = [torch.tensor([*map(TOKENS.__getitem__, example["seq"]), END]) for example in examples]
    labels = torch.tensor([example["labels"] for example in examples])
    return {"input_ids": pad_sequence(ids, batch_first=True, padding_value=PAD), "labels": labels}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Computes the share of right predictions."""
    return {"accuracy": float(np.mean(prediction.predictions == prediction.label_ids))}


def train(run: Namespace, examples: list[dict[str, Any]], num_labels: int, fold: Fold) -> dict[str, Any]:
    """Trains by AdamW with a linear warm-up of a tenth and a cosine to 0; returns the accuracies of the weights that
    are most accurate in validation.
    """
    longest = max(len(x["seq"]) for x in examples) + 1
    model = build_model(run.model, num_labels, longest, run.shape, run.settings)
    training, valid, test = ([examples[i] for i in rows] for rows in fold)
    steps = -(-len(training) // run.batch_size) * run.epochs
    options = {"max_steps": steps, "warmup_steps": steps // 10, "weight_decay": 0.01}
    options["metric_for_best_model"] = "eval_accuracy"
    parts = {"train_dataset": training, "eval_dataset": valid, "data_collator": collate, "compute_metrics": accuracy}
    parts["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    trainer = fit(run, model, max(1, steps // EVALUATIONS), options, **parts)
    scores = {"valid": trainer.state.best_metric, "test": trainer.predict(test).metrics["test_accuracy"]}
    return {"parameters": num_trained(model), **{name: round(x, 4) for name, x in scores.items()}}


def cross_validate(args: Namespace, path: Path, settings: dict[str, Any]) -> None:
    """Makes the runs of all models on a file."""
    sequences = read_sequences(path)
    classes, folds = sorted(sequences["label"].unique()), make_folds(sequences, args.folds)
    examples = sequences.assign(labels=sequences["label"].map(classes.index)).to_dict("records")
    shared = {name: getattr(args, name) for name in ("batch_size", "epochs", "folds")}
    shared["shape"] = {name: getattr(args, name) for name in SHAPE}
    shared["data"] = f"{path.resolve().parent.name}-{path.name.split('.')[0]}"
    shared["digest"] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]

    def record(model: str, rate: float, seed: int, fold: int) -> Record:
        is_titans = model.removesuffix(OFF) in VARIANTS
        row = f"{model}-{args.label}" if is_titans and args.label else model
        own = {"row": row, "model": model, "settings": settings if is_titans else {}}
        run = Namespace(**shared, **own, learning_rate=rate, seed=seed, fold=fold)
        name = f"{run.data}-{row}-lr{rate:g}-fold{fold}-seed{seed}"
        return record_run("dna", name, run, lambda: train(run, examples, len(classes), folds[fold]), args.output)

    for model in args.models:
        best = max(args.learning_rates, key=lambda rate: record(model, rate, args.seeds[0], 0)["valid"])
        for seed, fold in product(args.seeds, range(args.folds)):
            record(model, best, seed, fold)


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, NAMES, batch_size=16)
    parser.add_argument("files", nargs="+", type=Path, metavar="DATA")
    for name, number in {"folds": 5, "epochs": 10, **SHAPE}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[1e-3, 3e-3])
    args = parser.parse_args(argv)
    settings = check_options(args, TitansConfig(), **dict.fromkeys((*SHAPE, "epochs"), 1), folds=2)
    for path in args.files:
        cross_validate(args, path, settings)
    print("\n\n".join(tables.make_report(read_records(args.output, "dna"), [])))


if __name__ == "__main__":
    run_command(main)
