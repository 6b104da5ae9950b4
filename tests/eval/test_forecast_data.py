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
        times = pd.date_range("2016-07-01", periods=17_420 * per_hour, freq=freq).to_numpy()
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


@in_one_test("unit", ["s", "ms", "us", "ns"])
def test_numbers_are_times_since_1970(unit):
    """Numbers are read in the unit that their size shows."""
    numbers = pd.Series(HOURS.astype(f"datetime64[{unit}]").astype("int64"))
    assert (read_times(numbers, None) == HOURS.to_numpy()).all()


def test_numbers_are_dates():
    """Numbers as 20240131, and years, are dates."""
    days = pd.date_range("2024-01-25", periods=20)
    assert (read_times(pd.Series(days.strftime("%Y%m%d").astype(int)), None) == days.to_numpy()).all()
    years = read_times(pd.Series([1999, 2000, 2001]), None)
    assert years.astype("datetime64[Y]").astype(str).tolist() == ["1999", "2000", "2001"]


@in_one_test("form", ["%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y %H:%M"])
def test_the_order_of_day_and_month_is_the_one_that_increases(form):
    """Dates of more than a month are read in the only order in which they are dates and increase."""
    for days in (pd.date_range("2020-01-01", periods=400), pd.date_range("2020-11-30", periods=9)):
        assert (read_times(pd.Series(days.strftime(form)), None) == days.to_numpy()).all()


def test_dates_that_may_be_read_in_two_ways_are_refused(tmp_path):
    """The first days of twelve months may be twelve days of January: the format decides."""
    months = pd.date_range("2020-01-01", periods=12, freq="MS")
    file = tmp_path / "x.csv"
    pd.DataFrame({"date": months.strftime("%d/%m/%Y"), "a": np.arange(12.0)}).to_csv(file, index=False)
    with pytest.raises(ValueError, match=r"x\.csv: the column date has dates such as 01/01/2020.*--date_format"):
        read_series(file)
    assert (read_series(file, None, "%d/%m/%Y").times == months.to_numpy()).all()
    assert (read_series(file, None, "%m/%d/%Y").times == pd.date_range("2020-01-01", periods=12).to_numpy()).all()


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators_are_read(separator, tmp_path):
    """A file as spreadsheets write it, with a byte order mark, semicolons or tabs, and a comma for the point."""
    lines = [f"2020-01-{day:02d};1,{day:02d};-2" for day in range(1, 29)]
    text = "\ufeff" + "\n".join(["date;a;b", *lines]).replace(";", separator)
    (tmp_path / "x.csv").write_text(text, encoding="utf-8")
    series = read_series(tmp_path / "x.csv")
    assert series.names == ["a", "b"] and series.values[4].tolist() == [1.05, -2]
    (tmp_path / "x.csv").write_text(text.replace("1,05", "1.000,05"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"the column a has 1\.000\.05 in row 5, no number"):
        read_series(tmp_path / "x.csv")
