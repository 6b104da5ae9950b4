"""Trains one model on one fold of DNA sequences, and scores the weights that are best on the validation part."""

import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from eval.common.git_commit import describe_commit
from eval.common.records import append_record
from eval.dna.folds import Fold
from eval.dna.models import build_model, config_of
from eval.dna.sequences import Sequences, reverse_complement
from eval.dna.tokenizer import make_tokenizer

DECIMALS = 4
COLUMNS = ["epoch", "training loss", "validation loss", "validation accuracy"]


@dataclass(frozen=True)
class Run:
    """All that a run depends on. `digest` is of the data; `row` names the model with its `settings`, which replace
    fields of a Titans' configuration; `shape` has parameters, hidden_size and num_hidden_layers.
    """

    data: str
    digest: str
    row: str
    model: str
    settings: dict[str, Any]
    shape: dict[str, int]
    fold: int
    folds: int
    learning_rate: float
    batch_size: int
    epochs: int
    evaluations: int
    reverse_complement: bool
    seed: int

    @property
    def name(self) -> str:
        """Names the run, and the folder of its model."""
        fold = f"-fold{self.fold}" if self.folds else ""
        return f"{self.data}-{self.row}-lr{self.learning_rate:g}{fold}-seed{self.seed}"


class DataOfRun(NamedTuple):
    """Sequences, their labels' order, and the rows of the three parts."""

    sequences: Sequences
    classes: list[str]
    fold: Fold


class Examples(Dataset):
    """Texts with the number of their class. With `augment`, each is drawn as its reverse complement half of the time,
    by the module `random`, which Trainer seeds.
    """

    def __init__(self, data: DataOfRun, rows: np.ndarray, augment: bool = False):
        self.texts, labels, _ = data.sequences.select(rows)
        self.labels = [data.classes.index(label) for label in labels]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[str, int]:
        text = self.texts[index]
        return reverse_complement(text) if self.augment and random.random() < 0.5 else text, self.labels[index]


class ProgressPrinter(TrainerCallback):
    """Keeps a row of COLUMNS of every evaluation, and prints it."""

    def __init__(self, name: str, epochs: int):
        self.name, self.epochs, self.curve = name, epochs, []
        self.loss, self.start = float("nan"), time.time()

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.loss = logs.get("loss", self.loss)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        row = [state.epoch, self.loss, metrics["eval_loss"], metrics["eval_accuracy"]]
        self.curve.append([round(float(x), DECIMALS) for x in row])
        seconds = time.time() - self.start
        print(f"{self.name}: epoch {row[0]:.3g}/{self.epochs} accuracy {row[3]:.3f} ({seconds:.0f} s)", flush=True)


def collate(tokenizer: PreTrainedTokenizerFast, examples: list[tuple[str, int]]) -> dict[str, Tensor]:
    """Makes input_ids (B, T) and labels (B,). No mask: padding follows what a causal model classifies by."""
    texts, labels = zip(*examples, strict=True)
    ids = tokenizer(list(texts), padding=True, return_attention_mask=False, return_tensors="pt").input_ids
    return {"input_ids": ids, "labels": torch.tensor(labels)}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Computes the share of sequences whose class is predicted."""
    return {"accuracy": float(np.mean(prediction.predictions == prediction.label_ids))}


def training_arguments(run: Run, number: int, folder: str) -> TrainingArguments:
    """Makes AdamW with a linear warm-up of a tenth and a cosine to 0; keeps the most accurate weights in validation."""
    steps = -(-number // run.batch_size) * run.epochs
    every = max(1, steps // run.evaluations)
    return TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=run.batch_size,
        per_device_eval_batch_size=4 * run.batch_size,
        learning_rate=run.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        weight_decay=0.01,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=every,
        logging_steps=every,
        logging_nan_inf_filter=False,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_accuracy",
        label_names=["labels"],
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
        seed=run.seed,
        report_to=[],
        disable_tqdm=not sys.stderr.isatty(),
    )


def train(run: Run, data: DataOfRun, model: nn.Module, save: Path | None) -> tuple[dict[str, Any], list[list[float]]]:
    """Trains, and returns the scores of the best weights and the curve; saves model and tokenizer in `save`."""
    tokenizer, progress = make_tokenizer(), ProgressPrinter(run.name, run.epochs)
    examples = Examples(data, data.fold.train, run.reverse_complement)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            training_arguments(run, len(examples), folder),
            data_collator=lambda batch: collate(tokenizer, batch),
            train_dataset=examples,
            eval_dataset=Examples(data, data.fold.valid),
            processing_class=tokenizer,
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            callbacks=[progress],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        test = trainer.predict(Examples(data, data.fold.test)).metrics["test_accuracy"]
        step = int(trainer.state.best_model_checkpoint.rpartition("-")[2])
        if save is not None and isinstance(model, PreTrainedModel):
            trainer.save_model(str(save))
    scores = {"valid": trainer.state.best_metric, "test": test}
    best_epoch = round(step * run.epochs / trainer.state.max_steps, DECIMALS)
    return {name: round(x, DECIMALS) for name, x in scores.items()} | {"best_epoch": best_epoch}, progress.curve


def make_run(run: Run, data: DataOfRun, output: Path, save: bool = False) -> dict[str, Any]:
    """Trains, scores and adds the record, which it returns, to the file `output`; nothing is written before the end."""
    start = time.time()
    config = config_of(run.model, data.classes, run.shape, run.settings)
    set_seed(run.seed)
    model = build_model(run.model, config, max(map(len, data.sequences.texts)) + 1)
    scores, curve = train(run, data, model, output.parent / run.name if save else None)
    record = {
        "benchmark": "dna",
        "name": run.name,
        "run": asdict(run),
        "config": config.to_diff_dict(),
        "parameters": sum(x.numel() for x in model.parameters()),
        "sequences": dict(zip(Fold._fields, map(len, data.fold), strict=True)),
        **scores,
        "curve": curve,
        "commit": describe_commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "minutes": round((time.time() - start) / 60, 2),
    }
    append_record(record, output)
    return record
