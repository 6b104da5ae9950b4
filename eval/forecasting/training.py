"""Trains one model to forecast one series, stops early by its validation part, and scores it on the test part."""

import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    PreTrainedConfig,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from eval.common.git_commit import describe_commit
from eval.common.records import append_record
from eval.forecasting.data import Series, Splits, Windows, make_splits
from eval.forecasting.models import ForecastTask, build_model, config_of, count_parameters, forecasts

DECIMALS = 5
LAST_BATCHES = (32, 64, 128, 256, 512)  # sizes of batches, of which published code may drop the last one
EXAMPLES = "examples.jsonl"  # beside the runs: a forecast of each, for the plots
INPUTS = ("past_values", "cycle_position")


@dataclass(frozen=True)
class Run:
    """All that a run depends on. `digest` is of the series; `row` names the model with its settings; `settings` are
    fields of a Titans' configuration.
    """

    data: str
    digest: str
    row: str
    model: str
    settings: dict[str, Any]
    look_back: int
    horizon: int
    cycle_length: int
    loss: str
    seed: int
    split: list[float]
    learning_rate: float
    batch_size: int
    max_steps: int
    eval_steps: int
    patience: int

    @property
    def name(self) -> str:
        """Names the run."""
        return f"{self.data}-{self.look_back}-{self.horizon}-{self.row}-seed{self.seed}"

    def task(self, num_channels: int) -> ForecastTask:
        """Returns what every model gets."""
        return ForecastTask(num_channels, self.look_back, self.horizon, self.cycle_length, self.loss)

    def config(self, num_channels: int) -> PreTrainedConfig | None:
        """Makes the configuration of the run's Titans; the baselines have none."""
        return config_of(self.model, self.task(num_channels), self.settings)

    def build_model(self, num_channels: int) -> nn.Module:
        """Builds the run's model with random weights; raises ValueError for settings that are not possible."""
        return build_model(self.model, self.task(num_channels), self.settings)


class Scores(NamedTuple):
    """Mean squared and mean absolute error over all windows, values and channels, scaled as in training."""

    mse: float
    mae: float


def window_errors(
    model: nn.Module, windows: Windows, batch_size: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Forecasts every window, in batches the last of which may be smaller; returns each one's mean squared and mean
    absolute error: (N, 2), float64.
    """
    model.eval()
    errors = []
    for batch in torch.utils.data.DataLoader(windows, batch_size):
        forecast = forecasts(model, *(batch[name].to(device) for name in INPUTS)).cpu()
        error = (forecast - batch["future_values"]).double().flatten(1)
        errors.append(torch.stack([error.square().mean(1), error.abs().mean(1)], dim=1))
    return torch.cat(errors)


def mean_scores(errors: torch.Tensor) -> Scores:
    """Averages the errors (N, 2) of windows."""
    return Scores(*errors.mean(0).tolist())


def scores_without_last_batch(errors: torch.Tensor) -> dict[str, Scores]:
    """Averages the errors (N, 2) of the windows that fill batches of each size, in the order of time: what is left over
    is not counted. Sizes above N have no score.
    """
    counted = {size: len(errors) // size * size for size in LAST_BATCHES}
    return {str(size): mean_scores(errors[:count]) for size, count in counted.items() if count}


def example(model: nn.Module, windows: Windows, device: torch.device | str) -> dict[str, list[float]]:
    """Forecasts the last channel of the window in the middle: what was measured before and after, and the forecast."""
    window = windows[len(windows) // 2]
    forecast = forecasts(model, *(window[name][None].to(device) for name in INPUTS))[0].cpu()
    before = window["past_values"][-windows.horizon :]
    parts = {"before": before, "after": window["future_values"], "forecast": forecast}
    return {name: [round(x, 2) for x in part[:, -1].tolist()] for name, part in parts.items()}


def training_arguments(run: Run, folder: str) -> TrainingArguments:
    """Makes AdamW without weight decay and a cosine to 0; keeps the model of the lowest validation loss."""
    return TrainingArguments(
        output_dir=folder,
        max_steps=run.max_steps,
        per_device_train_batch_size=run.batch_size,
        per_device_eval_batch_size=4 * run.batch_size,
        learning_rate=run.learning_rate,
        lr_scheduler_type="cosine",
        weight_decay=0.0,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=run.eval_steps,
        save_strategy="steps",
        save_steps=run.eval_steps,
        save_total_limit=1,
        logging_strategy="no",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        prediction_loss_only=True,
        label_names=["future_values"],
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
        seed=run.seed,
        report_to=[],
        disable_tqdm=not sys.stderr.isatty(),
    )


def train(model: nn.Module, run: Run, splits: Splits) -> tuple[int, torch.device]:
    """Trains the model and leaves it with its best weights; returns the step they are of, and the device."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            training_arguments(run, folder),
            train_dataset=splits.train,
            eval_dataset=splits.valid,
            callbacks=[EarlyStoppingCallback(run.patience)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        if trainer.state.best_model_checkpoint is None:
            raise ValueError(f"{run.name}: no validation loss was a number: give a lower --learning_rate")
        return int(trainer.state.best_model_checkpoint.rpartition("-")[2]), trainer.args.device


def rounded(scores: Scores) -> dict[str, float]:
    """Returns the scores by name, with the decimals of a record."""
    return {name: round(x, DECIMALS) for name, x in scores._asdict().items()}


def make_run(run: Run, series: Series, output: Path) -> dict[str, Any]:
    """Trains, scores and adds the record, which it returns, to the file `output`; nothing is written before the end.
    The example forecast goes to the file EXAMPLES beside it.
    """
    start = time.time()
    splits = make_splits(series, run.split, run.look_back, run.horizon)
    set_seed(run.seed)
    model, config = run.build_model(len(series.names)), run.config(len(series.names))
    if model.cycle is not None:
        model.cycle.fit(splits.train.values[: splits.train.rows.stop])
    parameters, best_step, device = count_parameters(model), 0, torch.device("cpu")
    if parameters:
        best_step, device = train(model, run, splits)
    valid, test = (window_errors(model, part, 4 * run.batch_size, device) for part in (splits.valid, splits.test))
    record = {
        "benchmark": "forecasting",
        "name": run.name,
        "run": asdict(run),
        "config": None if config is None else config.to_diff_dict(),
        "parameters": parameters,
        "best_step": best_step,
        "valid": rounded(mean_scores(valid)),
        "test": rounded(mean_scores(test)),
        "test_without_last_batch": {size: rounded(x) for size, x in scores_without_last_batch(test).items()},
        "windows": [len(part) for part in splits[:3]],
        "commit": describe_commit(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "minutes": round((time.time() - start) / 60, 2),
    }
    shown = {"channel": series.names[-1], **example(model, splits.test, device)}
    append_record({"name": run.name} | shown, output.with_name(EXAMPLES))
    append_record(record, output)
    return record
