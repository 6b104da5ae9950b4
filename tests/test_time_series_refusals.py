"""Values, states, arguments and configurations of time series that do not fit: errors that name them."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from time_series_models import SIZES, make_model, make_values, read

from titans_hf import TitansForTimeSeriesPrediction, TitansTimeSeriesConfig


@pytest.mark.parametrize(
    "shape,message",
    [
        ((2, 60), "must be .series, values, channels."),
        ((2, 16, 3), "at least 20 at the beginning"),
        ((2, 22, 3), "a multiple of `patch_length` .4."),
        ((0, 40, 3), "but is .0, 40, 3."),
    ],
)
def test_past_values_that_do_not_fit(shape, message):
    """Values that are no patches of series raise an error that names their shape. If it failed, a forecast would be
    made from a part of them.
    """
    with pytest.raises(ValueError, match=message):
        make_model()(past_values=torch.zeros(shape, dtype=torch.float64))


def test_other_arguments_that_do_not_fit():
    """A future of another length, a state of other series and a length of 0 raise errors that name the argument. If it
    failed, they would be broadcast.
    """
    model, values = make_model(), make_values()
    with pytest.raises(ValueError, match=r"`future_values` must be \(2, 10, 3\), but is \(2, 1, 3\)"):
        model(past_values=values, future_values=values[:, :1])
    state = read(model, values, [60])[0].state
    with pytest.raises(ValueError, match="`state` must be of 1 series of 3 channels"):
        model(past_values=values[:1], state=state)
    with pytest.raises(ValueError, match=r"`past_values` must be .* at least 4, but is"):
        model(past_values=values[:, :2], state=state)
    with pytest.raises(ValueError, match="`prediction_length` must be an int, at least 1, but is 0"):
        model.generate(values, prediction_length=0)
    with pytest.raises(ValueError, match="at most 3, less than a patch, but is 4"):
        make_model(prediction_length=3).generate(values, prediction_length=4)
    counts = (10 * values).long()
    ours, expected = (model(past_values=x).prediction_outputs for x in (counts, counts.float()))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    for missing in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="`past_values` must be finite"):
            model(past_values=torch.where(values == values[0, 0, 0], missing, values))
    model(past_values=values, attention_mask=None)  # as PEFT calls it
    for ignored in ("past_observed_mask", "labels", "inputs_embeds"):
        with pytest.raises(ValueError, match=f"`{ignored}` is no argument of a forecast"):
            model(past_values=values, **{ignored: values})
    with pytest.raises(ValueError, match=r"`prediction_length` must be an int, at least 1, but is 2\.5"):
        model.generate(values, prediction_length=2.5)
    for ignored in ("position_ids", "cu_seq_lens_q", "seq_idx"):  # they would cut a series into documents
        with pytest.raises(ValueError, match=f"`{ignored}` is no argument of a forecast"):
            model(past_values=values, **{ignored: torch.arange(15)[None]})


@pytest.mark.parametrize("name,value", [("context_length", 40), ("patch_length", 5), ("hidden_size", 32)])
def test_states_of_other_models_are_refused(name, value):
    """A state of a model of other sizes raises an error that names the size. If it failed, a forecast would be made
    from patches of another length.
    """
    model, values = make_model(), make_values()
    other = read(make_model(**{name: value}), values, [60])[0].state
    expected = f"`state` must be of a model with `{name}` {getattr(model.config, name)}, not {value}"
    with pytest.raises(ValueError, match=expected):
        model(past_values=values, state=other)


def test_states_of_other_series_are_refused():
    """A state of as many rows but another number of series raises an error. If it failed, the
    channels of one series would continue those of another.
    """
    model, values = make_model(), make_values(series=2, channels=3)
    state = read(model, values, [60])[0].state
    with pytest.raises(ValueError, match="must be of 3 series of 2 channels as `past_values`, but is of 2 series of 3"):
        model(past_values=make_values(series=3, channels=2), state=state)


@pytest.mark.parametrize("name,value", [("patch_length", 7), ("prediction_length", 0), ("memory_depth", 0)])
def test_a_field_that_is_set_later_is_refused_too(name, value):
    """A model refuses an impossible field that was set after its configuration was made. If it failed, the first call
    would end in an error of PyTorch's, or a forecast would be empty.
    """
    config = make_model().config
    setattr(config, name, value)
    with pytest.raises(ValueError, match=f"`{name}`"):
        TitansForTimeSeriesPrediction(config)


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(context_length=21), "`context_length` .21. must be a multiple of `patch_length` .4."),
        (dict(prediction_length=0), "`prediction_length` must be at least 1, but is 0"),
        (dict(head_dropout=2), "`head_dropout` must be from 0 to 1, but is 2"),
        (dict(loss="nll"), "loss"),
        (dict(memory_depth=0), "`memory_depth` must be at least 1"),
    ],
)
def test_configurations_that_are_not_possible(changes, message):
    """An impossible field raises an error that names it. If it failed, the model would fail later, or be another."""
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        TitansTimeSeriesConfig(**SIZES | changes)
