"""Trains one model on one fold of DNA sequences, and scores the weights that are best on the validation part."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction

from eval.common import harness
from eval.common.compared_models import num_trained
from eval.common.harness import DECIMALS, record_run
from eval.common.records import Record
from eval.dna.folds import Fold
from eval.dna.models import build_model, config_of
from eval.dna.sequences import PAD, reverse_complement, tokenize
from titans_hf.cli.shared.fitting import fit

COLUMNS = ["epoch", "loss", "eval_loss", "eval_accuracy"]  # of a curve


@dataclass(frozen=True, kw_only=True)
class Run(harness.Run):
    """`digest` is of the data; `shape` has parameters, hidden_size and num_hidden_layers."""

    digest: str
    shape: dict[str, int]
    fold: int
    folds: int
    epochs: int
    evaluations: int
    reverse_complement: bool

    @property
    def name(self) -> str:
        fold = f"-fold{self.fold}" if self.folds else ""
        return f"{self.data}-{self.row}-lr{self.learning_rate:g}{fold}-seed{self.seed}"


class DataOfRun(NamedTuple):
    """Sequences, their labels' order, and the rows of the three parts."""

    sequences: pd.DataFrame
    classes: list[str]
    fold: Fold

    def examples(self, rows: np.ndarray, augment: bool = False) -> list[dict[str, Any]]:
        """Returns the examples of some rows; with `augment`, `collate` draws the strand of each."""
        labels = self.sequences["label"].map(self.classes.index)
        return self.sequences[["seq"]].assign(labels=labels, augment=augment).iloc[rows].to_dict("records")


def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Makes input_ids (B, T) and labels (B,). An example to augment is its reverse complement half of the time, as
    the module `random` draws, which Trainer seeds. No mask: padding follows the token by which a model classifies.
    """
    other = [example["augment"] and random.random() < 0.5 for example in examples]
    texts = [reverse_complement(x["seq"]) if turned else x["seq"] for x, turned in zip(examples, other, strict=True)]
    ids = [torch.tensor(tokenize(text)) for text in texts]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=PAD),
        "labels": torch.tensor([example["labels"] for example in examples]),
    }


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Computes the share of right predictions."""
    return {"accuracy": float(np.mean(prediction.predictions == prediction.label_ids))}


def train(run: Run, data: DataOfRun, model: nn.Module) -> dict[str, Any]:
    """Trains by AdamW with a linear warm-up of a tenth and a cosine to 0, and returns the scores of the weights that
    are most accurate in validation, and the curve.
    """
    examples = data.examples(data.fold.train, run.reverse_complement)
    steps = -(-len(examples) // run.batch_size) * run.epochs
    options = {"max_steps": steps, "warmup_steps": steps // 10, "weight_decay": 0.01}
    options["metric_for_best_model"] = "eval_accuracy"
    parts = {"train_dataset": examples, "eval_dataset": data.examples(data.fold.valid)}
    parts |= {"data_collator": collate, "compute_metrics": accuracy}
    parts |= {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    trainer = fit(run, model, max(1, steps // run.evaluations), options, **parts)
    curve = pd.DataFrame(trainer.state.log_history).groupby("step")[COLUMNS].first().dropna().round(DECIMALS)
    test = trainer.predict(data.examples(data.fold.test)).metrics["test_accuracy"]
    scores = {
        "valid": trainer.state.best_metric,
        "test": test,
        "best_epoch": trainer.state.best_global_step * run.epochs / steps,
    }
    return {name: round(x, DECIMALS) for name, x in scores.items()} | {"curve": curve.to_numpy().tolist()}


def make_run(run: Run, data: DataOfRun, output: Path) -> Record:
    """Returns the record of the run, which is made unless the folder has it."""
    config = config_of(run.model, data.classes, run.shape, run.settings)

    def make() -> dict[str, Any]:
        model = build_model(run.model, config, data.sequences["seq"].str.len().max() + 1)
        sizes = {"parameters": num_trained(model)}
        sizes["sequences"] = dict(zip(Fold._fields, map(len, data.fold), strict=True))
        return sizes | train(run, data, model)

    return record_run("dna", run, config, make, output)
