"""Models that forecast time series: Titans, PatchTST of transformers, and linear ones of a few lines."""

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PatchTSTConfig, PatchTSTForPrediction

from eval.common.compared_models import check_fields, named_errors
from titans_hf import TitansForTimeSeriesPrediction, TitansTimeSeriesConfig
from titans_hf.time_series_titans import LearnedCycle

NAMES = ("titans", "titans-off", "patchtst", "rlinear", "repeat-last")
EPSILON = 1e-5


class ForecastTask(NamedTuple):
    """The task of every model: the numbers of channels, of values to read and to forecast, and the length of a learned
    cycle (0 for none).
    """

    num_channels: int
    look_back: int
    horizon: int
    cycle_length: int = 0


class Forecaster(nn.Module):
    """A baseline, called like `TitansForTimeSeriesPrediction`, with its learned cycle; `forecast` is its function."""

    def __init__(self, task: ForecastTask):
        super().__init__()
        self.task = task
        self.cycle = LearnedCycle(task.cycle_length, task.num_channels) if task.cycle_length else None

    def forecast(self, past_values: Tensor) -> Tensor:
        """Forecasts (B, horizon, C) from past_values (B, look_back, C)."""
        raise NotImplementedError

    def forward(
        self, past_values: Tensor, future_values: Tensor | None = None, cycle_position: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns `prediction_outputs` and, where the future is given, `loss`."""
        if self.cycle is None:
            forecast = self.forecast(past_values)
        else:
            look_back = self.task.look_back
            cycle = self.cycle(cycle_position, look_back + self.task.horizon)
            forecast = self.forecast(past_values - cycle[:, :look_back]) + cycle[:, look_back:]
        loss = {} if future_values is None else {"loss": nn.functional.mse_loss(forecast, future_values)}
        return loss | {"prediction_outputs": forecast}


class RepeatLast(Forecaster):
    """Forecasts the last value."""

    def forecast(self, past_values):
        return past_values[:, -1:].expand(-1, self.task.horizon, -1)


class RLinear(Forecaster):
    """One linear map for all channels, of values normalised by the window's mean and standard deviation."""

    def __init__(self, task: ForecastTask):
        super().__init__(task)
        self.linear = nn.Linear(task.look_back, task.horizon)

    def forecast(self, past_values):
        mean = past_values.mean(1, keepdim=True)
        std = (past_values.var(1, keepdim=True, correction=0) + EPSILON).sqrt()
        return self.linear(((past_values - mean) / std).mT).mT * std + mean


class PatchTST(Forecaster):
    """PatchTST of transformers as published for ETTh1 and ETTh2: patches of 16 in steps of 8, 3 layers of width 16."""

    SETTINGS = dict(
        num_hidden_layers=3,
        d_model=16,
        num_attention_heads=4,
        ffn_dim=128,
        positional_dropout=0.3,
        path_dropout=0.3,
        ff_dropout=0.3,
        attention_dropout=0.0,
        pooling_type=None,
        scaling="std",
    )

    def __init__(self, task: ForecastTask):
        super().__init__(task)
        patch = min(16, task.look_back // 2)
        lengths = {"context_length": task.look_back, "patch_length": patch, "patch_stride": max(1, patch // 2)}
        lengths["prediction_length"] = task.horizon
        config = PatchTSTConfig(num_input_channels=task.num_channels, **lengths, **self.SETTINGS)
        self.model = PatchTSTForPrediction(config)

    def forecast(self, past_values):
        return self.model(past_values=past_values).prediction_outputs


BASELINES = {"patchtst": PatchTST, "rlinear": RLinear, "repeat-last": RepeatLast}


def config_of(name: str, task: ForecastTask, settings: dict[str, Any]) -> TitansTimeSeriesConfig | None:
    """Makes the configuration of a Titans, with `settings` as its fields; the baselines have none.

    Raises ValueError for a setting that is not possible.
    """
    if name in BASELINES:
        return None
    check_fields("TitansTimeSeriesConfig", TitansTimeSeriesConfig(), settings)
    of_task = dict(prediction_length=task.horizon, cycle_length=task.cycle_length)
    of_task["num_input_channels"] = task.num_channels
    if given := settings.keys() & of_task.keys():
        raise ValueError(f"--set {', '.join(sorted(given))}: set by the command for all models")
    off = {"memory_max_lr": 0} if name == "titans-off" else {}
    with named_errors(f"--set for {name}"):
        return TitansTimeSeriesConfig(**{"context_length": task.look_back} | settings | off | of_task)


def build_model(name: str, task: ForecastTask, settings: dict[str, Any]) -> nn.Module:
    """Builds a model with random weights; raises what `config_of` does."""
    config = config_of(name, task, settings)
    return BASELINES[name](task) if config is None else TitansForTimeSeriesPrediction(config)
