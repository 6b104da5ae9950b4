"""Models that forecast time series: Titans, PatchTST of transformers, and linear ones of a few lines."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PatchTSTConfig, PatchTSTForPrediction

from titans_hf import TitansForTimeSeriesPrediction, TitansTimeSeriesConfig

NAMES = ("titans", "titans-stopped", "patchtst", "rlinear", "dlinear", "repeat-last")
EPSILON = 1e-5


class Forecaster(nn.Module):
    """A model without a configuration, called like those of transformers; `forecast` is its function."""

    def forecast(self, past_values: Tensor) -> Tensor:
        """Forecasts (B, horizon, C) from past_values (B, look_back, C)."""
        raise NotImplementedError

    def forward(self, past_values: Tensor, future_values: Tensor | None = None) -> dict[str, Tensor]:
        """Returns `prediction_outputs` and, where the future is given, `loss`, the mean squared error."""
        forecast = self.forecast(past_values)
        loss = {} if future_values is None else {"loss": nn.functional.mse_loss(forecast, future_values)}
        return loss | {"prediction_outputs": forecast}


class RepeatLast(Forecaster):
    """Forecasts the last value."""

    def __init__(self, look_back: int, horizon: int):
        super().__init__()
        self.horizon = horizon

    def forecast(self, past_values):
        return past_values[:, -1:].expand(-1, self.horizon, -1)


class RLinear(Forecaster):
    """One linear map for all channels, of values normalised by the window's mean and standard deviation."""

    def __init__(self, look_back: int, horizon: int):
        super().__init__()
        self.linear = nn.Linear(look_back, horizon)

    def forecast(self, past_values):
        mean = past_values.mean(1, keepdim=True)
        std = (past_values.var(1, keepdim=True, correction=0) + EPSILON).sqrt()
        return self.linear(((past_values - mean) / std).mT).mT * std + mean


class DLinear(Forecaster):
    """The sum of two linear maps for all channels: of a moving average over 25 values, and of what is left."""

    KERNEL = 25

    def __init__(self, look_back: int, horizon: int):
        super().__init__()
        self.trend, self.rest = nn.Linear(look_back, horizon), nn.Linear(look_back, horizon)
        for linear in (self.trend, self.rest):  # a mean at first
            nn.init.constant_(linear.weight, 1 / look_back)

    def forecast(self, past_values):
        x = past_values.mT
        trend = nn.functional.avg_pool1d(nn.functional.pad(x, 2 * (self.KERNEL // 2,), "replicate"), self.KERNEL, 1)
        return (self.trend(trend) + self.rest(x - trend)).mT


SIMPLE = {"rlinear": RLinear, "dlinear": DLinear, "repeat-last": RepeatLast}
# As published for ETTh1 and ETTh2: 3 layers of width 16, dropout 0.3, and patches of 16 in steps of 8 (below).
PATCHTST = dict(
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


def build_model(name: str, num_channels: int, look_back: int, horizon: int, settings: dict[str, Any]) -> nn.Module:
    """Builds a model with random weights; `settings` are fields of a Titans' configuration.

    Raises ValueError, or huggingface_hub's `StrictDataclassError`, for a setting that is not possible.
    """
    if name in SIMPLE:
        return SIMPLE[name](look_back, horizon)
    if name == "patchtst":
        patch = min(16, look_back // 2)
        lengths = {"context_length": look_back, "patch_length": patch, "patch_stride": max(1, patch // 2)}
        lengths["prediction_length"] = horizon
        return PatchTSTForPrediction(PatchTSTConfig(num_input_channels=num_channels, **lengths, **PATCHTST))
    unknown = settings.keys() - TitansTimeSeriesConfig().to_dict().keys()
    if unknown:
        raise ValueError(f"--set {', '.join(sorted(unknown))}: no field of TitansTimeSeriesConfig")
    stopped = {"memory_max_lr": 0} if name == "titans-stopped" else {}
    fields = {"context_length": look_back} | settings | stopped
    return TitansForTimeSeriesPrediction(TitansTimeSeriesConfig(prediction_length=horizon, **fields))


def count_parameters(model: nn.Module) -> int:
    """Returns the number of trained parameters."""
    return sum(x.numel() for x in model.parameters() if x.requires_grad)


@torch.inference_mode()
def forecasts(model: nn.Module, past_values: Tensor) -> Tensor:
    """Returns the forecast (B, horizon, C) of any of the models."""
    return model(past_values=past_values)["prediction_outputs"]
