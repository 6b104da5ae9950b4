"""Trains models to classify the DNA sequences of files, each cross-validated in itself.

    python -m eval.dna.run human_nontata_promoters/test.tsv --output results/dna

The learning rate of a model is chosen on the first fold with the first seed; all other folds and seeds use it. A
finished run is kept: the same command again goes on with the next one.
"""

import hashlib
from argparse import Namespace
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction

from eval.common import harness
from eval.common.compared_models import VARIANTS, num_trained
from eval.common.harness import check_options, make_parser, record_run, run_of
from eval.common.records import Record, read_records
from eval.dna import tables
from eval.dna.folds import Fold, make_folds
from eval.dna.models import MEMORY_OFF, NAMES, build_model, config_of
from eval.dna.sequences import PAD, read_sequences, tokenize
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.fitting import fit

SHAPE = ("parameters", "hidden_size", "num_hidden_layers")
DEFAULT_MODELS = ("lmm", "lmm" + MEMORY_OFF, "mag", "mag" + MEMORY_OFF, "llama", "mamba2", "cnn")
COLUMNS = ["epoch", "loss", "eval_loss", "eval_accuracy"]  # of a curve
DECIMALS = 4


@dataclass(frozen=True, kw_only=True)
class Run(harness.Run):
    """`digest` is of the data; `shape` has parameters, hidden_size and num_hidden_layers."""

    digest: str
    shape: dict[str, int]
    fold: int
    folds: int
    epochs: int
    evaluations: int

    @property
    def name(self) -> str:
        return f"{self.data}-{self.row}-lr{self.learning_rate:g}-fold{self.fold}-seed{self.seed}"


class Data(NamedTuple):
    """The sequences of a file, the SHA-256 of the file, the order of the labels, and the folds."""

    sequences: pd.DataFrame
    digest: str
    classes: list[str]
    folds: list[Fold]

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest sequence."""
        return self.sequences["seq"].str.len().max() + 1

    def examples(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """Returns the sequences and labels of some rows."""
        labels = self.sequences["label"].map(self.classes.index)
        return self.sequences[["seq"]].assign(labels=labels).iloc[rows].to_dict("records")


def parse_args(argv: list[str] | None) -> Namespace:
    parser = make_parser(__doc__, NAMES, DEFAULT_MODELS, batch_size=16)
    parser.add_argument("files", nargs="+", type=Path, metavar="DATA")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument(
        "--parameters", type=int, default=30_000, help="about so many parameters of every model but the CNN"
    )
    parser.add_argument("--hidden_size", type=int, default=32)
    parser.add_argument(
        "--num_hidden_layers", type=int, default=2, help="layers of every model but Mamba2, which has more"
    )
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[1e-3, 3e-3])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--evaluations", type=int, default=10, help="evaluations on the validation part")
    return parser.parse_args(argv)


def read_data(path: Path, folds: int) -> Data:
    """Reads and splits a file. Raises ValueError for one class, and as `read_sequences` and `make_folds` do."""
    sequences = read_sequences(path)
    classes = sorted(sequences["label"].unique())
    if len(classes) < 2:
        raise ValueError(f"{path} has one class only: {classes[0]}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return Data(sequences, digest, classes, make_folds(sequences, folds))


def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Makes input_ids (B, T) and labels (B,). No mask: padding follows the token by which a model classifies."""
    ids = [torch.tensor(tokenize(example["seq"])) for example in examples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=PAD),
        "labels": torch.tensor([example["labels"] for example in examples]),
    }


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Computes the share of right predictions."""
    return {"accuracy": float(np.mean(prediction.predictions == prediction.label_ids))}


def train(run: Run, data: Data, model: nn.Module) -> dict[str, Any]:
    """Trains by AdamW with a linear warm-up of a tenth and a cosine to 0, and returns the scores of the weights that
    are most accurate in validation, and the curve.
    """
    fold = data.folds[run.fold]
    examples = data.examples(fold.train)
    steps = -(-len(examples) // run.batch_size) * run.epochs
    options = {"max_steps": steps, "warmup_steps": steps // 10, "weight_decay": 0.01}
    options["metric_for_best_model"] = "eval_accuracy"
    parts = {"train_dataset": examples, "eval_dataset": data.examples(fold.valid)}
    parts |= {"data_collator": collate, "compute_metrics": accuracy}
    parts |= {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    trainer = fit(run, model, max(1, steps // run.evaluations), options, **parts)
    curve = pd.DataFrame(trainer.state.log_history).groupby("step")[COLUMNS].first().dropna().round(DECIMALS)
    scores = {
        "valid": trainer.state.best_metric,
        "test": trainer.predict(data.examples(fold.test)).metrics["test_accuracy"],
        "best_epoch": trainer.state.best_global_step * run.epochs / steps,
    }
    return {name: round(x, DECIMALS) for name, x in scores.items()} | {"curve": curve.to_numpy().tolist()}


def make_run(run: Run, data: Data, output: Path) -> Record:
    """Returns the record of the run, which is made unless the folder has it."""
    config = config_of(run.model, data.classes, run.shape, run.settings)

    def make() -> dict[str, Any]:
        model = build_model(run.model, config, data.max_tokens)
        sizes = {"parameters": num_trained(model)}
        sizes["sequences"] = dict(zip(Fold._fields, map(len, data.folds[run.fold]), strict=True))
        return sizes | train(run, data, model)

    return record_run("dna", run, config, make, output)


def make_runs(args: Namespace, data: dict[str, Data]) -> list[Run]:
    """Makes each model's run on the first fold of each file at the first rate with the first seed.

    Raises ValueError for a model that cannot be built.
    """
    settings, runs = check_options(args), []
    shared = {"shape": {name: getattr(args, name) for name in SHAPE}, "seed": args.seeds[0], "fold": 0}
    shared["learning_rate"] = args.learning_rates[0]
    for (name, of_file), model in product(data.items(), args.models):
        titans = model.removesuffix(MEMORY_OFF) in VARIANTS
        own = {"row": f"{model}-{args.label}" if titans and args.label else model, "model": model}
        own |= {"settings": settings if titans else {}, "data": name, "digest": of_file.digest}
        runs.append(run := run_of(Run, args, **own, **shared))
        build_model(model, config_of(model, of_file.classes, run.shape, run.settings), of_file.max_tokens)
    return runs


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if not min(args.learning_rates) > 0:
        raise ValueError(f"--learning_rates must be above 0, but has {min(args.learning_rates)}")
    check_options(args, **dict.fromkeys((*SHAPE, "epochs", "evaluations"), 1), folds=2)
    names = [f"{path.resolve().parent.name}-{path.name.split('.')[0]}" for path in args.files]
    if len(set(names)) < len(names):
        raise ValueError(f"two DATA files have the same name: {', '.join(map(str, args.files))}")
    data = {name: read_data(path, args.folds) for name, path in zip(names, args.files, strict=True)}
    for run in make_runs(args, data):
        rates = [replace(run, learning_rate=rate) for rate in args.learning_rates]
        best = max(rates, key=lambda run: make_run(run, data[run.data], args.output)["valid"])
        for seed, fold in product(args.seeds, range(args.folds)):
            make_run(replace(best, seed=seed, fold=fold), data[best.data], args.output)
    print("\n\n".join(tables.make_report(read_records(args.output, "dna"), [])))


if __name__ == "__main__":
    run_command(main)
