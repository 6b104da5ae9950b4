"""Forecasts of time series: a stream is its series, normalisation, the cycle, loss, saving, errors."""

import pytest
import torch
from common import ATTENTIONS, TWO_VARIANTS, assert_same, assert_same_cache, redraw
from covering import covering, in_one_test

from titans_hf import TitansForTimeSeriesPrediction, TitansTimeSeriesConfig

SIZES = dict(context_length=20, patch_length=4, prediction_length=10, hidden_size=16, intermediate_size=24)
SIZES |= dict(sliding_window=4, segment_length=4, memory_chunk_size=2)
CYCLE = dict(cycle_length=7, num_input_channels=3)
POSITION = torch.tensor([3, 12])  # of the first values of two series in the cycle


def make_model(variant: str = "lmm", dtype=torch.float64, **changes) -> TitansForTimeSeriesPrediction:
    config = TitansTimeSeriesConfig(**{**SIZES, "variant": variant, **changes})
    return redraw(TitansForTimeSeriesPrediction(config).to(dtype).eval())


def make_values(series: int = 2, length: int = 60, channels: int = 3, seed: int = 0, dtype=torch.float64):
    """Random walks (series, length, channels): their mean and deviation change from patch to patch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(series, length, channels, generator=generator, dtype=torch.float64).cumsum(1).to(dtype)


@torch.no_grad()
def read(model, values, sizes, **first):
    """Returns the output after each piece of the given sizes; `first` are further arguments of the first call."""
    outputs, state = [], None
    for piece in values.split(sizes, dim=1):
        outputs.append(model(past_values=piece, state=state, use_cache=True, **({} if outputs else first)))
        state = outputs[-1].state
    return outputs


PIECES = [[20, 40], [20, *[4] * 10], [28, 4, 20, 8]]


@covering(2, {"variant": ATTENTIONS, "rule": ["chunk", "delta"], "sizes": PIECES, "cycle": [{}, CYCLE]})
def test_a_stream_in_pieces_is_the_series(variant, rule, sizes, cycle):
    """After each piece, forecast and state are those of the series read at once so far."""
    model, values = make_model(variant, memory_update_rule=rule, **cycle), make_values()
    place = {"cycle_position": POSITION} if cycle else {}
    outputs = read(model, values, sizes, **place)
    for end, output in zip(torch.tensor(sizes).cumsum(0).tolist(), outputs, strict=True):
        whole = read(model, values[:, :end], [end], **place)[0]
        for name in ("prediction_outputs", "loc", "scale"):
            assert_same(output[name], whole[name])
        for name in ("values", "hidden_states", "cycle_position"):
            assert_same(getattr(output.state, name), getattr(whole.state, name))
        assert_same_cache(output.state.memory, whole.state.memory)


@torch.no_grad()
def test_the_head_gets_the_amplitudes_of_patches():
    """Where layers add nothing, the head gets embeddings as they are: a final norm would make all of one length."""
    model, embeds = make_model(), make_values(channels=16)
    for parameter in model.model.layers.parameters():
        parameter.zero_()
    assert_same(model.model(inputs_embeds=embeds).last_hidden_state, embeds)


def test_a_state_is_constant():
    """A state continued twice gives what it gives once, and takes as many bytes after 200 patches as after 10."""
    model, values = make_model(), make_values(length=800)
    state, far = (read(model, values[:, :n], [n])[0].state for n in (40, 800))
    first, second = (model(past_values=values[:, 40:60], state=state, use_cache=True) for _ in range(2))
    assert torch.equal(first.prediction_outputs, second.prediction_outputs)
    assert state.memory.num_bytes == far.memory.num_bytes
    sizes = [[y.untyped_storage().nbytes() for y in (x.values, x.hidden_states)] for x in (state, far)]
    assert sizes[0] == sizes[1]


def test_normalised_patches():
    """Patches are normalised by the 20 values that end with them, the first five by their own 20, one after another."""
    model, values = make_model(), make_values(1, 36, 1)[..., 0]
    patches, loc, scale = model._normalize(values, at_start=True)
    for number, patch in enumerate(patches[0]):
        end = max(20, 4 * number + 4)
        context = values[0, end - 20 : end]
        deviation = (context - context.mean()).square().mean().sqrt()
        assert_same(patch, (values[0, 4 * number : 4 * number + 4] - context.mean()) / deviation)
    assert_same(loc[0, 0], values[0, 16:].mean())
    assert_same(scale[0, 0], values[0, 16:].var(correction=0).sqrt())


@in_one_test("unit,level", [*((unit, 0.0) for unit in (1e-30, 1e-5, 1e3, 1e19, 1e30)), (1.0, 1e9), (5.0, 70.0)])
def test_forecasts_are_in_the_units_of_the_values(unit, level):
    """The same series in another unit and at another level has the same forecast in that unit at that level."""
    model, values = make_model().float(), make_values(1, 36, 1)
    dtype = torch.float64 if level else torch.float32
    given = values.to(dtype), (values * unit + level).to(dtype)
    with torch.no_grad():
        expected, found = (model.generate(x).prediction_outputs.double() for x in given)
    torch.testing.assert_close((found - level) / unit, expected, rtol=1e-4, atol=1e-4)


@in_one_test("value", [0.0, 0.1, 7.0, 1e6, 1e30])
def test_a_constant_series_stays_constant(value):
    """The forecast of a constant is the constant, and its gradients are finite."""
    model = make_model().float()
    values = torch.full((1, 36, 1), value, requires_grad=True)
    forecast = model(values).prediction_outputs
    torch.testing.assert_close(forecast, torch.full_like(forecast, value), rtol=1e-5, atol=1e-5)
    (forecast / max(value, 1)).sum().backward()
    assert values.grad.isfinite().all()


def test_channels_are_independent():
    """A channel's forecast depends on that channel alone."""
    model, values = make_model(), make_values()
    with torch.no_grad():
        together = model(past_values=values).prediction_outputs
        alone = torch.cat([model(past_values=values[..., c : c + 1]).prediction_outputs for c in range(3)], -1)
    assert_same(together, alone)


@pytest.mark.parametrize("max_lr,reaches", [(0.5, True), (0, False)])
def test_old_values_reach_the_forecast_through_the_memory_alone(max_lr, reaches):
    """A patch long before the context changes the forecast if the memory learns, and does not with the memory off."""
    model = make_model(memory_max_lr=max_lr, num_hidden_layers=1)
    values = make_values().requires_grad_()
    model(past_values=values).prediction_outputs.sum().backward()
    assert bool(values.grad[:, :4].any()) is reaches


def test_surprise_and_hidden_states_of_patches():
    """On request a call returns the surprise of each new patch of each channel, and the hidden states."""
    model, values = make_model(), make_values()
    state = read(model, values[:, :20], [20])[0].state
    with torch.no_grad():
        whole = model(past_values=values, output_surprise=True, output_hidden_states=True)
        later = model(past_values=values[:, 20:], state=state, output_surprise=True)
    assert len(whole.hidden_states) == 3 and whole.hidden_states[0].shape == (6, 15, 16)
    for a, b in zip(whole.surprise, later.surprise, strict=True):
        assert a.gradient_norm.shape == (6, 4, 15)
        assert_same(a.gradient_norm[..., 5:], b.gradient_norm)


def test_generate_reads_its_own_forecast():
    """A longer forecast continues as if its values had been measured; the state is that of the measured ones."""
    model, values = make_model(), make_values()
    result = model.generate(values, prediction_length=27)
    series, parts = values, []
    for _ in range(4):  # each reads 8 of the 10 values, two patches
        with torch.no_grad():
            forecast = model(past_values=series).prediction_outputs
        parts.append(forecast[:, :8])
        series = torch.cat([series, forecast[:, :8]], 1)
    assert_same(result.prediction_outputs, torch.cat(parts, 1)[:, :27])
    assert_same_cache(result.state.memory, read(model, values, [60])[0].state.memory)
    again = model.generate(make_values(length=4, seed=1), prediction_length=3, state=result.state)
    assert again.prediction_outputs.shape == (2, 3, 3)


def test_the_cycle_is_subtracted_and_added():
    """A forecast of any length is that of the values less their cycle, plus the cycle of what follows."""
    model, plain, values = make_model(**CYCLE), make_model(), make_values(length=40)
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if name != "cycle.weight"})
    weight = model.cycle.weight.detach()
    cycle = torch.stack([weight[[(p + t) % len(weight) for t in range(67)]] for p in POSITION.tolist()])
    with torch.no_grad():
        found = model(past_values=values, cycle_position=POSITION)
        expected = plain(past_values=values - cycle[:, :40])
    assert_same(found.prediction_outputs, expected.prediction_outputs + cycle[:, 40:50])
    assert_same(found.loc, expected.loc)
    found = model.generate(values, prediction_length=27, cycle_position=POSITION)
    expected = plain.generate(values - cycle[:, :40], prediction_length=27)
    assert_same(found.prediction_outputs, expected.prediction_outputs + cycle[:, 40:])


def test_a_cycle_is_learned():
    """A new cycle is 0 from position 0 and is learned everywhere; a fitted one is the mean of whole cycles."""
    model, values = TitansForTimeSeriesPrediction(TitansTimeSeriesConfig(**CYCLE)), make_values(length=192).float()
    assert not model.cycle.weight.any()
    with torch.no_grad():
        model.cycle.weight.normal_()
        default = model(past_values=values[:, :96]).prediction_outputs
        assert torch.equal(default, model(past_values=values[:, :96], cycle_position=POSITION * 0).prediction_outputs)
    model(past_values=values[:, :96], future_values=values[:, 96:], cycle_position=POSITION).loss.backward()
    assert model.cycle.weight.grad.all()
    cycle = make_model(cycle_length=3, num_input_channels=1).cycle
    cycle.fit(torch.tensor([1.0, 2, 6, 3, 4, 8, 100])[:, None])
    assert cycle.weight[:, 0].tolist() == [-2, -1, 3]


@covering(1, {"variant": TWO_VARIANTS, "loss,function": [("mse", torch.square), ("mae", torch.abs)]})
def test_loss_and_gradients(variant, loss, function):
    """The loss is the mean over all values, and every parameter has a gradient."""
    model, values = make_model(variant, loss=loss), make_values(length=50)
    output = model(past_values=values[:, :40], future_values=values[:, 40:])
    assert_same(output.loss, function(output.prediction_outputs - values[:, 40:]).mean())
    output.loss.backward()
    assert all(x.grad.isfinite().all() and x.grad.any() for x in model.parameters())


def test_half_precision():
    """In bfloat16 the forecast is near float32's; float16 values of any size give the finite forecast of float32."""
    model, values = make_model(dtype=torch.float32), 1000 + 400 * make_values(dtype=torch.float32)
    with torch.no_grad():
        exact = model(past_values=values)
        rounded = model.to(torch.bfloat16)(past_values=values)
        model, values = model.half(), values.half()
        half, single = (model(past_values=x[:, :40], future_values=x[:, 40:50]) for x in (values, values.float()))
    assert rounded.prediction_outputs.dtype == torch.float32
    error = (rounded.prediction_outputs - exact.prediction_outputs) / exact.scale
    assert error.abs().max() < 0.1 * ((exact.prediction_outputs - exact.loc) / exact.scale).std()
    assert half.loss.isfinite() and half.loss == single.loss
    assert half.prediction_outputs.equal(single.prediction_outputs)


NAN = torch.full((2, 60, 3), float("nan"))


@in_one_test(
    "changes,arguments,message",
    [
        *(({}, {"past_values": torch.zeros(shape)}, message) for shape, message in {
            (2, 60): "must be .series, values, channels.",
            (2, 16, 3): "at least 20 at the beginning",
            (2, 22, 3): "a multiple of `patch_length` .4.",
            (0, 40, 3): "but is .0, 40, 3.",
        }.items()),
        ({}, {"past_values": NAN}, "`past_values` must be finite"),
        ({}, {"labels": torch.zeros(2, 15)}, "`labels` is not an argument of a forecast"),
        ({}, {"future_values": torch.zeros(2, 1, 3)}, r"`future_values` must be \(2, 10, 3\), but is \(2, 1, 3\)"),
        ({}, {"state": {}, "past_values": torch.zeros(1, 60, 3)}, "`state` must have `series` 1, but has 2"),
        ({}, {"state": {}, "past_values": torch.zeros(3, 60, 2)}, "`state` must have `series` 3, but has 2"),
        ({}, {"state": {}, "past_values": torch.zeros(2, 2, 3)}, "`past_values` must be .* at least 4, but is"),
        ({}, {"state": {"context_length": 40}}, "`state` must have `context_length` .*, but has 40"),
        (CYCLE, {"state": CYCLE, "cycle_position": POSITION}, "`cycle_position` must be None after a `state`"),
        (CYCLE, {"cycle_position": POSITION[:1]}, r"`cycle_position` must be \(2,\) int64, but is \(1,\) torch.int64"),
        (CYCLE, {"cycle_position": POSITION / 2}, r"must be \(2,\) int64, but is \(2,\) torch.float32"),
        (CYCLE, {"past_values": torch.zeros(2, 60, 2)}, r"`num_input_channels` \(3\) channels, as the cycle"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(changes, arguments, message):
    """Values, states and other arguments that a model does not take raise an error that names them."""
    values = make_values()
    if "state" in arguments:
        arguments = arguments | {"state": read(make_model(**arguments["state"]), values, [60])[0].state}
    with pytest.raises(ValueError, match=message):
        make_model(**changes)(**{"past_values": values} | arguments)


def test_lengths_and_values_to_fit_that_do_not_fit():
    """A length that a forecast cannot have, and values that are no cycle, raise errors; integers are values."""
    model, values = make_model(), make_values()
    for length in (0, 2.5):
        with pytest.raises(ValueError, match=f"`prediction_length` must be an int, at least 1, but is {length}"):
            model.generate(values, prediction_length=length)
    with pytest.raises(ValueError, match="at most 3, less than a patch, but is 4"):
        make_model(prediction_length=3).generate(values, prediction_length=4)
    for shape in ((2, 1), (6, 2), (6,)):
        with pytest.raises(ValueError, match=r"`values` must be \(at least 3, 1\), but is"):
            make_model(cycle_length=3, num_input_channels=1).cycle.fit(torch.zeros(shape))
    counts = (10 * values).long()
    ours, expected = (model(past_values=x, attention_mask=None)[0] for x in (counts, counts.float()))  # as PEFT does
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
