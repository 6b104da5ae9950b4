"""Forecasts time series by Titans: patches of each channel are its tokens, read once, in any number of calls."""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import ModelOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from .cache_titans import TitansCache
from .configuration_titans import TitansConfig, check_multiple, setting
from .mixers_titans import LayerSurprise
from .modeling_titans import TitansModel, TitansPreTrainedModel, register_lora_targets


@strict
class TitansTimeSeriesConfig(TitansConfig):
    r"""
    Configures a `TitansForTimeSeriesPrediction`. A token is a patch: `patch_length` successive values of one channel.
    The fields of `TitansConfig` have other defaults, for small data; lengths in tokens count patches. Further fields:

    Args:
        context_length (`int`, defaults to 96):
            Number of values whose mean and standard deviation normalise the input and the forecast, and whose patches
            the linear head sees; a multiple of `patch_length`. A series may be longer: older values reach the forecast
            through the memory (and attention) alone.
        patch_length (`int`, defaults to 8): Number of values of a patch. Patches do not overlap.
        prediction_length (`int`, defaults to 96): Number of values that a call forecasts.
        loss (`str`, defaults to `"mse"`): `"mse"` mean squared error or `"mae"` mean absolute error.
        head_dropout (`float`, defaults to 0.0): Dropout before the linear head.
        cycle_length (`int`, defaults to 0):
            Number of values of a cycle that is learned for each channel, 24 for the days of hourly values; 0 for none.
            It is subtracted from the input and added to the forecast, in the units of the values. Before training,
            `model.cycle.fit(training values)` sets it to their means; a cycle that starts from 0 is learned too slowly.
        num_input_channels (`int`, defaults to 1):
            Number of channels of the cycle. No effect without a cycle: any number of channels is then read.

    Raises `ValueError` or huggingface_hub's `StrictDataclassError`, naming the field, for a value that is not possible.
    """

    model_type = "titans_time_series"
    keys_to_ignore_at_inference = ["state"]
    auto_classes = {
        "AutoConfig": "time_series_titans.TitansTimeSeriesConfig",
        "AutoModelForTimeSeriesPrediction": "time_series_titans.TitansForTimeSeriesPrediction",
    }

    context_length: int = setting(96, at_least=1)
    patch_length: int = setting(8, at_least=1)
    prediction_length: int = setting(96, at_least=1)
    loss: Literal["mse", "mae"] = setting("mse")
    head_dropout: int | float = setting(0.0, at_least=0, at_most=1)
    cycle_length: int = setting(0, at_least=0)
    num_input_channels: int = setting(1, at_least=1)
    # All measured figures of time series are for this form.
    memory_form: Literal["titans", "delta", "paper"] = "delta"
    vocab_size: int = 1  # of a table that the embedding of patches replaces
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    variant: Literal["mac", "mag", "mal", "lmm"] = "lmm"
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @property
    def num_patches(self) -> int:
        """Number of patches that the linear head sees."""
        return self.context_length // self.patch_length

    def validate_architecture(self):
        """Checks that the fields of this class fit each other too; part of the validation of `@strict`."""
        super().validate_architecture()
        check_multiple("context_length", self.context_length, "patch_length", self.patch_length)


@dataclass
class TimeSeriesState:
    """The state of B series of C channels; its size does not depend on the number of values read.

    values (B * C, context_length): the last values minus their cycle. hidden_states (B * C, their patches, hidden): the
    linear head's inputs. memory: the `TitansCache` of the layers, B * C rows. cycle_position (B,) int64: place of the
    next value in the cycle.
    """

    values: Tensor
    hidden_states: Tensor
    memory: TitansCache
    cycle_position: Tensor

    def check_fits(self, config: TitansTimeSeriesConfig, num_series: int, num_channels: int) -> None:
        """Raises ValueError for the state of a model of other sizes, or of another number of series or channels."""
        series, length = len(self.cycle_position), self.values.shape[1]
        _, patches, size = self.hidden_states.shape
        has = (series, len(self.values) // series, length, size, length // patches)
        names = ("context_length", "hidden_size", "patch_length")
        fits = (num_series, num_channels, *(getattr(config, name) for name in names))
        for name, given, expected in zip(("series", "channels", *names), has, fits, strict=True):
            if given != expected:
                raise ValueError(f"`state` must have `{name}` {expected}, but has {given}.")


@dataclass
class TitansForTimeSeriesPredictionOutput(ModelOutput):
    """The forecast of a call.

    loss: a scalar, with `future_values`. prediction_outputs (B, prediction_length, C): the forecast, in the units of
    `past_values`. loc, scale (B, 1, C): mean and standard deviation of the last `context_length` values minus their
    cycle. state: after the last value, with `use_cache=True`. hidden_states, attentions, surprise: on request, as
    `TitansModel` returns them for the new patches, B * C rows.
    """

    loss: Tensor | None = None
    prediction_outputs: Tensor | None = None
    loc: Tensor | None = None
    scale: Tensor | None = None
    state: TimeSeriesState | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    surprise: tuple[LayerSurprise, ...] | None = None


OPTIONS = {"output_hidden_states", "output_attentions", "output_surprise"}
LOSSES = {"mse": nn.functional.mse_loss, "mae": nn.functional.l1_loss}

register_lora_targets(TitansTimeSeriesConfig.model_type)


class LearnedCycle(nn.Module):
    """A learned value for each place of a cycle and each channel; 0 before `fit`.

    Residual cycle forecasting (Lin et al. 2024, arXiv 2409.18479): the model forecasts the series minus its cycle.
    """

    def __init__(self, cycle_length: int, num_channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(cycle_length, num_channels))

    def forward(self, position: Tensor, length: int) -> Tensor:
        """Returns the values (B, length, C) of the places that start with position (B,) int64."""
        places = position[:, None] + torch.arange(length, device=position.device)
        return self.weight[places % len(self.weight)]

    @torch.no_grad()
    def fit(self, values: Tensor) -> None:
        """Sets the cycle to the mean of the training values (T, C) at each place, minus the mean over all places. The
        first value is at place 0. Training starts from these means. Raises ValueError for less than one cycle, other
        channels or values that are not finite.
        """
        length, channels = self.weight.shape
        _check_finite("values", values)
        if values.ndim != 2 or len(values) < length or values.shape[1] != channels:
            raise ValueError(f"`values` must be (at least {length}, {channels}), but is {tuple(values.shape)}.")
        means = values[: len(values) // length * length].unflatten(0, (-1, length)).mean(0)
        self.weight.copy_(means - means.mean(0))


class TitansForTimeSeriesPrediction(TitansPreTrainedModel):
    """Forecasts each channel by itself, with the same weights: patches -> Titans without its final norm -> linear head
    on the last patches.

    Reversible instance normalisation: a patch is normalised by the mean and standard deviation of the `context_length`
    values that end with it. The patches of the first `context_length` values share the mean and deviation of all these
    values. The forecast is scaled by the mean and deviation of the last `context_length` values. Nothing depends on
    later values, so that a series read in pieces gives the forecasts of the whole series:

    ```python
    with torch.no_grad():  # else the state keeps the autograd graph of everything that was read
        output = model(past_values=first, use_cache=True)  # first (B, T, C), T at least context_length
        output = model(past_values=second, state=output.state, use_cache=True)  # as if both had been one series
    ```
    """

    config: TitansTimeSeriesConfig
    config_class = TitansTimeSeriesConfig
    main_input_name = "past_values"
    accepts_loss_kwargs = False  # the loss is a mean, whatever number of items Trainer counts

    def __init__(self, config: TitansTimeSeriesConfig):
        super().__init__(config)
        self.model = TitansModel(config)
        self.model.set_input_embeddings(nn.Linear(config.patch_length, config.hidden_size))
        # The final norm would hide each patch's amplitude from the head.
        self.model.norm = nn.Identity()
        self.head_dropout = nn.Dropout(config.head_dropout)
        self.head = nn.Linear(config.num_patches * config.hidden_size, config.prediction_length)
        self.cycle = LearnedCycle(config.cycle_length, config.num_input_channels) if config.cycle_length else None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LearnedCycle):
            init.zeros_(module.weight)

    @can_return_tuple
    def forward(
        self,
        past_values: Tensor,
        future_values: Tensor | None = None,
        state: TimeSeriesState | None = None,
        cycle_position: Tensor | None = None,
        use_cache: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TitansForTimeSeriesPredictionOutput:
        """Forecasts the `prediction_length` values that follow `past_values`.

        Args:
            past_values (B, T, C): new values of C channels, finite, used in float32 at least; T a multiple of
                `patch_length`, and at least `context_length` at the beginning of a series.
            future_values (B, prediction_length, C): the values that follow; with them there is a loss.
            state: returned by the call before; None at the beginning of a series. It is not changed.
            cycle_position (B,) int64: place of the first value in the cycle, 0 by default. Only at the beginning of a
                series: a state has its place. No effect without a cycle.
            use_cache: return the state after the last value.

        Raises ValueError for missing values, another shape, a state of another model or number of series, and
        other arguments, such as `past_observed_mask` of transformers' own models.
        """
        options = {name: value for name, value in kwargs.items() if value is not None}
        self._check_values(past_values, future_values, state, options)
        position = self._first_position(past_values, state, cycle_position)
        residual, future_cycle = self._split_cycle(past_values, position)
        values = residual.mT.flatten(0, 1)
        values = values if state is None else torch.cat([state.values.to(values), values], dim=1)
        patches, loc, scale = self._normalize(values, at_start=state is None)
        memory = copy.copy(state.memory) if state is not None else TitansCache(self.config) if use_cache else None
        embeds = self.model.get_input_embeddings()(patches.to(self.dtype))
        outputs = self.model(inputs_embeds=embeds, cache=memory, use_cache=False, **options)
        read_before = [] if state is None else [state.hidden_states]
        hidden_states = torch.cat([*read_before, outputs.last_hidden_state], dim=1)[:, -self.config.num_patches :]
        forecast = self.head(self.head_dropout(hidden_states.flatten(1))).to(values) * scale + loc
        forecast, loc, scale = (x.unflatten(0, (len(past_values), -1)).mT for x in (forecast, loc, scale))
        forecast = forecast + future_cycle
        if memory is not None and use_cache:  # copies: views would keep everything that was read
            kept = values[:, -self.config.context_length :].clone(), hidden_states.clone()
            state = TimeSeriesState(*kept, memory, position + past_values.shape[1])
        loss = None if future_values is None else LOSSES[self.config.loss](forecast, future_values.to(forecast))
        return TitansForTimeSeriesPredictionOutput(
            loss=loss,
            prediction_outputs=forecast,
            loc=loc,
            scale=scale,
            state=state if use_cache else None,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            surprise=outputs.surprise,
        )

    @torch.no_grad()
    def generate(
        self,
        past_values: Tensor,
        prediction_length: int | None = None,
        state: TimeSeriesState | None = None,
        cycle_position: Tensor | None = None,
    ) -> TitansForTimeSeriesPredictionOutput:
        """Forecasts any number of values after `past_values`, `prediction_outputs`; the state is that after the last
        measured value. Beyond `config.prediction_length`, the forecast so far is read as if it had been measured.

        past_values, state, cycle_position: as in `forward`. prediction_length: the config's by default.

        Raises ValueError as `forward` does, for a length below 1, and for one above `config.prediction_length` if a
        forecast is shorter than a patch.
        """
        length = self.config.prediction_length if prediction_length is None else prediction_length
        num_read = self.config.prediction_length // self.config.patch_length * self.config.patch_length
        if type(length) is not int or length < 1 or (length > self.config.prediction_length and not num_read):
            most = "" if num_read else f" and at most {self.config.prediction_length}, less than a patch"
            raise ValueError(f"`prediction_length` must be an int, at least 1{most}, but is {length!r}.")
        output = self(past_values, state=state, cycle_position=cycle_position, use_cache=True)
        forecast, after = output.prediction_outputs, output.state
        while forecast.shape[1] < length:
            end = forecast.shape[1] - self.config.prediction_length + num_read
            output = self(forecast[:, end - num_read : end], state=output.state, use_cache=True)
            forecast = torch.cat([forecast[:, :end], output.prediction_outputs], dim=1)
        return TitansForTimeSeriesPredictionOutput(prediction_outputs=forecast[:, :length], state=after)

    def _first_position(
        self, past_values: Tensor, state: TimeSeriesState | None, cycle_position: Tensor | None
    ) -> Tensor:
        """Returns the place (B,) of the first value in the cycle; raises ValueError for a place that does not fit."""
        if state is not None:
            if cycle_position is not None:
                raise ValueError("`cycle_position` must be None after a `state`, which has the position.")
            return state.cycle_position
        if cycle_position is None:
            return torch.zeros(len(past_values), dtype=torch.long, device=past_values.device)
        if cycle_position.shape != past_values.shape[:1] or cycle_position.is_floating_point():
            given = f"{tuple(cycle_position.shape)} {cycle_position.dtype}"
            raise ValueError(f"`cycle_position` must be ({len(past_values)},) int64, but is {given}.")
        return cycle_position

    def _split_cycle(self, past_values: Tensor, position: Tensor) -> tuple[Tensor, Tensor | float]:
        """Returns past_values (B, T, C) minus their cycle, in float32 at least, and the cycle of the values that
        follow, (B, prediction_length, C).
        """
        past_values = past_values.to(torch.promote_types(past_values.dtype, torch.float32))
        if self.cycle is None:
            return past_values, 0.0
        length = past_values.shape[1]
        cycle = self.cycle(position, length + self.config.prediction_length).to(past_values)
        return past_values - cycle[:, :length], cycle[:, length:]

    def _normalize(self, values: Tensor, at_start: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Cuts values (rows, T) into patches, each normalised by the context_length values that end with it. Returns
        patches (rows, T, patch_length), and the mean and deviation (rows, 1) of the last context_length values. The
        first context_length values give patches only `at_start`; later, these patches have been read already.

        Mean and deviation are computed from values divided by their context's largest value: forecasts do not depend on
        the unit, and no square overflows. A rounding error is added to the variance, so that a constant series can be
        normalised.
        """
        size = self.config.patch_length
        contexts = values.unfold(1, self.config.context_length, size)
        info = torch.finfo(values.dtype)
        largest = contexts.abs().amax(-1, keepdim=True).clamp(min=info.tiny).detach()
        contexts = contexts / largest
        loc = contexts.mean(-1, keepdim=True)
        scale = (contexts.var(-1, keepdim=True, correction=0) + info.eps**2).sqrt()
        patches = (contexts[:, 1:, -size:] - loc[:, 1:]) / scale[:, 1:]
        if at_start:
            first = (contexts[:, 0] - loc[:, 0]) / scale[:, 0]
            patches = torch.cat([first.unflatten(1, (-1, size)), patches], dim=1)
        return patches, (loc * largest)[:, -1], (scale * largest)[:, -1]

    def _check_values(
        self, past_values: Tensor, future_values: Tensor | None, state: TimeSeriesState | None, options: dict
    ) -> None:
        """Raises ValueError for values, a state or other arguments that `forward` does not take."""
        if unknown := options.keys() - OPTIONS:
            raise ValueError(f"`{min(unknown)}` is not an argument of a forecast and has no effect.")
        _check_finite("past_values", past_values)
        if future_values is not None:
            _check_finite("future_values", future_values)
        shape, size = tuple(past_values.shape), self.config.patch_length
        least = self.config.context_length if state is None else size
        if len(shape) != 3 or 0 in shape or shape[1] % size or shape[1] < least:
            raise ValueError(
                f"`past_values` must be (series, values, channels) with a multiple of `patch_length` ({size}) values, "
                f"at least {least}{' at the beginning of a series' if state is None else ''}, but is {shape}."
            )
        if self.cycle is not None and shape[2] != self.config.num_input_channels:
            raise ValueError(
                f"`past_values` must have `num_input_channels` ({self.config.num_input_channels}) channels, as the "
                f"cycle, but has {shape[2]}."
            )
        if state is not None:
            state.check_fits(self.config, shape[0], shape[2])
        expected = (shape[0], self.config.prediction_length, shape[2])
        if future_values is not None and tuple(future_values.shape) != expected:
            raise ValueError(f"`future_values` must be {expected}, but is {tuple(future_values.shape)}.")


def _check_finite(name: str, values: Tensor) -> None:
    """Raises ValueError, naming the argument, for numbers that are not finite."""
    if not torch.compiler.is_compiling() and not values.isfinite().all():
        raise ValueError(f"`{name}` must be finite, but has NaN or infinite values: fill in what is missing.")


TitansTimeSeriesConfig.register_for_auto_class()
TitansForTimeSeriesPrediction.register_for_auto_class("AutoModelForTimeSeriesPrediction")

__all__ = [
    "TimeSeriesState",
    "TitansForTimeSeriesPrediction",
    "TitansForTimeSeriesPredictionOutput",
    "TitansTimeSeriesConfig",
]
