"""eval/forecasting.py: what stands in its folder already, other data, runs that differ, and runs that diverge."""

import pandas as pd
import pytest
from series_files import write_series
from test_forecasting import command

from eval.common.records import FILE, append_record, read_records
from eval.forecasting import run as forecasting
from eval.forecasting import tables as forecast_tables
from eval.forecasting.data import read_series


@pytest.fixture
def csv(tmp_path):
    return write_series(tmp_path / "waves.csv")


def test_other_data_of_one_name_is_not_taken_for_it(csv):
    """A finished run of a file that has changed is refused, and one that does not tell its data is kept: otherwise the
    table would have figures of data that is gone.
    """
    options = command(csv, "--models", "rlinear")
    forecasting.main(options)
    out = csv.parent / "out"
    before = read_records(out, "forecasting")
    write_series(csv, seed=1)
    with pytest.raises(ValueError, match="waves-8-2-rlinear-seed0 is finished with digest="):
        forecasting.main(options)
    (out / FILE).unlink()
    for older in before:
        append_record(older | {"run": {k: x for k, x in older["run"].items() if k != "digest"}}, out / FILE)
    kept = (out / FILE).read_text()
    forecasting.main(options)
    assert (out / FILE).read_text() == kept


@pytest.mark.parametrize(
    "options,message",
    [
        (["--models", "rlinear", "--seeds", "1", "--max_steps", "2"], "waves, rlinear: max_steps is 2 and elsewhere 4"),
        (["--models", "rlinear", "--seeds", "1", "--learning_rate", "1e-4"], "waves, rlinear: learning_rate is 0.0001"),
        (
            ["--models", "dlinear", "--seeds", "1", "--split", "0.5", "0.2", "0.3"],
            "waves, dlinear: split is .* and elsewhere",
        ),
    ],
)
def test_runs_that_were_not_made_alike_are_refused(csv, options, message):
    """Runs of one row with other settings, and of one series with another split, are refused before any training:
    otherwise a mean would be of different things. Another label or model may have other settings.
    """
    forecasting.main(command(csv, "--models", "rlinear"))
    forecasting.main(command(csv, "--models", "dlinear", "--max_steps", "2"))
    before = (csv.parent / "out" / FILE).read_text()
    with pytest.raises(ValueError, match=message):
        forecasting.main(command(csv, *options))
    assert (csv.parent / "out" / FILE).read_text() == before


def test_other_files_are_named_before_any_training(csv):
    """A line of something else in the folder's file is an error that names it: otherwise the table would fail after all
    runs.
    """
    append_record({"name": "x"}, csv.parent / "out" / FILE)
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 1, is no run of eval\.forecasting"):
        forecasting.main(command(csv, "--models", "rlinear"))
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 1, is no run of eval\.forecasting"):
        forecast_tables.read_results(csv.parent / "out")
    assert len(list((csv.parent / "out").iterdir())) == 1


def test_times_with_a_zone_are_read(csv):
    """Times with a zone are those in UTC, also where it changes within the file: otherwise exports of most programs
    could not be read.
    """
    plain, table = read_series(csv), pd.read_csv(csv)
    for zones in (["Z"] * 60, ["+02:00"] * 60, ["Z"] * 30 + ["-01:00"] * 30):
        shift = [0 if zone == "Z" else int(zone[:3]) for zone in zones]
        local = pd.to_datetime(table.date) + pd.to_timedelta(shift, unit="h")
        dates = local.dt.strftime("%Y-%m-%dT%H:%M:%S") + pd.Series(zones)
        table.assign(date=dates).to_csv(csv, index=False)
        series = read_series(csv)
        assert (series.times == plain.times).all() and series.digest == plain.digest


def test_a_run_that_diverges_is_named(csv):
    """A run without a finite validation loss ends in an error that names it: otherwise in a traceback."""
    with pytest.raises(ValueError, match="waves-8-2-patchtst-seed0: no validation loss was a number: give a lower"):
        forecasting.main(command(csv, "--models", "patchtst", "--learning_rate", "1e30"))
