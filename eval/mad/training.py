"""Trains one model on one task of MAD, and measures its accuracy as it learns."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import PreTrainedConfig, Trainer

from eval.common import harness
from eval.common.compared_models import num_trained
from eval.common.cuda_graphs import GraphTrainer
from eval.common.harness import IGNORED, fit_classifier, record_run
from eval.common.records import Record
from eval.mad.models import build, config_of
from eval.mad.tasks import TASKS, Sequences, Settings

HELD_OUT = 1_280
LAST_RATE = 1e-6
COLUMNS = ("eval_validation_accuracy", "eval_test_accuracy", "loss")  # of a curve, after the epoch


@dataclass(frozen=True, kw_only=True)
class Run(harness.Run):
    """`data` is the task, whose settings `task_settings` replaces."""

    epochs: int
    evaluate_every: int
    weight_decay: float
    bf16: bool
    task_settings: dict[str, Any]

    @property
    def name(self) -> str:
        decay = f"-decay{self.weight_decay:g}" if self.weight_decay else ""
        return f"{self.data}-{self.row.replace(' ', '-')}-lr{self.learning_rate:g}{decay}-seed{self.seed}"


class SequenceDataset(Dataset):
    """Sequences, of which a whole batch is taken as one tensor."""

    def __init__(self, sequences: Sequences):
        self.input_ids, self.labels = map(torch.from_numpy, sequences)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids[indices], "labels": self.labels[indices]}


def labelled_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Computes the mean cross entropy of the logits (B, T, V) at the positions that have a label."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


def settings_of(run: Run) -> Settings:
    """Returns the task's baseline settings with the run's replacements; raises TypeError for unknown names."""
    return replace(TASKS[run.data].settings, **run.task_settings)


def config_for(run: Run) -> PreTrainedConfig:
    """Makes the config of the run's model; raises ValueError as `config_of` does."""
    return config_of(run.model, settings_of(run).vocab_size, run.settings)


def make_data(run: Run, settings: Settings) -> tuple[Sequences, dict[str, Sequences]]:
    """Draws the sequences of training, validation and test from the run's seed: the same for all models."""
    make = TASKS[run.data].make
    generators = np.random.default_rng(run.seed).spawn(3)
    train = make(generators[0], settings, settings.train_sequences, False)
    held_out = zip(("validation", "test"), generators[1:], strict=True)
    return train, {name: make(rng, settings, HELD_OUT, True) for name, rng in held_out}


def train(run: Run, output: Path, graph: bool = False) -> Record:
    """Trains, as in MAD by AdamW with a cosine from the rate to LAST_RATE, unless the folder `output` has the record.

    With `graph`, on a GPU, the steps are replays of a CUDA graph.
    """
    settings, config = settings_of(run), config_for(run)
    options = dict(
        num_train_epochs=run.epochs,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": LAST_RATE},
        weight_decay=run.weight_decay,
        adam_beta2=0.98,
        bf16=run.bf16,
        save_strategy="no",
        load_best_model_at_end=False,
        disable_tqdm=True,
    )

    def make() -> dict[str, Any]:
        training, held_out = make_data(run, settings)
        model = build(run.model, config, settings, TASKS[run.data].auto_encoder)
        parts = {"train_dataset": SequenceDataset(training), "data_collator": lambda batch: batch}
        parts["eval_dataset"] = {name: SequenceDataset(x) for name, x in held_out.items()}
        parts |= {"compute_loss_func": labelled_loss, "trainer": GraphTrainer if graph else Trainer}
        every = run.evaluate_every * -(-len(training.labels) // run.batch_size)
        _, curve = fit_classifier(run, model, every, COLUMNS, options, **parts)
        return {"parameters": num_trained(model), "curve": curve, "graph": graph}

    return record_run("mad", run, config, make, output)
