"""`titans-hf forecast`: a model is trained, saved and loaded again; its rows are in the file's units and times."""

import numpy as np
import pandas as pd
import pytest
import torch
from covering import in_one_test
from series_files import write_series

from titans_hf import TitansForTimeSeriesPrediction
from titans_hf.cli import forecast
from titans_hf.cli.shared.time_series import Scaling, frequency_of, read_series, steps_between

STEPS = ["--max_steps", "2", "--eval_steps", "1", "--look_back", "16", "--batch_size", "8"]


def call(data, output, *options) -> pd.DataFrame:
    forecast.main([str(data), "--output", str(output), *map(str, options)])
    return pd.read_csv(output / "forecast.csv", index_col=0, parse_dates=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A file of hourly values without one row, at a high level; the folder of a model of it; what was forecast."""
    folder = tmp_path_factory.mktemp("forecast")
    data = write_series(folder / "waves.csv", rows=101)
    table = pd.read_csv(data).drop(index=40)
    table["c1"] = 1e8 + 1e-2 * table["c1"]
    table.to_csv(data, index=False)
    future = call(data, folder / "model", "--horizon", 10, "--cycle_length", 24, *STEPS)
    return data, folder / "model", future


def test_rows_are_the_forecast_of_the_last_rows(trained):
    """The rows follow the last one, and are what the saved model forecasts, in the units of the file."""
    data, output, future = trained
    assert future.index.name == "date" and list(future) == ["c0", "c1"]
    assert (future.index == pd.date_range("2020-01-05 05:00", periods=10, freq="h")).all()
    assert future["c1"].between(1e8 - 0.1, 1e8 + 0.1).all() and future["c1"].nunique() == 10
    model, series = TitansForTimeSeriesPrediction.from_pretrained(output), read_series(data)
    scaling = Scaling.of(series.to_numpy()[:80])
    past = scaling.scale(series.to_numpy()[-16:])[None]
    expected = model.generate(past, cycle_position=torch.tensor([84 % 24])).prediction_outputs[0]
    np.testing.assert_allclose(future, scaling.unscale(expected), rtol=1e-10, atol=1e-5)
    assert {"series.json", "forecast.png", "model.safetensors"} <= {x.name for x in output.iterdir()}


def test_a_saved_model_goes_on(trained, tmp_path):
    """The saved model gives the same rows again, and more, also from the end of the file and with exchanged columns."""
    data, output, future = trained
    again = call(data, tmp_path / "again", "--model", output)
    pd.testing.assert_frame_equal(again, future)
    table = pd.read_csv(data)
    table[["date", "c1", "c0"]].iloc[-30:].to_csv(tmp_path / "end.csv", index=False)
    longer = call(tmp_path / "end.csv", tmp_path / "longer", "--model", output, "--horizon", 25)
    pd.testing.assert_frame_equal(longer.iloc[:8], future.iloc[:8])
    assert len(longer) == 25 and not (tmp_path / "longer" / "model.safetensors").exists()


@in_one_test("frequency", ["ME", "MS", "B", "15min"])
def test_times_follow_the_calendar(frequency, trained, tmp_path):
    """The times that follow a series are those of the calendar, and a row that is left out changes no step."""
    _, folder, _ = trained
    model, facts = forecast.load(folder)
    times = pd.date_range("2020-01-01", periods=42, freq=frequency)
    facts |= {"frequency": frequency, "last_time": str(times[20])}
    series = pd.DataFrame(1.0, times[:40], ["c0", "c1"])
    assert list(forecast.forecast(model, facts, series, 2).index) == list(times[40:])
    assert steps_between(times[0], times[-1], frequency) == 41 and steps_between(times[-1], times[0], frequency) == -41
    if frequency == "15min":
        assert frequency_of(times.delete(5)) == "15min"


def test_a_model_is_saved_before_its_errors_are_measured(tmp_path, monkeypatch, capsys):
    """A training is not lost if measuring fails; errors are those of the last fifth, --batch_size at once."""
    sizes, data = [], write_series(tmp_path / "waves.csv", rows=200)
    run = TitansForTimeSeriesPrediction.forward
    note = lambda model, past_values, **given: sizes.append(len(past_values)) or run(model, past_values, **given)  # noqa: E731
    monkeypatch.setattr(TitansForTimeSeriesPrediction, "forward", note)
    table = pd.read_csv(data)
    table["c0"] += 9 * np.sin(np.arange(200) / 24 * 2 * np.pi)  # a day
    table.to_csv(data, index=False)
    call(data, tmp_path / "whole", "--horizon", 8, "--cycle_length", 24, *STEPS)
    assert max(sizes) == 8
    c0 = read_series(data)["c0"].to_numpy()
    repeated = np.mean([np.abs(c0[now : now + 8] - c0[now - 24 : now - 16]) for now in range(160, 193)])
    heading, line = [x for x in capsys.readouterr().out.splitlines() if x.startswith(("| column |", "| c0 |"))]
    assert "| of the last cycle repeated |" in heading
    assert float(line.split("|")[3]) == pytest.approx(repeated, rel=1e-3) != float(line.split("|")[2])
    monkeypatch.setattr(forecast, "absolute_errors", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call(data, tmp_path / "model", "--horizon", 8, "--cycle_length", 24, *STEPS)
    rows = [call(data, tmp_path / "out", "--model", tmp_path / name) for name in ("model", "whole")]
    pd.testing.assert_frame_equal(*rows)


def test_files_of_another_kind(trained, tmp_path):
    """A saved model refuses a file of other columns, of another step and of too few rows, and its folder a training."""
    _, model, _ = trained
    plain = pd.DataFrame({"date": pd.date_range("2020", periods=100, freq="h"), "c0": 0.5, "c1": 1.0})
    for changed, options, message in (
        (plain.assign(date=pd.date_range("2020", periods=100)), ["--model", model], "a row each D"),
        (plain[:9], ["--model", model], "9 rows: --model .* reads 16"),
        (plain.rename(columns={"c1": "x"}), ["--model", model], "has no column c1, on which --model"),
        (plain, ["--horizon", 8, *STEPS], "has a model: load it by --model"),
    ):
        changed.to_csv(tmp_path / "x.csv", index=False)
        with pytest.raises(ValueError, match=message):
            call(tmp_path / "x.csv", model if "--horizon" in options else tmp_path / "out", *options)
