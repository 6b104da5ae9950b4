"""A learned cycle of time series: what is read and forecast without it, its place in a stream, and errors."""

import pytest
import torch
from common import ATTENTIONS, assert_same, assert_same_cache
from covering import covering, in_one_test
from time_series_models import make_model, make_values, read
from transformers import AutoModelForTimeSeriesPrediction

from titans_hf import TitansForTimeSeriesPrediction, TitansTimeSeriesConfig

CYCLE = dict(cycle_length=7, num_input_channels=3)
POSITION = torch.tensor([3, 12])  # of the first values of two series


def repeat_cycle(model, length: int):
    """The model's cycle (2, length, 3) from POSITION on, value by value."""
    weight = model.cycle.weight.detach()
    return torch.stack([torch.stack([weight[(p + t) % 7] for t in range(length)]) for p in POSITION.tolist()])


def test_the_cycle_is_subtracted_and_added():
    """The forecast is that of a model without cycle, of the values less their cycle, plus the cycle of what follows."""
    model, values = make_model(**CYCLE), make_values(length=40)
    plain = make_model()
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if name != "cycle.weight"})
    cycle = repeat_cycle(model, 50)
    with torch.no_grad():
        found = model(past_values=values, cycle_position=POSITION)
        expected = plain(past_values=values - cycle[:, :40])
    assert_same(found.prediction_outputs, expected.prediction_outputs + cycle[:, 40:])
    assert_same(found.loc, expected.loc)


@covering(1, {"variant": ATTENTIONS, "sizes": [[20, 40], [20, *[4] * 10], [28, 4, 20, 8]]})
def test_a_stream_keeps_its_place_in_the_cycle(variant, sizes):
    """After each piece the forecast and the state are those of the series read at once so far, with the position given
    for the first piece only.
    """
    model, values = make_model(variant, **CYCLE), make_values()
    outputs = read(model, values, sizes, cycle_position=POSITION)
    for end, output in zip(torch.tensor(sizes).cumsum(0).tolist(), outputs, strict=True):
        whole = read(model, values[:, :end], [end], cycle_position=POSITION)[0]
        assert_same(output.prediction_outputs, whole.prediction_outputs)
        assert_same(output.state.values, whole.state.values)
        assert output.state.cycle_position.tolist() == whole.state.cycle_position.tolist() == [3 + end, 12 + end]
        assert_same_cache(output.state.memory, whole.state.memory)


def test_generate_goes_on_in_the_cycle():
    """A forecast of 27 values is that of a model without cycle, of the values less their cycle, plus the cycle."""
    model, values = make_model(**CYCLE), make_values(length=40)
    plain = make_model()
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if name != "cycle.weight"})
    cycle = repeat_cycle(model, 67)
    found = model.generate(values, prediction_length=27, cycle_position=POSITION)
    expected = plain.generate(values - cycle[:, :40], prediction_length=27)
    assert_same(found.sequences, expected.sequences + cycle[:, 40:])
    assert found.state.cycle_position.tolist() == [43, 52]


def test_a_cycle_is_learned():
    """A new model has a cycle of 0 and starts at position 0; each place of each channel that a call covers has a
    gradient.
    """
    model, values = TitansForTimeSeriesPrediction(TitansTimeSeriesConfig(**CYCLE)), make_values(length=192)
    assert not model.cycle.weight.any()
    with torch.no_grad():
        model.cycle.weight.normal_()
        values = values.float()
        default = model(past_values=values[:, :96]).prediction_outputs
        assert torch.equal(default, model(past_values=values[:, :96], cycle_position=POSITION * 0).prediction_outputs)
    model(past_values=values[:, :96], future_values=values[:, 96:], cycle_position=POSITION).loss.backward()
    assert model.cycle.weight.grad.all()


def test_the_cycle_of_values():
    """Fitted to 1, 2, 6, 3, 4, 8 and a rest, a cycle of 3 is -2, -1, 3; values of another shape raise an error."""
    cycle = make_model(cycle_length=3, num_input_channels=1).cycle
    cycle.fit(torch.tensor([1.0, 2, 6, 3, 4, 8, 100])[:, None])
    assert cycle.weight[:, 0].tolist() == [-2, -1, 3]
    for shape in ((2, 1), (6, 2), (6,)):
        with pytest.raises(ValueError, match=r"`values` must be \(at least 3, 1\), but is"):
            cycle.fit(torch.zeros(shape))


def test_round_trip_with_a_cycle(tmp_path):
    """A saved model has its cycle again."""
    model, values = make_model(**CYCLE), make_values()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForTimeSeriesPrediction.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        found, expected = (x(past_values=values, cycle_position=POSITION)[0] for x in (loaded, model))
    assert_same(found, expected)


@in_one_test(
    "position,channels,message",
    [
        (POSITION[:1], 3, r"`cycle_position` must be \(2,\) int64, but is \(1,\) torch.int64"),
        (POSITION / 2, 3, r"must be \(2,\) int64, but is \(2,\) torch.float32"),
        (POSITION, 2, r"`num_input_channels` \(3\) channels, as the cycle, but has 2"),
    ],
)
def test_positions_and_channels_that_do_not_fit(position, channels, message):
    """Positions of another shape or dtype and other channels than the cycle's raise errors that name them."""
    with pytest.raises(ValueError, match=message):
        make_model(**CYCLE)(past_values=make_values(channels=channels), cycle_position=position)


def test_other_errors_of_the_cycle():
    """A position after a state, and fields out of range raise errors that name them."""
    model, values = make_model(**CYCLE), make_values()
    state = read(model, values, [60])[0].state
    with pytest.raises(ValueError, match="`cycle_position` must be None after a `state`"):
        model(past_values=values, state=state, cycle_position=POSITION)
    with pytest.raises(ValueError, match="`cycle_length` must be at least 0, but is -1"):
        TitansTimeSeriesConfig(cycle_length=-1)
    with pytest.raises(ValueError, match="`num_input_channels` must be at least 1, but is 0"):
        TitansTimeSeriesConfig(num_input_channels=0)
