"""Series of CSV files: their dates and numbers in many forms; scaling, windows and steps by hand."""

import numpy as np
import pandas as pd
import pytest
import torch
from covering import in_one_test
from series_files import write_series

from titans_hf.cli.shared.time_series import Scaling, Windows, digest_of, read_series, read_times, uneven_step


def test_windows_by_hand():
    """Windows end in the rows of their part; a first part needs its own look-back."""
    values = torch.arange(10.0)[:, None]
    windows = [{name: x.flatten().tolist() for name, x in w.items()} for w in Windows(values, range(4, 10), 3, 2)]
    assert len(windows) == 5
    assert windows[0] == {"past_values": [1, 2, 3], "future_values": [4, 5], "cycle_position": [1]}
    assert windows[-1] == {"past_values": [5, 6, 7], "future_values": [8, 9], "cycle_position": [5]}
    first = Windows(values, range(0, 6), 3, 2)
    assert len(first) == 2 and first[1]["future_values"][:, 0].tolist() == [4, 5]
    assert len(Windows(values, range(0, 4), 3, 2)) == 0


def test_uneven_steps_are_found():
    """The row after a gap is found, and months are even."""
    days = np.arange("2020-01-01", "2020-03-01", dtype="datetime64[D]")
    assert uneven_step(days) is None and uneven_step(np.delete(days, slice(10, 12))) == 11
    assert uneven_step(np.arange("2020-01", "2023-01", dtype="datetime64[M]").astype("datetime64[D]")) is None


@pytest.mark.parametrize("level", [1e6, 1e8, 1.7e9])
def test_an_offset_changes_no_scaled_value(level):
    """A level changes no scaled value, and 0.1 many times, whose mean is not exactly 0.1, is a constant."""
    waves = 10 * np.sin(np.arange(1000) / 7) + np.random.default_rng(0).normal(size=1000)
    values = np.stack([waves, waves + level, np.full(1000, 0.1)], 1)
    plain, shifted, constant = Scaling.of(values[:700]).scale(values).unbind(1)
    torch.testing.assert_close(shifted, plain, rtol=1e-5, atol=1e-5)
    assert abs(plain[:700].std(correction=0) - 1) < 1e-5 and constant.abs().max() < 1e-12


HALF_HOURS = pd.date_range("2020-01-20", periods=99, freq="30min")
LONG = pd.date_range("2019-11-01", periods=99, freq="MS")


@in_one_test(
    "column,times",
    [
        (HALF_HOURS.strftime("%Y-%m-%dT%H:%MZ"), HALF_HOURS),
        (LONG.strftime("%Y-%m"), LONG),
        (["2020-01-01", "2020-01-01 00:00:00.5"], pd.DatetimeIndex([0, 500_000_000]) + (LONG[2] - pd.Timestamp(0))),
    ],
)
def test_dates_in_the_order_of_iso_8601(column, times):
    """Dates of one column may be of several precisions."""
    assert (read_times(pd.Series(list(map(str, column))), None) == times).all()


@in_one_test(
    "column,message",
    [
        (LONG.strftime("%d/%m/%Y"), "holds no dates as 2020-01-31, but '01/11/2019': give a --date_format"),
        (LONG.strftime("%Y%m%d"), "but '20191101'"),
        (["2020-01-01 23:00", "2020-01-01 24:00"], "but '2020-01-01 24:00'"),
        (["2020-01-01", None], "but ''"),
    ],
)
def test_other_dates_are_refused(column, message):
    """Dates in another order are an error that names one: a guess could be another date."""
    with pytest.raises(ValueError, match=message):
        read_times(pd.Series(column if None in column else list(map(str, column)), dtype=str), None)


def test_the_format_of_dates_may_be_given(tmp_path):
    """--date_format decides, a unit of time since 1970 too; a date of another format is named."""
    seconds = (HALF_HOURS - pd.Timestamp(0)) / pd.Timedelta("1s")
    for factor, unit in ((1, "s"), (1000, "ms")):
        assert (read_times((seconds * factor).to_series().astype(str), unit) == HALF_HOURS).all()
    days = pd.date_range("2020-01-02", periods=20)
    file = tmp_path / "x.csv"
    pd.DataFrame({"date": days.strftime("%d/%m/%y"), "a": np.arange(20.0)}).to_csv(file, index=False)
    assert read_series(file, None, "%d/%m/%y").index.equals(days.rename("date").as_unit("us"))
    with pytest.raises(ValueError, match=r"x\.csv: the column date holds no dates of --date_format %m/%d/%y, but '13/"):
        read_series(file, None, "%m/%d/%y")


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators_are_read(separator, tmp_path):
    """A file may have a byte order mark, semicolons or tabs, and decimal commas; points for thousands are refused."""
    lines = [f"2020-01-{day:02d};1,{day:02d};-2" for day in range(1, 29)]
    text = "\ufeff" + "\n".join(['date;"wind, m/s";b', *lines]).replace(";", separator)
    (tmp_path / "x.csv").write_text(text, encoding="utf-8")
    series = read_series(tmp_path / "x.csv")
    assert list(series) == ["wind, m/s", "b"] and series.to_numpy()[4].tolist() == [1.05, -2]
    for column, value in {"wind, m/s": "1.000,05", "b": "1.000"}.items():
        changed = text.replace("1,05" if value.endswith("5") else f"{separator}-2", value.rjust(6, separator), 9)
        (tmp_path / "x.csv").write_text(changed, encoding="utf-8")
        with pytest.raises(ValueError, match=rf"the column {column} has {value} in row \d, not a number with a "):
            read_series(tmp_path / "x.csv")


@in_one_test(
    "change,message",
    [
        (lambda t: t.assign(c1=t.c1.where(t.index != 7)), "has nan in row 8, not a number: leave such rows out"),
        (lambda t: t.assign(c1=["?"] * len(t)), r"the column c1 has \? in row 1, not a number"),
        (lambda t: t.iloc[::-1], "the dates of the column date must increase"),
        (lambda t: t[["date"]], "has no column but date"),
        (lambda t: t.rename(columns={"date": "when"}), "--time_column date: .* has the columns when, c0, c1"),
    ],
)
def test_bad_files(change, message, tmp_path):
    """A file that is no series raises an error that names the column and the row, or the lost first row."""
    file = write_series(tmp_path / "waves.csv")
    change(pd.read_csv(file)).to_csv(file, index=False)
    with pytest.raises(ValueError, match=message):
        read_series(file, "date")
    file.write_text("2020-01-01,0.5\n2020-01-02,0.6\n2020-01-03,0.7\n")
    with pytest.raises(ValueError, match="begins with 2020-01-01, which is a date: give the file a first row of names"):
        read_series(file)


def test_times_with_a_zone_are_read(tmp_path):
    """Times with a zone are those in UTC, also where it changes within the file."""
    file = write_series(tmp_path / "waves.csv")
    plain, table = read_series(file), pd.read_csv(file)
    for zones in (["Z"] * 60, ["Z"] * 30 + ["-01:00"] * 30):
        shift = [0 if zone == "Z" else int(zone[:3]) for zone in zones]
        local = pd.to_datetime(table.date) + pd.to_timedelta(shift, unit="h")
        dates = local.dt.strftime("%Y-%m-%dT%H:%M:%S") + pd.Series(zones)
        table.assign(date=dates).to_csv(file, index=False)
        series = read_series(file)
        assert series.equals(plain) and digest_of(series) == digest_of(plain)
