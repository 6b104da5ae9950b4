"""Trains one model on one task of MAD, and measures its accuracy as it learns."""

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import (
    EvalPrediction,
    PreTrainedConfig,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from eval.common.graph_trainer import GraphTrainer
from eval.common.records import append_record
from eval.mad.models import build, config_of
from eval.mad.tasks import IGNORED, TASKS, Sequences, Settings

HELD_OUT = 1_280
LAST_RATE = 1e-6
LEAST = {"vocab_size": 2, "length": 1, "train_sequences": 1, "motif": 1}  # of a task's settings; 0 of the others
DECIMALS = 4


@dataclass(frozen=True)
class Run:
    """All that a run depends on. `data` is the task; `row` names the model with its `settings`, which replace fields of
    its config.
    """

    data: str
    row: str
    model: str
    settings: dict[str, Any]
    learning_rate: float
    seed: int
    epochs: int
    evaluate_every: int
    weight_decay: float
    batch_size: int
    bf16: bool
    task_settings: dict[str, Any]

    @property
    def name(self) -> str:
        """Names the run."""
        decay = f"-decay{self.weight_decay:g}" if self.weight_decay else ""
        return f"{self.data}-{self.row.replace(' ', '-')}-lr{self.learning_rate:g}{decay}-seed{self.seed}"


class SequenceDataset(Dataset):
    """Sequences whose batches are made at once."""

    def __init__(self, sequences: Sequences):
        self.input_ids, self.labels = map(torch.from_numpy, sequences)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids[indices], "labels": self.labels[indices]}


class ProgressPrinter(TrainerCallback):
    """Keeps [epoch, validation accuracy, test accuracy, training loss] of every evaluation, and prints it."""

    def __init__(self, name: str, epochs: int):
        self.name, self.epochs, self.curve = name, epochs, []
        self.loss, self.validation, self.start = float("nan"), float("nan"), time.time()

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.loss = logs.get("loss", self.loss)

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if "eval_validation_accuracy" in metrics:
            self.validation = metrics["eval_validation_accuracy"]
            return
        epoch, test = round(state.epoch), metrics["eval_test_accuracy"]
        self.curve.append([epoch, *(round(float(x), DECIMALS) for x in (self.validation, test, self.loss))])
        seconds = time.time() - self.start
        print(f"{self.name}: epoch {epoch}/{self.epochs} accuracy {test:.3f} ({seconds:.0f} s)", flush=True)


def labelled_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Computes the mean cross entropy of the logits (B, T, V) at the positions that have a label."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Computes the share of labels that are predicted, over all positions that have one."""
    counted = prediction.label_ids != IGNORED
    return {"accuracy": float(np.mean(prediction.predictions[counted] == prediction.label_ids[counted]))}


def settings_of(run: Run) -> Settings:
    """Returns the task's baseline settings with the run's replacements.

    Raises ValueError for unknown names and for values of another type.
    """
    settings = asdict(TASKS[run.data].settings)
    for name, value in run.task_settings.items():
        if name not in settings:
            raise ValueError(f"--task_set {name}: a task has only {', '.join(settings)}")
        kind = type(settings[name])
        least = LEAST.get(name, 0)
        if type(value) not in {int, kind} or value < least:
            raise ValueError(f"--task_set {name} must be {kind.__name__} and at least {least}, but is {value!r}")
        if kind is float and value >= 1:
            raise ValueError(f"--task_set {name} is a share and must be below 1, but is {value!r}")
    return Settings(**settings | run.task_settings)


def config_for(run: Run) -> PreTrainedConfig:
    """Makes the config of the run's model; raises ValueError as `settings_of` and `config_of` do."""
    return config_of(run.model, settings_of(run).vocab_size, run.settings)


def make_data(run: Run, settings: Settings) -> tuple[Sequences, dict[str, Sequences]]:
    """Draws the training sequences, and those of validation and test, from the run's seed: the same for all models."""
    make = TASKS[run.data].make
    generators = np.random.default_rng(run.seed).spawn(3)
    train = make(generators[0], settings, settings.train_sequences, False)
    held_out = zip(("validation", "test"), generators[1:], strict=True)
    return train, {name: make(rng, settings, HELD_OUT, True) for name, rng in held_out}


def training_arguments(run: Run, steps_per_epoch: int, folder: str) -> TrainingArguments:
    """Makes AdamW with a cosine from the rate to LAST_RATE, as in MAD."""
    return TrainingArguments(
        output_dir=folder,
        num_train_epochs=run.epochs,
        per_device_train_batch_size=run.batch_size,
        per_device_eval_batch_size=run.batch_size,
        learning_rate=run.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": LAST_RATE},
        weight_decay=run.weight_decay,
        adam_beta2=0.98,
        bf16=run.bf16,
        use_cpu=not torch.cuda.is_available(),
        seed=run.seed,
        eval_strategy="steps",
        eval_steps=run.evaluate_every * steps_per_epoch,
        logging_steps=run.evaluate_every * steps_per_epoch,
        logging_nan_inf_filter=False,
        save_strategy="no",
        remove_unused_columns=False,
        label_names=["labels"],
        report_to=[],
        disable_tqdm=True,
    )


def train(run: Run, output: Path, commit: str, graph: bool = False) -> None:
    """Trains, and adds the record to the file `output`; nothing is written before the run has finished.

    With `graph`, on a GPU, the steps are replays of a CUDA graph.
    """
    settings, task, start = settings_of(run), TASKS[run.data], time.time()
    training, held_out = make_data(run, settings)
    set_seed(run.seed)
    config = config_for(run)
    model = build(config, settings, task.auto_encoder)
    progress = ProgressPrinter(run.name, run.epochs)
    with tempfile.TemporaryDirectory() as folder:
        trainer = (GraphTrainer if graph else Trainer)(
            model,
            training_arguments(run, -(-len(training.labels) // run.batch_size), folder),
            data_collator=lambda batch: batch,
            train_dataset=SequenceDataset(training),
            eval_dataset={name: SequenceDataset(x) for name, x in held_out.items()},
            compute_loss_func=labelled_loss,
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
            callbacks=[progress],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    record = {
        "benchmark": "mad",
        "name": run.name,
        "run": asdict(run),
        "config": config.to_diff_dict(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": progress.curve,
        "graph": graph,
        "commit": commit,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "minutes": round((time.time() - start) / 60, 2),
    }
    append_record(record, output)
