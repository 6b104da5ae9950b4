"""eval.forecasting: parts and errors by hand, baselines, runs that go on, tables."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from covering import in_one_test
from huggingface_hub.errors import StrictDataclassError
from series_files import write_series

from eval import tables
from eval.common.records import FILE, append_record, read_records
from eval.forecasting import run as forecasting
from eval.forecasting.models import MODELS, Forecaster
from eval.forecasting.run import make_splits, score
from eval.forecasting.series import Windows, read_series
from eval.forecasting.tables import make_report
from titans_hf import TitansTimeSeriesConfig

TINY = ["patch_length=4", "hidden_size=8", "num_attention_heads=2", "intermediate_size=8", "num_hidden_layers=1"]
PUBLISHED = read_records(Path(tables.__file__).parent / "results" / "forecasting.jsonl", "forecasting")[0]


@pytest.fixture
def csv(tmp_path):
    return write_series(tmp_path / "waves.csv")  # 60 hours, a twelfth of a month


def command(csv, *options):
    sizes = ["--split", "0.05", "0.0165", "0.0165", "--look_back", "8", "--horizons", "2", "3"]
    steps = ["--max_steps", "4", "--eval_steps", "2", "--batch_size", "8", "--output", str(csv.parent / "out")]
    return [str(csv), *sizes, *steps, *map(str, options)]


def test_parts_are_scaled_by_the_training_part(csv):
    """A split in months has as many rows as the steps make of them; all parts are scaled by the training part."""
    for freq, per_hour in (("h", 1), ("15min", 4)):
        times = pd.date_range("2016-07-01", periods=17_420 * per_hour, freq=freq)
        splits = make_splits(pd.DataFrame({"x": np.arange(len(times), dtype=float)}, times), [12, 4, 4], 9, 9)
        ends = [0, 8640 * per_hour, 11520 * per_hour, 14400 * per_hour]
        assert [part.rows for part in splits] == [range(*ends[i : i + 2]) for i in range(3)]
    series = read_series(csv)
    splits, train = make_splits(series, [0.05, 0.0165, 0.0165], 8, 2), series.to_numpy()[:36]
    expected = (series.to_numpy()[58:] - train.mean(0)) / train.std(0)
    np.testing.assert_allclose(splits[2][len(splits[2]) - 1]["future_values"], expected, atol=1e-5)
    assert [len(part) for part in splits] == [36 - 8 - 2 + 1, 12 - 2 + 1, 12 - 2 + 1]


def test_errors_by_hand():
    """Repeating the last of 0, 1, 4, 9, 16 misses by 1, 4 and 3, 8 and 5, 12; also in an incomplete last batch."""
    model = Forecaster(TitansTimeSeriesConfig())
    model.forecast = lambda past: past[:, -1:].expand(-1, 2, -1)
    windows, errors = Windows(torch.tensor([0.0, 1, 4, 9, 16])[:, None], range(1, 5), 1, 2), [1, 4, 3, 8, 5, 12]
    expected = {"mse": sum(e * e for e in errors) / 6, "mae": sum(errors) / 6}
    assert score(model, windows, 2) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["patchtst", "rlinear"])
def test_baselines_have_the_cycle(name):
    """With a cycle, a baseline forecasts the values less their cycle and adds that of what follows."""
    past, position = torch.randn(2, 32, 3), torch.tensor([3, 12])
    sizes = dict(context_length=32, prediction_length=5, num_input_channels=3, cycle_length=7)
    model = MODELS[name](TitansTimeSeriesConfig(**sizes)).eval()
    weight = torch.nn.init.normal_(model.cycle.weight)
    cycle = torch.stack([weight[[(p + t) % 7 for t in range(37)]] for p in position.tolist()])
    with torch.no_grad():
        expected = model.forecast(past - cycle[:, :32]) + cycle[:, 32:]
        torch.testing.assert_close(model(past, cycle_position=position)["prediction_outputs"], expected)


def test_runs_go_on_and_are_reported(csv, capsys):
    """A repeated command makes nothing new, another rate or file under the same name is an error; tables have all."""
    options = command(csv, "--horizons", "2", "--cycle_length", "6", "--set", *TINY, "--label", "tiny")
    forecasting.main(options)
    capsys.readouterr()
    out = csv.parent / "out"
    written = (out / FILE).read_text()
    forecasting.main(options)
    printed = capsys.readouterr().out
    assert (out / FILE).read_text() == written
    assert all(f"| {row}-cycle6 |" in printed for row in ("tiny", "tiny-off", "patchtst", "rlinear"))
    with pytest.raises(ValueError, match=r"with learning_rate=0\.003, not 0\.1: give another"):
        forecasting.main([*options, "--learning_rate", "0.1"])
    write_series(csv, seed=1)  # another file of the same name
    with pytest.raises(ValueError, match="waves-8-2-tiny-cycle6-seed0 is finished with digest="):
        forecasting.main(options)


def test_the_best_weights_are_scored(csv, monkeypatch):
    """The validation score is that of the best evaluation; a run without a finite validation loss is an error."""
    trainers, fit = [], forecasting.fit_forecaster
    monkeypatch.setattr(forecasting, "fit_forecaster", lambda *args: trainers.append(fit(*args)) or trainers[-1])
    options = ["--models", "rlinear", "--horizons", "2", "--max_steps", "40", "--patience", "1"]
    forecasting.main(command(csv, *options, "--learning_rate", "1e3"))
    losses = [x["eval_loss"] for x in trainers[0].state.log_history if "eval_loss" in x]
    (record,) = read_records(csv.parent / "out", "forecasting")
    assert record["valid"]["mse"] == pytest.approx(min(losses), rel=1e-4) and losses[-1] > min(losses)
    with pytest.raises(ValueError, match="no validation loss was a number: give a lower"):
        forecasting.main(command(csv, "--models", "patchtst", "--learning_rate", "1e30"))


def save(folder, row, horizon, seed=0, mse=0.4, mae=0.3, look_back=96):
    """Appends a published record with another row, horizon, seed and score."""
    run = {"row": row, "model": row, "horizon": horizon, "seed": seed, "look_back": look_back}
    about = {"name": f"{row}-{horizon}-{seed}-{look_back}", "run": PUBLISHED["run"] | run}
    results = {"parameters": 10 * horizon, "test": {"mse": mse, "mae": mae}}
    append_record(PUBLISHED | about | results, folder / FILE)


def test_means_over_horizons_and_seeds(tmp_path):
    """A mean is over the horizons of each seed that has all; the paper stands beside its own horizons only."""
    for horizon, seed in ((96, 0), (96, 1), (192, 0), (192, 1)):
        save(tmp_path, "a", horizon, seed, horizon / 100 + seed, 0.5)
    save(tmp_path, "b", 96)
    save(tmp_path, "a", 96, 2, 9, 9)
    save(tmp_path, "a", 96, 0, 0.1, 0.1, 336)
    text = "\n".join(make_report(read_records(tmp_path, "forecasting"), []))
    means = "1.940 ± 0.707 / 0.500 ± 0.000", "3.973 ± 4.382 / 3.333 ± 4.907", "2.420 ± 0.707 / 0.500 ± 0.000"
    assert f"| a | 960 to 1,920 | 3 | {' | '.join(means)} |" in text
    assert "| b | 960 | 1 | – | 0.400 / 0.300 | – |" in text
    assert text.index("## ETTh1, look-back 96") < text.index("## ETTh1, look-back 336") and "paper:" not in text
    for horizon in (96, 192, 336, 720):
        save(tmp_path / "whole", "a", horizon)
    text = "\n".join(make_report(read_records(tmp_path / "whole", "forecasting"), []))
    assert "| paper: neural memory |  |  | 0.420 / 0.421 | – | – | – | – |" in text


def test_chosen_rows_are_reported(tmp_path, capsys):
    """--rows leaves all other rows out. A row that no run has, or a folder without runs, is an error."""
    for row in ("lmm-off-cycle24", "rlinear", "patchtst"):
        save(tmp_path, row, 96)
    tables.main([str(tmp_path), "--rows", "lmm-off-cycle24", "rlinear"])
    printed = capsys.readouterr().out
    assert "| patchtst |" not in printed and "| rlinear |" in printed
    with pytest.raises(ValueError, match="must be of lmm-off-cycle24, patchtst, rlinear, but have llama"):
        tables.main([str(tmp_path), "--rows", "llama"])
    with pytest.raises(ValueError, match=r"has no runs of rows of one benchmark, such as those of eval\.dna\.run"):
        tables.main([str(tmp_path / "out")])


@in_one_test(
    "options,message",
    [
        (["--look_back", "0"], "--look_back must be at least 1, but is 0"),
        (["--split", "12", "4", "4"], "--split 12.0 4.0 4.0: the parts end after .8640, 11520, 14400. of 60 rows"),
        (["--horizons", "20"], "the validation part has 12 of 60 rows, in which there is no window of 8 rows to read"),
        (["--set", "patch_length=4"], "--set needs a --label"),
        (["--set", "patch_length=abc", "--label", "x"], "patch_length"),
    ],
)
def test_bad_options(csv, options, message):
    """An impossible option raises an error that names it, before anything is trained."""
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        forecasting.main(command(csv, *options))
    assert not (csv.parent / "out").exists()
