"""Models that forecast time series: Titans, PatchTST of transformers, and a linear one."""

from torch import Tensor, nn
from transformers import PatchTSTConfig, PatchTSTForPrediction

from titans_hf import TitansForTimeSeriesPrediction, TitansTimeSeriesConfig
from titans_hf.time_series_titans import LearnedCycle

# PatchTST as published for ETTh1 and ETTh2: patches of 16 in steps of 8, 3 layers of width 16.
PATCHTST = dict(num_hidden_layers=3, d_model=16, num_attention_heads=4, ffn_dim=128, pooling_type=None, scaling="std")
PATCHTST |= dict(positional_dropout=0.3, path_dropout=0.3, ff_dropout=0.3, attention_dropout=0.0)


class Forecaster(nn.Module):
    """A baseline, made and called like `TitansForTimeSeriesPrediction`, with its learned cycle. It reads
    `context_length` values; `forecast` is its function.
    """

    def __init__(self, config: TitansTimeSeriesConfig):
        super().__init__()
        self.config = config
        self.cycle = LearnedCycle(config.cycle_length, config.num_input_channels) if config.cycle_length else None

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
            look_back = self.config.context_length
            cycle = self.cycle(cycle_position, look_back + self.config.prediction_length)
            forecast = self.forecast(past_values - cycle[:, :look_back]) + cycle[:, look_back:]
        loss = {} if future_values is None else {"loss": nn.functional.mse_loss(forecast, future_values)}
        return loss | {"prediction_outputs": forecast}


class RLinear(Forecaster):
    """One linear map for all channels, of values normalised by the window's mean and standard deviation."""

    def __init__(self, config: TitansTimeSeriesConfig):
        super().__init__(config)
        self.linear = nn.Linear(config.context_length, config.prediction_length)

    def forecast(self, past_values):
        mean = past_values.mean(1, keepdim=True)
        std = (past_values.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
        return self.linear(((past_values - mean) / std).mT).mT * std + mean


class PatchTST(Forecaster):
    """PatchTST of transformers."""

    def __init__(self, config: TitansTimeSeriesConfig):
        super().__init__(config)
        patch = min(16, config.context_length // 2)
        sizes = {x: getattr(config, x) for x in ("context_length", "prediction_length", "num_input_channels")}
        self.model = PatchTSTForPrediction(
            PatchTSTConfig(**sizes, patch_length=patch, patch_stride=patch // 2, **PATCHTST)
        )

    def forecast(self, past_values):
        return self.model(past_values=past_values).prediction_outputs


MODELS = dict.fromkeys(("titans", "titans-off"), TitansForTimeSeriesPrediction)
MODELS |= {"patchtst": PatchTST, "rlinear": RLinear}
