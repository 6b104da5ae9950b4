"""Configuration of Titans models that forecast time series."""

from typing import TYPE_CHECKING, Literal

from huggingface_hub.dataclasses import strict

from .configuration_titans import TitansConfig, check_multiple, setting

if TYPE_CHECKING:  # never executed: makes save_pretrained copy every sibling module
    # Transformers finds these files by a regular expression, which reads this line too.
    from .time_series_titans import TitansForTimeSeriesPrediction  # noqa: F401


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
            `model.cycle.fit(training values)` sets it to their means; from 0, it is learned too slowly.
        num_input_channels (`int`, defaults to 1):
            Number of channels of the cycle. No effect without a cycle: any number of channels is then read.

    Raises `ValueError` or huggingface_hub's `StrictDataclassError`, naming the field, for a value that is not possible.
    """

    model_type = "titans_time_series"
    keys_to_ignore_at_inference = ["state"]
    auto_classes = {
        "AutoConfig": "configuration_time_series_titans.TitansTimeSeriesConfig",
        "AutoModelForTimeSeriesPrediction": "time_series_titans.TitansForTimeSeriesPrediction",
    }

    context_length: int = setting(96, at_least=1)
    patch_length: int = setting(8, at_least=1)
    prediction_length: int = setting(96, at_least=1)
    loss: Literal["mse", "mae"] = setting("mse")
    head_dropout: int | float = setting(0.0, at_least=0, at_most=1)
    cycle_length: int = setting(0, at_least=0)
    num_input_channels: int = setting(1, at_least=1)
    # All figures of series are of this form.
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
        if size := self.token_memory_features:
            raise ValueError(f"`token_memory_features` must be 0, but is {size}: a time series has no tokens.")
        check_multiple("context_length", self.context_length, "patch_length", self.patch_length)


TitansTimeSeriesConfig.register_for_auto_class()

__all__ = ["TitansTimeSeriesConfig"]
