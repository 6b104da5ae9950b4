"""Trains one model to forecast one series, stops early by its validation part, and scores it on the test part."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from eval.common import harness
from eval.common.compared_models import named_errors, num_trained
from eval.common.harness import record_run
from eval.common.records import Record
from eval.forecasting.data import make_splits
from eval.forecasting.models import ForecastTask, build_model, config_of, forecasts
from eval.forecasting.tables import METRICS
from titans_hf.cli.shared.fitting import fit_forecaster
from titans_hf.cli.shared.time_series import Windows

DECIMALS = 5
INPUTS = ("past_values", "cycle_position")


@dataclass(frozen=True, kw_only=True)
class Run(harness.Run):
    """`digest` is of the series; `settings` are fields of a Titans' configuration."""

    digest: str
    look_back: int
    horizon: int
    cycle_length: int
    loss: str
    split: list[float]
    max_steps: int
    eval_steps: int
    patience: int

    @property
    def name(self) -> str:
        return f"{self.data}-{self.look_back}-{self.horizon}-{self.row}-seed{self.seed}"

    def task(self, num_channels: int) -> ForecastTask:
        """Returns the task, the same for all models."""
        return ForecastTask(num_channels, self.look_back, self.horizon, self.cycle_length, self.loss)


def score(model: nn.Module, windows: Windows, batch_size: int, device: torch.device | str = "cpu") -> dict[str, float]:
    """Returns the mean squared and the mean absolute error over all windows, scaled as in training."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in torch.utils.data.DataLoader(windows, batch_size):
        forecast = forecasts(model, *(batch[name].to(device) for name in INPUTS)).cpu()
        error = (forecast - batch["future_values"]).double()
        sums += torch.stack([error.square().sum(), error.abs().sum()])
    means = sums / (len(windows) * windows[0]["future_values"].numel())
    return {name: round(x, DECIMALS) for name, x in zip(METRICS, means.tolist(), strict=True)}


def make_run(run: Run, series: pd.DataFrame, output: Path) -> Record:
    """Trains by AdamW with a cosine to 0, and scores the weights of the lowest validation loss, unless the folder
    `output` has the record.

    Raises ValueError where no validation loss was a number.
    """
    task = run.task(len(series.columns))

    def make() -> dict[str, Any]:
        splits = make_splits(series, run.split, run.look_back, run.horizon)
        model, best, device = build_model(run.model, task, run.settings), 0, torch.device("cpu")
        if model.cycle is not None:
            model.cycle.fit(splits.train.values[: splits.train.rows.stop])
        if parameters := num_trained(model):
            with named_errors(run.name):
                trainer = fit_forecaster(run, model, splits.train, splits.valid)
            best, device = trainer.state.best_global_step, trainer.args.device
        parts = {"valid": splits.valid, "test": splits.test}
        return {
            "parameters": parameters,
            "best_step": best,
            **{name: score(model, part, 4 * run.batch_size, device) for name, part in parts.items()},
            "windows": [len(part) for part in splits[:3]],
        }

    return record_run("forecasting", run, config_of(run.model, task, run.settings), make, output)
