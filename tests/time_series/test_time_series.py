"""Forecasts of time series: the forecasts of a stream, instance normalisation, loss, saving."""

import json
import os
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from common import ATTENTIONS, STAY, TWO_VARIANTS, assert_same, assert_same_cache
from covering import covering, in_one_test
from huggingface_hub.errors import StrictDataclassError
from time_series_models import SIZES, make_model, make_values, read
from transformers import AutoConfig, AutoModelForTimeSeriesPrediction, Trainer, TrainingArguments

import titans_hf
from titans_hf import TitansForTimeSeriesPrediction, TitansTimeSeriesConfig


@covering(2, {"variant": ATTENTIONS, "rule": ["chunk", "delta"], "sizes": [[20, 40], [20, *[4] * 10], [28, 4, 20, 8]]})
def test_a_stream_in_pieces_is_the_series(variant, rule, sizes):
    """After each piece the forecast and the state are those of the series read at once so far."""
    model, values = make_model(variant, memory_update_rule=rule), make_values()
    outputs = read(model, values, sizes)
    for end, output in zip(torch.tensor(sizes).cumsum(0).tolist(), outputs, strict=True):
        whole = read(model, values[:, :end], [end])[0]
        for name in ("prediction_outputs", "loc", "scale"):
            assert_same(output[name], whole[name])
        assert_same(output.state.values, whole.state.values)
        assert_same(output.state.hidden_states, whole.state.hidden_states)
        assert_same_cache(output.state.memory, whole.state.memory)


@torch.no_grad()
def test_the_head_gets_the_amplitudes_of_patches():
    """Where the layers add nothing, the head gets the embeddings of patches as they are: a final norm would give every
    patch the same length, and no forecast could be linear in the values.
    """
    model, embeds = make_model(), make_values(channels=16)
    for parameter in model.model.layers.parameters():
        parameter.zero_()
    assert_same(model.model(inputs_embeds=embeds).last_hidden_state, embeds)


def test_a_state_is_never_changed():
    """A state continued twice gives what it gives once."""
    model, values = make_model(), make_values()
    state = read(model, values[:, :20], [20])[0].state
    first, second = (model(past_values=values[:, 20:40], state=state, use_cache=True) for _ in range(2))
    assert torch.equal(first.prediction_outputs, second.prediction_outputs)


def test_the_state_does_not_grow():
    """After 10 and 200 patches the state takes as many bytes."""
    states = [read(make_model(), make_values(length=n), [n])[0].state for n in (40, 800)]
    assert states[0].memory.num_bytes == states[1].memory.num_bytes
    for name in ("values", "hidden_states"):
        sizes = [getattr(state, name).untyped_storage().nbytes() for state in states]
        assert sizes[0] == sizes[1], name


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


@in_one_test("unit", [1e-30, 1e-5, 1e-3, 1e3, 1e19, 1e30])
def test_forecasts_do_not_depend_on_the_unit(unit):
    """The same series in a unit of any size has the same finite forecast in that unit, in float32."""
    model, values = make_model().float(), make_values(1, 36, 1).float()
    with torch.no_grad():
        expected, found = (model.generate(x).sequences.double() for x in (values, values * unit))
    torch.testing.assert_close(found / unit, expected, rtol=1e-4, atol=1e-4)


def test_float64_values_are_normalised_in_float64():
    """A level of 1e9 adds itself to the forecast of a float32 model, where the values are float64."""
    model, values = make_model().float(), make_values(1, 36, 1)
    with torch.no_grad():
        expected, found = (model.generate(x).sequences for x in (values, values + 1e9))
    torch.testing.assert_close(found - 1e9, expected, rtol=1e-4, atol=1e-4)


@in_one_test("value", [0.0, 0.1, 7.0, 1e6, 1e30])
def test_a_constant_series_stays_constant(value):
    """The forecast of a constant is the constant, and its gradients are finite."""
    model = make_model().float()
    values = torch.full((1, 36, 1), value, requires_grad=True)
    forecast = model(values).prediction_outputs
    torch.testing.assert_close(forecast, torch.full_like(forecast, value), rtol=1e-5, atol=1e-5)
    (forecast / max(value, 1)).sum().backward()
    assert values.grad.isfinite().all()


def test_forecasts_are_in_the_units_of_the_values():
    """The forecast of 5 x + 70 is 5 times that of x, plus 70."""
    model, values = make_model(), 100 * make_values()
    with torch.no_grad():
        forecast, changed = (model(past_values=x).prediction_outputs for x in (values, 5 * values + 70))
    torch.testing.assert_close(changed, 5 * forecast + 70, rtol=1e-6, atol=1e-3)


def test_channels_are_independent():
    """A channel's forecast depends on that channel alone."""
    model, values = make_model(), make_values()
    with torch.no_grad():
        together = model(past_values=values).prediction_outputs
        alone = torch.cat([model(past_values=values[..., c : c + 1]).prediction_outputs for c in range(3)], -1)
    assert_same(together, alone)


@pytest.mark.parametrize("max_lr,reaches", [(0.5, True), (0, False)])
def test_old_values_reach_the_forecast_through_the_memory_alone(max_lr, reaches):
    """A patch long before the context changes the forecast if the memory learns, and does not if it is stopped."""
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
    """A forecast longer than the model's own continues as if its values had been measured; the state is that of the
    measured ones.
    """
    model, values = make_model(), make_values()
    result = model.generate(values, prediction_length=27)
    series, parts = values, []
    for _ in range(4):  # each reads 8 of the 10 values, two patches
        with torch.no_grad():
            forecast = model(past_values=series).prediction_outputs
        parts.append(forecast[:, :8])
        series = torch.cat([series, forecast[:, :8]], 1)
    assert_same(result.sequences, torch.cat(parts, 1)[:, :27])
    assert_same_cache(result.state.memory, read(model, values, [60])[0].state.memory)
    again = model.generate(make_values(length=4, seed=1), prediction_length=3, state=result.state)
    assert again.sequences.shape == (2, 3, 3)
    with torch.no_grad():
        own = model(past_values=values).prediction_outputs
    assert torch.equal(model.generate(values).sequences, own)


@covering(1, {"variant": TWO_VARIANTS, "loss,function": [("mse", torch.square), ("mae", torch.abs)]})
def test_loss_and_gradients(variant, loss, function):
    """The loss is the mean over all values, and every parameter has a gradient."""
    model, values = make_model(variant, loss=loss), make_values(length=50)
    output = model(past_values=values[:, :40], future_values=values[:, 40:])
    assert_same(output.loss, function(output.prediction_outputs - values[:, 40:]).mean())
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_round_trip(variant, tmp_path):
    """A saved model loads by its Auto class with the same forecasts."""
    model, values = make_model(variant), make_values()
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForTimeSeriesPrediction.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is TitansForTimeSeriesPrediction
    with torch.no_grad():
        assert_same(loaded(past_values=values)[0], model(past_values=values)[0])
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is TitansTimeSeriesConfig and config.to_diff_dict() == loaded.config.to_diff_dict()


def test_a_new_model_is_initialised():
    """The embedding and the head are drawn like all projections, and their biases are 0."""
    config = TitansTimeSeriesConfig(hidden_size=64)
    model = AutoModelForTimeSeriesPrediction.from_config(config)
    for layer in (model.model.get_input_embeddings(), model.head):
        assert 0.8 < layer.weight.std() / config.initializer_range < 1.2 and not layer.bias.any()


def test_bfloat16():
    """In bfloat16 the forecast keeps the values' dtype and is near float32's."""
    model, values = make_model(dtype=torch.float32), 1000 + make_values(dtype=torch.float32)
    with torch.no_grad():
        exact = model(past_values=values)
        rounded = model.to(torch.bfloat16)(past_values=values)
    assert rounded.prediction_outputs.dtype == torch.float32
    error = (rounded.prediction_outputs - exact.prediction_outputs) / exact.scale
    assert error.abs().max() < 0.1 * ((exact.prediction_outputs - exact.loc) / exact.scale).std()


def test_trainer(tmp_path):
    """Trainer lowers the loss, evaluates it, saves and returns all forecasts."""
    rows = [{"past_values": x[:40], "future_values": x[40:]} for x in make_values(64, 50, dtype=torch.float32)]
    arguments = TrainingArguments(
        tmp_path,
        max_steps=20,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        label_names=["future_values"],
        report_to="none",
        use_cpu=True,
    )
    model = make_model(dtype=torch.float32)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:10])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * before
    predictions = trainer.predict(rows[:10]).predictions[0]
    past = torch.stack([row["past_values"] for row in rows[:10]])
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(predictions), model.eval()(past_values=past).prediction_outputs)
    trainer.save_model()
    AutoModelForTimeSeriesPrediction.from_pretrained(tmp_path)


def test_values_in_half_precision():
    """Values in float16 of any size give a finite forecast and loss, those of the same values in float32."""
    model, values = make_model(dtype=torch.float16), (1000 + 400 * make_values(dtype=torch.float32)).half()
    with torch.no_grad():
        half, single = (model(past_values=x[:, :40], future_values=x[:, 40:50]) for x in (values, values.float()))
    assert half.loss.isfinite() and half.loss == single.loss
    assert half.prediction_outputs.equal(single.prediction_outputs)


def test_an_adapter_without_targets():
    """`LoraConfig()` without targets adapts the memory's projections, as of language models."""
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=2))
    adapted = {name.split(".")[-1] for name, x in model.named_modules() if isinstance(x, peft.tuners.lora.Linear)}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert model(past_values=make_values()).prediction_outputs.shape == (2, 10, 3)


def test_a_checkpoint_brings_its_code(tmp_path):
    """A saved model or config includes all modules, and names the classes of time series."""
    package = Path(titans_hf.__file__).parent
    code = {file.name for file in package.glob("*.py")} - STAY
    for number, saved in enumerate((make_model(), make_model().config)):
        folder = tmp_path / str(number)
        saved.save_pretrained(folder)
        assert {file.name for file in folder.glob("*.py")} == code
        assert json.loads((folder / "config.json").read_text())["auto_map"] == TitansTimeSeriesConfig.auto_classes


@pytest.mark.slow
def test_code_that_travels_with_a_checkpoint(tmp_path):
    """A checkpoint loads and forecasts by its own code, without this package."""
    model, values = make_model(dtype=torch.float32), make_values(dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    torch.save(values, tmp_path / "values")
    load = """
import sys, torch
from transformers import AutoModelForTimeSeriesPrediction
model = AutoModelForTimeSeriesPrediction.from_pretrained("model", trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules") and "titans_hf" not in sys.modules
torch.save(model.generate(torch.load("values"), prediction_length=25).sequences, "forecast")
model.save_pretrained("again")
"""
    environment = os.environ | dict(HF_MODULES_CACHE=str(tmp_path / "modules"), HF_HUB_OFFLINE="1")
    subprocess.run([sys.executable, "-c", load], cwd=tmp_path, env=environment, check=True)
    expected = model.generate(values, prediction_length=25).sequences
    torch.testing.assert_close(torch.load(tmp_path / "forecast"), expected, rtol=1e-4, atol=1e-4)
    for file in (tmp_path / "model").glob("*.py"):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


@in_one_test(
    "shape,message",
    [
        ((2, 60), "must be .series, values, channels."),
        ((2, 16, 3), "at least 20 at the beginning"),
        ((2, 22, 3), "a multiple of `patch_length` .4."),
        ((0, 40, 3), "but is .0, 40, 3."),
    ],
)
def test_past_values_that_do_not_fit(shape, message):
    """Values that are no patches of series raise an error that names their shape."""
    with pytest.raises(ValueError, match=message):
        make_model()(past_values=torch.zeros(shape, dtype=torch.float64))


def test_other_arguments_that_do_not_fit():
    """A future of another length, a state of other series and a length of 0 raise errors that name the argument."""
    model, values = make_model(), make_values()
    with pytest.raises(ValueError, match=r"`future_values` must be \(2, 10, 3\), but is \(2, 1, 3\)"):
        model(past_values=values, future_values=values[:, :1])
    state = read(model, values, [60])[0].state
    with pytest.raises(ValueError, match="`state` must have `series` 1, but has 2"):
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


@in_one_test("name,value", [("context_length", 40), ("patch_length", 5), ("hidden_size", 32)])
def test_states_of_other_models_are_refused(name, value):
    """A state of a model of other sizes raises an error that names the size."""
    model, values = make_model(), make_values()
    other = read(make_model(**{name: value}), values, [60])[0].state
    expected = f"`state` must have `{name}` {getattr(model.config, name)}, but has {value}"
    with pytest.raises(ValueError, match=expected):
        model(past_values=values, state=other)


def test_states_of_other_series_are_refused():
    """A state of as many rows but another number of series raises an error."""
    model, values = make_model(), make_values(series=2, channels=3)
    state = read(model, values, [60])[0].state
    with pytest.raises(ValueError, match="`state` must have `series` 3, but has 2"):
        model(past_values=make_values(series=3, channels=2), state=state)


@in_one_test("name,value", [("patch_length", 7), ("prediction_length", 0), ("memory_depth", 0)])
def test_a_field_that_is_set_later_is_refused_too(name, value):
    """A model refuses an impossible field that was set after its configuration was made."""
    config = make_model().config
    setattr(config, name, value)
    with pytest.raises(ValueError, match=f"`{name}`"):
        TitansForTimeSeriesPrediction(config)


@in_one_test(
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
    """An impossible field raises an error that names it."""
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        TitansTimeSeriesConfig(**SIZES | changes)
