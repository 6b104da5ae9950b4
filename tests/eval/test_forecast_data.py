"""Reading of series, and their parts: months, windows and steps by hand."""

import numpy as np
import pandas as pd
import pytest
import torch
from covering import in_one_test

from eval.forecasting.data import make_splits, rows_of_parts
from titans_hf.cli.shared.time_series import Windows, read_series, read_times, uneven_step

HOURS = pd.date_range("2020-01-01", periods=1000, freq="h")


def test_months_are_of_thirty_days():
    """12, 4 and 4 months of hours are 8,640, 2,880 and 2,880 rows, of quarter hours four times as many."""
    for freq, per_hour in (("h", 1), ("15min", 4)):
        times = pd.date_range("2016-07-01", periods=17_420 * per_hour, freq=freq)
        ends = [0, 8640 * per_hour, 11520 * per_hour, 14400 * per_hour]
        assert rows_of_parts(times, [12, 4, 4]) == [range(*ends[i : i + 2]) for i in range(3)]
    assert rows_of_parts(times[:10], [0.5, 0.2, 0.3]) == [range(0, 5), range(5, 7), range(7, 10)]


def test_windows_by_hand():
    """In 10 rows with forecasts within rows 4 to 9, a look-back of 3 and a horizon of 2 there are 5 windows; a first
    part needs its own look-back.
    """
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
def test_an_offset_changes_no_scaled_value(level, tmp_path):
    """A meter's total, or a price in small units, is scaled to the values of the same series without its level."""
    waves = 10 * np.sin(np.arange(1000) / 7) + np.random.default_rng(0).normal(size=1000)
    found = []
    for name, values in (("plain", waves), ("level", waves + level)):
        pd.DataFrame({"date": HOURS, "a": values}).to_csv(tmp_path / f"{name}.csv", index=False)
        found.append(make_splits(read_series(tmp_path / f"{name}.csv"), [0.7, 0.1, 0.2], 24, 8).test.values)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_constant_that_is_no_binary_fraction_is_constant(tmp_path):
    """The mean of 0.1 many times is not exactly 0.1, and its deviation not exactly 0."""
    pd.DataFrame({"date": HOURS, "a": np.arange(1000.0), "b": 0.1}).to_csv(tmp_path / "x.csv", index=False)
    with pytest.raises(ValueError, match="the channel b is constant in the training part"):
        make_splits(read_series(tmp_path / "x.csv"), [0.7, 0.1, 0.2], 24, 8)


HALF_HOURS, LONG = (
    pd.date_range("2020-01-20", periods=99, freq="30min"),
    pd.date_range("2019-11-01", periods=99, freq="MS"),
)


@in_one_test(
    "column,times",
    [
        *((HALF_HOURS.strftime(form), HALF_HOURS) for form in ("%m/%d/%Y %I:%M:%S %p", "%Y-%m-%dT%H:%MZ")),
        *((LONG.strftime(form), LONG) for form in ("%Y-%m", "%m/%Y", "%d %B %Y")),
        *(
            (x.strftime(form), x)
            for x in (LONG[:1].append(LONG + pd.Timedelta("13D")),)
            for form in ("%d/%m/%Y", "%m/%d/%Y")
        ),
        (["1.1.2020", "13.1.2020"], pd.to_datetime(["2020-01-01", "2020-01-13"])),
        (
            ["2020-01-01", "2020-01-01 00:00:00.5"],
            pd.to_datetime(["2020-01-01", "2020-01-01 00:00:00.5"], format="ISO8601"),
        ),
    ],
)
def test_dates_are_read_in_the_format_of_the_column(column, times):
    """Dates are read in the one format in which the column increases."""
    assert (read_times(pd.Series(list(map(str, column))), None) == times).all()


@in_one_test(
    "column,message",
    [
        (
            LONG[2:13].strftime("%d/%m/%Y"),
            "has dates as 01/01/2020, which increase in two readings: give --date_format",
        ),
        (LONG.strftime("%d/%m/%y"), "holds no dates with a year of four digits, but '01/11/19': give a --date_format"),
        (LONG.strftime("%y/%m/%d"), "but '19/11/01': give a --date_format"),
        (LONG.strftime("%Y%m%d"), "but '20191101'"),
        (range(43832, 43850), "but '43832'"),
        ([1749 + (i + 0.5) / 12 for i in range(24)], "but '1749.04"),
        (["1-Feb", "1-Mar"], "but '1-Feb'"),
        (["2020-01-01 23:00", "2020-01-01 24:00"], "but '2020-01-01 24:00'"),
        (["2020-01-01", "soon"], "but 'soon'"),
        (["2020-01-01", None], "but ''"),
    ],
)
def test_dates_that_may_be_others_are_refused(column, message):
    """Dates without a known format, or with two, are an error that says which: a forecast has the dates of its file."""
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


def test_a_file_without_a_header_is_refused(tmp_path):
    """Its first row would be taken for names, and be lost."""
    (tmp_path / "x.csv").write_text("2020-01-01,0.5\n2020-01-02,0.6\n2020-01-03,0.7\n")
    with pytest.raises(ValueError, match="begins with 2020-01-01, which is a date: give the file a first row of names"):
        read_series(tmp_path / "x.csv")


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators_are_read(separator, tmp_path):
    """A file as spreadsheets write it, with a byte order mark, semicolons or tabs, and a comma for the point, which a
    quoted name may have too. A point for thousands is refused.
    """
    lines = [f"2020-01-{day:02d};1,{day:02d};-2" for day in range(1, 29)]
    text = "\ufeff" + "\n".join(['date;"wind, m/s";b', *lines]).replace(";", separator)
    (tmp_path / "x.csv").write_text(text, encoding="utf-8")
    series = read_series(tmp_path / "x.csv")
    assert list(series) == ["wind, m/s", "b"] and series.to_numpy()[4].tolist() == [1.05, -2]
    for column, value in {"wind, m/s": "1.000,05", "b": "1.000"}.items():
        changed = text.replace("1,05" if value.endswith("5") else f"{separator}-2", value.rjust(6, separator), 9)
        (tmp_path / "x.csv").write_text(changed, encoding="utf-8")
        with pytest.raises(
            ValueError, match=rf"the column {column} has {value} in row \d, not a number with a decimal comma"
        ):
            read_series(tmp_path / "x.csv")
