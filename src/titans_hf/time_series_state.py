"""What a forecast returns, and what the model keeps of a time series between calls."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from transformers.modeling_outputs import ModelOutput

from .cache_titans import TitansCache
from .configuration_time_series_titans import TitansTimeSeriesConfig
from .surprise_titans import LayerSurprise


@dataclass
class TimeSeriesState:
    """What the model keeps of B series of C channels; its size does not depend on the number of values read.

    values (B * C, context_length): the last values, less their cycle. hidden_states (B * C, patches of them, hidden):
    what the linear head sees. memory: the `TitansCache` of the layers, B * C rows. cycle_position (B,) int64: place of
    the next value in the cycle.
    """

    values: Tensor
    hidden_states: Tensor
    memory: TitansCache
    cycle_position: Tensor

    def check_fits(self, config: TitansTimeSeriesConfig, num_series: int, num_channels: int) -> None:
        """Raises ValueError for the state of a model of other sizes, or of another number of series or channels."""
        rows, series = len(self.values), len(self.cycle_position)
        if (rows, series) != (num_series * num_channels, num_series):
            raise ValueError(
                f"`state` must be of {num_series} series of {num_channels} channels as `past_values`, but is of "
                f"{series} series of {rows // series}."
            )
        given = {"context_length": self.values.shape[1], "hidden_size": self.hidden_states.shape[2]}
        given["patch_length"] = given["context_length"] // self.hidden_states.shape[1]
        for name, value in given.items():
            if value != (expected := getattr(config, name)):
                raise ValueError(f"`state` must be of a model with `{name}` {expected}, not {value}.")


@dataclass
class TitansForTimeSeriesPredictionOutput(ModelOutput):
    """The forecast of a call.

    loss: a scalar, where there are `future_values`. prediction_outputs (B, prediction_length, C): the forecast, in the
    units of `past_values`. loc, scale (B, 1, C): mean and standard deviation of the last `context_length` values, less
    their cycle. state: after the last value, with `use_cache=True`. hidden_states, attentions, surprise: on request,
    those of `TitansModel` for the new patches, B * C rows.
    """

    loss: Tensor | None = None
    prediction_outputs: Tensor | None = None
    loc: Tensor | None = None
    scale: Tensor | None = None
    state: TimeSeriesState | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    surprise: tuple[LayerSurprise, ...] | None = None


class TimeSeriesForecast(NamedTuple):
    """sequences (B, length, C): the forecast; state: after the last measured value, before the first forecast one."""

    sequences: Tensor
    state: TimeSeriesState


__all__ = ["TimeSeriesForecast", "TimeSeriesState", "TitansForTimeSeriesPredictionOutput"]
