"""Trains a small model by Trainer, with an early end and the best weights."""

import sys
import tempfile
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments


def fit(
    run: Any, model: nn.Module, every: int, options: dict[str, Any], trainer: type[Trainer] = Trainer, **parts: Any
) -> Trainer:
    """Trains with an evaluation `every` so many steps, and leaves the model with its best weights.

    `run` has `learning_rate`, `batch_size` and `seed`. `options` replace TrainingArguments, `parts` are of the Trainer.
    """
    shared = dict(
        per_device_train_batch_size=run.batch_size,
        per_device_eval_batch_size=4 * run.batch_size,
        learning_rate=run.learning_rate,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=every,
        logging_steps=every,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=every,
        save_total_limit=1,
        load_best_model_at_end=True,
        remove_unused_columns=False,
        label_names=["labels"],
        use_cpu=not torch.cuda.is_available(),
        seed=run.seed,
        report_to=[],
        disable_tqdm=not sys.stderr.isatty(),
    )
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(model, TrainingArguments(folder, **shared | options), **parts)
        made.remove_callback(PrinterCallback)
        made.train()
    return made


def best_step(trainer: Trainer) -> int | None:
    """Returns the step of the best weights; None where no evaluation was a number."""
    checkpoint = trainer.state.best_model_checkpoint
    return None if checkpoint is None else int(checkpoint.rpartition("-")[2])
