"""eval.forecasting: scaling and errors by hand, baselines, runs that go on, tables."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from covering import in_one_test
from series_files import write_series

from eval import tables
from eval.common.records import FILE, append_record, read_records
from eval.forecasting import run as forecasting
from eval.forecasting.data import make_splits
from eval.forecasting.models import BASELINES, ForecastTask, RepeatLast, build_model
from eval.forecasting.run import score
from eval.forecasting.tables import make_report
from titans_hf.cli.shared.time_series import Windows, digest_of, read_series

TINY = ["patch_length=4", "hidden_size=8", "num_attention_heads=2", "intermediate_size=8", "num_hidden_layers=1"]
PUBLISHED = read_records(Path(tables.__file__).parent / "results" / "forecasting.jsonl", "forecasting")[0]


@pytest.fixture
def csv(tmp_path):
    return write_series(tmp_path / "waves.csv")


def command(csv, *options):
    sizes = ["--split", "0.6", "0.2", "0.2", "--look_back", "8", "--horizons", "2", "3"]
    steps = ["--max_steps", "4", "--eval_steps", "2", "--batch_size", "8", "--output", str(csv.parent / "out")]
    return [str(csv), *sizes, *steps, *map(str, options)]


def test_scaling_is_by_the_training_part(csv):
    """The training part has mean 0 and deviation 1, the others are scaled alike."""
    series = read_series(csv)
    splits = make_splits(series, [0.6, 0.2, 0.2], 8, 2)
    train = series.to_numpy()[:36]
    np.testing.assert_allclose(splits.scaling.mean, train.mean(0), atol=1e-6)
    np.testing.assert_allclose(splits.scaling.std, train.std(0), atol=1e-6)
    expected = (series.to_numpy()[58:] - train.mean(0)) / train.std(0)
    np.testing.assert_allclose(splits.test[len(splits.test) - 1]["future_values"], expected, atol=1e-5)
    assert [len(part) for part in splits[:3]] == [36 - 8 - 2 + 1, 12 - 2 + 1, 12 - 2 + 1]


def test_errors_by_hand():
    """Repeating the last of 0, 1, 4, 9, 16 misses by 1, 4 and 3, 8 and 5, 12; also in an incomplete last batch."""
    windows, errors = Windows(torch.tensor([0.0, 1, 4, 9, 16])[:, None], range(1, 5), 1, 2), [1, 4, 3, 8, 5, 12]
    expected = {"mse": sum(e * e for e in errors) / 6, "mae": sum(errors) / 6}
    assert score(RepeatLast(ForecastTask(1, 1, 2)), windows, 2) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_have_the_cycle(name):
    """With a cycle, a baseline forecasts the values less their cycle and adds that of what follows."""
    past, position = torch.randn(2, 30, 3), torch.tensor([3, 12])
    model = build_model(name, ForecastTask(3, 30, 5, cycle_length=7), {}).eval()
    weight = torch.nn.init.normal_(model.cycle.weight)
    cycle = torch.stack([weight[[(p + t) % 7 for t in range(35)]] for p in position.tolist()])
    with torch.no_grad():
        expected = model.forecast(past - cycle[:, :30]) + cycle[:, 30:]
        torch.testing.assert_close(model(past, cycle_position=position)["prediction_outputs"], expected)


def test_a_run_starts_from_the_cycle_of_the_training_part(csv, capsys):
    """With a rate of almost 0, the last value repeated has the errors of the training part's cycle, set by hand. The
    command says where rows are missing.
    """
    lines = csv.read_text().splitlines()
    csv.write_text("\n".join(lines[:51] + lines[52:]) + "\n")
    options = ["--models", "repeat-last", "--horizons", "2", "--cycle_length", "6", "--learning_rate", "1e-12"]
    forecasting.main(command(csv, *options))
    assert "waves: row 51 is not at the usual step" in capsys.readouterr().out
    (record,) = read_records(csv.parent / "out", "forecasting")
    splits = make_splits(read_series(csv), [0.6, 0.2, 0.2], 8, 2)
    model, without = (RepeatLast(ForecastTask(2, 8, 2, cycle_length=6)) for _ in range(2))
    model.cycle.fit(splits.train.values[: splits.train.rows.stop])
    expected = score(model, splits.test, 8)["mse"]
    assert record["test"]["mse"] == pytest.approx(expected, abs=1e-4)
    assert abs(expected - score(without, splits.test, 8)["mse"]) > 1e-2


def test_runs_go_on_and_are_reported(csv, capsys):
    """Every model is trained and scored, the same command makes nothing again, and the tables have all rows. A run of
    the same name with other settings or data is refused.
    """
    options = command(csv, "--horizons", "2", "--set", *TINY, "--label", "tiny")
    forecasting.main(options)
    out = csv.parent / "out"
    records = {record["name"]: record for record in read_records(out, "forecasting")}
    record, off = (records[f"waves-8-2-{row}-seed0"] for row in ("tiny", "tiny-off"))
    assert record["best_step"] in (2, 4) and record["windows"] == [27, 11, 11] and record["parameters"] > 100
    assert record["config"] | {"memory_max_lr": 0} == off["config"] != record["config"]
    written = (out / FILE).read_text()
    capsys.readouterr()
    forecasting.main(options)
    printed = capsys.readouterr().out
    assert (out / FILE).read_text() == written
    assert all(f"| {row} |" in printed for row in ("tiny", "tiny-off", "patchtst", "rlinear", "repeat-last"))
    with pytest.raises(ValueError, match=r"with learning_rate=0\.003, not 0\.1: give another"):
        forecasting.main([*options, "--learning_rate", "0.1"])
    write_series(csv, seed=1)  # another file of the same name
    with pytest.raises(ValueError, match="waves-8-2-tiny-seed0 is finished with digest="):
        forecasting.main(options)


def test_the_best_weights_are_scored(csv):
    """With a learning rate that ruins the model, the validation score is that of the best evaluation. A run without a
    finite validation loss ends in an error that names it.
    """
    options = ["--models", "rlinear", "--horizons", "2", "--patience", "1", "--max_steps", "40"]
    forecasting.main(command(csv, *options, "--learning_rate", "1e3"))
    assert read_records(csv.parent / "out", "forecasting")[0]["best_step"] < 40
    with pytest.raises(ValueError, match="waves-8-2-patchtst-seed0: no validation loss was a number: give a lower"):
        forecasting.main(command(csv, "--models", "patchtst", "--learning_rate", "1e30"))


def save(folder, row, horizon, seed=0, mse=0.4, mae=0.3, look_back=96):
    """Appends a published record with another row, horizon, seed and score."""
    run = {"row": row, "model": row, "horizon": horizon, "seed": seed, "look_back": look_back}
    about = {"name": f"{row}-{horizon}-{seed}-{look_back}", "run": PUBLISHED["run"] | run}
    results = {"parameters": 10 * horizon, "test": {"mse": mse, "mae": mae}}
    append_record(PUBLISHED | about | results, folder / FILE)


def test_means_over_horizons_and_seeds(tmp_path):
    """A mean is over the horizons of each seed that has all, with the deviation over seeds; the paper stands beside its
    own horizons only.
    """
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
    assert "| a | 960 to 7,200 | 1 |" in text


def test_chosen_rows_are_reported(tmp_path, capsys):
    """--rows leaves all other rows out. A row that no run has, or a folder without runs, is an error."""
    for row in ("lmm-off-cycle24", "rlinear", "dlinear"):
        save(tmp_path, row, 96)
    tables.main([str(tmp_path), "--rows", "lmm-off-cycle24", "rlinear"])
    printed = capsys.readouterr().out
    assert "| dlinear |" not in printed and "| rlinear |" in printed
    with pytest.raises(ValueError, match="--rows must be of dlinear, lmm-off-cycle24, rlinear, but has patchtst"):
        tables.main([str(tmp_path), "--rows", "patchtst"])
    with pytest.raises(ValueError, match=r"has no runs of rows, such as those of eval\.dna\.run"):
        tables.main([str(tmp_path / "out")])


@in_one_test(
    "options,message",
    [
        (["--look_back", "0"], "--look_back must be at least 1, but is 0"),
        (["--split", "12", "4", "4"], "months of 30 days are 14400 rows, but there are 60"),
        (["--split", "0.6", "0", "0.4"], "must be three numbers above 0"),
        (["--split", "0.7", "0.2", "0.2"], "shares must sum to at most 1, but sum to 1.1"),
        (
            ["--horizons", "20"],
            "the validation part has 12 of 60 rows, in which there is no window of 8 rows to read and 20",
        ),
        (["--time_column", "when"], "--time_column when: .* has the columns date, c0, c1"),
        (["--set", "patch_length=4"], "--set needs a name of its own"),
        (["--set", "patch_length=3", "--label", "x"], "`context_length` .8. must be a multiple of `patch_length` .3."),
        (["--set", "patch_len=4", "--label", "x"], "--set patch_len: TitansTimeSeriesConfig has no such field"),
        (["--label", "a/b"], "--label 'a/b'"),
        (["--label", "rlinear"], "--label rlinear is the name of another model"),
        (["--set", "patch_length=abc", "--label", "x"], "--set for titans: .*patch_length"),
    ],
)
def test_bad_options(csv, options, message):
    """An impossible option raises an error that names it, before anything is trained."""
    with pytest.raises(ValueError, match=message.replace(".*", "(.|\n)*")):
        forecasting.main(command(csv, *options))
    assert not (csv.parent / "out").exists()


@in_one_test(
    "change,message",
    [
        (lambda t: t.assign(c1=1.0), "the channel c1 is constant in the training part"),
        (
            lambda t: t.assign(c1=t.c1.where(t.index != 7)),
            "the column c1 has nan in row 8, not a number: leave such rows out",
        ),
        (lambda t: t.assign(c1=["?"] * len(t)), r"the column c1 has \? in row 1, not a number"),
        (lambda t: t.iloc[::-1], "the dates of the column date must increase"),
        (lambda t: t[["date"]], "has no column but date"),
    ],
)
def test_bad_files(csv, change, message):
    """A file that is no series raises an error that names the column and the row."""
    bad = csv.with_name("bad.csv")
    change(pd.read_csv(csv)).to_csv(bad, index=False)
    with pytest.raises(ValueError, match=message):
        forecasting.main(command(bad))
    with pytest.raises(ValueError, match=r"nothing\.csv is not a file"):
        forecasting.main(command(csv.with_name("nothing.csv")))


def test_times_with_a_zone_are_read(csv):
    """Times with a zone are those in UTC, also where it changes within the file."""
    plain, table = read_series(csv), pd.read_csv(csv)
    for zones in (["Z"] * 60, ["Z"] * 30 + ["-01:00"] * 30):
        shift = [0 if zone == "Z" else int(zone[:3]) for zone in zones]
        local = pd.to_datetime(table.date) + pd.to_timedelta(shift, unit="h")
        dates = local.dt.strftime("%Y-%m-%dT%H:%M:%S") + pd.Series(zones)
        table.assign(date=dates).to_csv(csv, index=False)
        series = read_series(csv)
        assert series.equals(plain) and digest_of(series) == digest_of(plain)
