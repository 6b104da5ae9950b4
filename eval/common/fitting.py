"""Trains a small model by Trainer, with early stopping and the best weights."""

import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments


def fit(run: Any, model: nn.Module, every: int, options: dict[str, Any], **parts: Any) -> Trainer:
    """Trains with an evaluation after each `every` steps, prints its loss, and leaves the model with its best weights.

    `run` has `learning_rate`, `batch_size` and `seed`. `options` replace TrainingArguments; `parts` are arguments of
    Trainer.
    """
    shared = dict.fromkeys(("eval_strategy", "logging_strategy", "save_strategy"), "steps")
    shared |= dict.fromkeys(("eval_steps", "logging_steps", "save_steps"), every)
    shared |= dict(
        per_device_train_batch_size=run.batch_size,
        per_device_eval_batch_size=4 * run.batch_size,
        learning_rate=run.learning_rate,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        logging_nan_inf_filter=False,
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
        trainer = Trainer(model, TrainingArguments(folder, **shared | options), **parts)
        trainer.train()
    return trainer


def fit_forecaster(run: Any, model: nn.Module, train: Dataset, valid: Dataset) -> Trainer:
    """Trains a model of time series until its validation loss has not fallen for `run.patience` evaluations.

    `run` has `max_steps` and `eval_steps` too. Because a window has all channels, an evaluation takes no more windows
    at once than a training step. Raises ValueError if no validation loss was a number.
    """
    options = {"max_steps": run.max_steps, "weight_decay": 0.0, "metric_for_best_model": "eval_loss"}
    options |= {"prediction_loss_only": True, "label_names": ["future_values"]}
    options["per_device_eval_batch_size"] = run.batch_size
    callbacks = [EarlyStoppingCallback(run.patience)]
    every = min(run.eval_steps, run.max_steps)
    trainer = fit(run, model, every, options, train_dataset=train, eval_dataset=valid, callbacks=callbacks)
    if trainer.state.best_global_step is None:
        raise ValueError(f"no validation loss was a number: give a lower --learning_rate than {run.learning_rate:g}")
    return trainer
