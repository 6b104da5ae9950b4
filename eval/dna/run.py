"""Trains models to classify the DNA sequences of files, each cross-validated in itself.

    python -m eval.dna.run human_nontata_promoters/test.tsv --output results/dna

The learning rate of a model is chosen on the first fold with the first seed; all folds and seeds use it. A finished
run is kept: the same command again goes on with the next one.
"""

import hashlib
from argparse import Namespace
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction, set_seed

from eval.common import harness
from eval.common.compared_models import VARIANTS, num_trained
from eval.common.harness import check_options, make_parser, record_run, run_of
from eval.common.records import read_records
from eval.dna import tables
from eval.dna.folds import Fold, make_folds
from eval.dna.models import MEMORY_OFF, NAMES, build_model
from eval.dna.sequences import PAD, read_sequences, tokenize
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.fitting import fit

DEFAULT_MODELS = ("lmm", "lmm" + MEMORY_OFF, "mag", "mag" + MEMORY_OFF, "llama", "mamba2", "cnn")
# Of every model but the CNN; Mamba2 has more layers.
SHAPE = {"parameters": 30_000, "hidden_size": 32, "num_hidden_layers": 2}
EVALUATIONS = 10  # of a training


@dataclass(frozen=True, kw_only=True)
class Run(harness.Run):
    """`digest` is of the data; `shape` has the fields of SHAPE."""

    digest: str
    shape: dict[str, int]
    fold: int
    folds: int
    epochs: int

    @property
    def name(self) -> str:
        return f"{self.data}-{self.row}-lr{self.learning_rate:g}-fold{self.fold}-seed{self.seed}"


class Data(NamedTuple):
    """The labelled sequences of a file, the labels in order, the folds, and the SHA-256 of the file."""

    examples: list[dict[str, Any]]
    classes: list[str]
    folds: list[Fold]
    digest: str

    def build_model(self, run: Run) -> torch.nn.Module:
        """Builds the model of a run, for sequences as long as the longest. Raises what `build_model` does."""
        longest = max(len(x["seq"]) for x in self.examples) + 1
        return build_model(run.model, self.classes, longest, run.shape, run.settings)


def parse_args(argv: list[str] | None) -> Namespace:
    parser = make_parser(__doc__, NAMES, DEFAULT_MODELS, batch_size=16)
    parser.add_argument("files", nargs="+", type=Path, metavar="DATA")
    for name, number in {"folds": 5, "epochs": 10, **SHAPE}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[1e-3, 3e-3])
    return parser.parse_args(argv)


def read_data(path: Path, folds: int) -> Data:
    """Reads and splits a file. Raises ValueError for one class, and as `read_sequences` and `make_folds` do."""
    sequences = read_sequences(path)
    classes = sorted(sequences["label"].unique())
    if len(classes) < 2:
        raise ValueError(f"{path} has one class only: {classes[0]}")
    examples = sequences.assign(labels=sequences["label"].map(classes.index))[["seq", "labels"]].to_dict("records")
    return Data(examples, classes, make_folds(sequences, folds), hashlib.sha256(path.read_bytes()).hexdigest()[:12])


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


def train(run: Run, data: Data) -> dict[str, float]:
    """Trains by AdamW with a linear warm-up of a tenth and a cosine to 0; returns the accuracies of the weights that
    are most accurate in validation.
    """
    training, valid, test = ([data.examples[i] for i in rows] for rows in data.folds[run.fold])
    model, steps = data.build_model(run), -(-len(training) // run.batch_size) * run.epochs
    options = {"max_steps": steps, "warmup_steps": steps // 10, "weight_decay": 0.01}
    options["metric_for_best_model"] = "eval_accuracy"
    parts = {"train_dataset": training, "eval_dataset": valid, "data_collator": collate, "compute_metrics": accuracy}
    parts["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    trainer = fit(run, model, max(1, steps // EVALUATIONS), options, **parts)
    test_accuracy = trainer.predict(test).metrics["test_accuracy"]
    scores = {"valid": trainer.state.best_metric, "test": test_accuracy}
    return {"parameters": num_trained(model), **{name: round(x, 4) for name, x in scores.items()}}


def choose_rate(run: Run, rates: list[float], data: Data, output: Path) -> Run:
    """Returns the run at the rate of the row's finished runs, else at the one that is best in validation."""
    for record in read_records(output, "dna"):
        if (record["run"]["data"], record["run"]["row"]) == (run.data, run.row):
            return replace(run, learning_rate=record["run"]["learning_rate"])

    def score(at_rate: Run) -> float:
        set_seed(run.seed)
        return train(at_rate, data)["valid"]

    runs = [replace(run, learning_rate=rate) for rate in rates]
    return max(runs, key=score) if len(runs) > 1 else runs[0]


def make_runs(args: Namespace, data: dict[str, Data]) -> list[Run]:
    """Makes each model's run on the first fold of each file with the first seed.

    Raises ValueError for a model that cannot be built.
    """
    settings, runs = check_options(args, **dict.fromkeys((*SHAPE, "epochs"), 1)), []
    shared = {"shape": {name: getattr(args, name) for name in SHAPE}, "seed": args.seeds[0], "fold": 0}
    for (name, of_file), model in product(data.items(), args.models):
        titans = model.removesuffix(MEMORY_OFF) in VARIANTS
        own = {"row": f"{model}-{args.label}" if titans and args.label else model, "model": model}
        own |= {"settings": settings if titans else {}, "data": name, "digest": of_file.digest}
        runs.append(run_of(Run, args, **own, **shared, learning_rate=args.learning_rates[0]))
        of_file.build_model(runs[-1])
    return runs


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if not min(args.learning_rates) > 0:
        raise ValueError(f"--learning_rates must be above 0, but has {min(args.learning_rates)}")
    check_options(args, folds=2)
    names = [f"{path.resolve().parent.name}-{path.name.split('.')[0]}" for path in args.files]
    data = {name: read_data(path, args.folds) for name, path in zip(names, args.files, strict=True)}
    for first in make_runs(args, data):
        of_file = data[first.data]
        best = choose_rate(first, args.learning_rates, of_file, args.output)
        for seed, fold in product(args.seeds, range(args.folds)):
            run = replace(best, seed=seed, fold=fold)
            record_run("dna", run, lambda run=run, of_file=of_file: train(run, of_file), args.output)
    print("\n\n".join(tables.make_report(read_records(args.output, "dna"), [])))


if __name__ == "__main__":
    run_command(main)
