"""Models that forecast time series: Titans, PatchTST of transformers, and a linear one."""

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PatchTSTConfig, PatchTSTForPrediction

from eval.common.compared_models import check_fields, named_errors
from titans_hf import TitansForTimeSeriesPrediction, TitansTimeSeriesConfig
from titans_hf.time_series_titans import LearnedCycle

EPSILON = 1e-5
# PatchTST as published for ETTh1 and ETTh2: patches of 16 in steps of 8, 3 layers of width 16.
PATCHTST = dict(num_hidden_layers=3, d_model=16, num_attention_heads=4, ffn_dim=128, pooling_type=None, scaling="std")
PATCHTST |= dict(positional_dropout=0.3, path_dropout=0.3, ff_dropout=0.3, attention_dropout=0.0)


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
    """PatchTST of transformers."""

    def __init__(self, task: ForecastTask):
        super().__init__(task)
        patch = min(16, task.look_back // 2)
        lengths = dict(context_length=task.look_back, patch_length=patch, patch_stride=max(1, patch // 2))
        lengths |= dict(prediction_length=task.horizon, num_input_channels=task.num_channels)
        self.model = PatchTSTForPrediction(PatchTSTConfig(**lengths, **PATCHTST))

    def forecast(self, past_values):
        return self.model(past_values=past_values).prediction_outputs


BASELINES = {"patchtst": PatchTST, "rlinear": RLinear}
NAMES = ("titans", "titans-off", *BASELINES)


def build_model(name: str, task: ForecastTask, settings: dict[str, Any]) -> nn.Module:
    """Builds a model with random weights; `settings` are fields of the configuration of a Titans.

    Raises ValueError for a setting that is not possible.
    """
    if name in BASELINES:
        return BASELINES[name](task)
    check_fields("TitansTimeSeriesConfig", TitansTimeSeriesConfig(), settings)
    fields = {"context_length": task.look_back} | settings | ({"memory_max_lr": 0} if name == "titans-off" else {})
    fields |= dict(prediction_length=task.horizon, cycle_length=task.cycle_length, num_input_channels=task.num_channels)
    with named_errors(f"--set for {name}"):
        return TitansForTimeSeriesPrediction(TitansTimeSeriesConfig(**fields))
