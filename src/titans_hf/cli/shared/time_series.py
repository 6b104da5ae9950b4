"""Time series in CSV files: reading them, the step of their dates, scaling, and windows to forecast."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from pandas.tseries.frequencies import to_offset

SEPARATORS = (",", ";", "\t")
UNITS = {"s": 1e11, "ms": 1e14, "us": 1e17}  # a number below 1e11 is in seconds (3,000 years), and so on


class Series(NamedTuple):
    """times (T,) datetime64; values (T, C) float64; names of the C channels, and of the column of times."""

    times: np.ndarray
    values: np.ndarray
    names: list[str]
    time_name: str = "date"

    @property
    def digest(self) -> str:
        """Hashes the whole; 12 hexadecimal digits."""
        times = self.times.astype("datetime64[ns]").tobytes()
        return hashlib.sha256(times + self.values.tobytes() + json.dumps(self.names).encode()).hexdigest()[:12]


class Scaling(NamedTuple):
    """mean, std (C,) float64 of each channel; std is 1 for a channel that is constant."""

    mean: np.ndarray
    std: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> "Scaling":
        """Measures values (T, C)."""
        constant = values.max(0) == values.min(0)  # the deviation of many 0.1 is not exactly 0
        return cls(values.mean(0), np.where(constant, 1.0, values.std(0)))

    def scale(self, values: np.ndarray) -> torch.Tensor:
        """Returns values (T, C) float32 with mean 0 and deviation 1. The difference is taken in float64: a level may be
        large against the deviation.
        """
        return torch.from_numpy(((values - self.mean) / self.std).astype(np.float32))

    def unscale(self, values: torch.Tensor) -> np.ndarray:
        """Returns values (T, C) in the units of the series, float64."""
        return values.double().numpy() * self.std + self.mean


class Windows(torch.utils.data.Dataset):
    """Every window of `look_back` and `horizon` values whose forecast lies within `rows`, in steps of one.

    values (T, C) float32: of all parts; the look-back of a window may lie before the first of `rows`.
    """

    def __init__(self, values: torch.Tensor, rows: range, look_back: int, horizon: int):
        self.values, self.rows, self.look_back, self.horizon = values, rows, look_back, horizon
        self.first_forecast = max(rows.start, look_back)
        self.number = rows.stop - horizon - self.first_forecast + 1

    def __len__(self) -> int:
        return max(0, self.number)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Returns past_values (look_back, C), future_values (horizon, C) and cycle_position, the row of the first value
        as a scalar: of values at equal steps, it gives the place in a cycle of any length.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        now = self.first_forecast + index
        return {
            "past_values": self.values[now - self.look_back : now],
            "future_values": self.values[now : now + self.horizon],
            "cycle_position": torch.tensor(now - self.look_back),
        }


def read_series(path: Path, time_column: str | None = None, date_format: str | None = None) -> Series:
    """Reads a CSV file: a time column, the first unless named, and one column per channel. The separator is a comma, a
    semicolon or a tab, whichever the header has most of. If it is no comma, numbers may have a decimal comma.

    Raises ValueError for a file that is no CSV file, and, naming the column, for times that are no dates or do not
    increase, for dates whose day and month cannot be told apart, and for values that are not finite numbers.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    try:
        with path.open(encoding="utf-8-sig") as stream:
            header = stream.readline()
        separator = max(SEPARATORS, key=header.count)
        table = pd.read_csv(path, sep=separator, encoding="utf-8-sig")
    except ValueError as error:
        raise ValueError(f"{path} is no CSV file in UTF-8 with a header: {error}") from error
    name = table.columns[0] if time_column is None else time_column
    if name not in table:
        raise ValueError(f"--time_column {name}: {path} has the columns {', '.join(table.columns)}")
    try:
        times = read_times(table.pop(name), date_format)
    except AmbiguousDates as error:
        raise ValueError(f"{path}: the column {name} {error}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: the column {name} holds no dates ({error}); --time_column names another") from error
    if len(times) < 2 or not (np.diff(times) > np.timedelta64(0)).all():
        raise ValueError(f"{path}: the dates of the column {name} must increase from row to row")
    for channel in table:
        given = table[channel]
        if separator != "," and not pd.api.types.is_numeric_dtype(given):
            given = given.str.replace(",", ".")
        numbers = pd.to_numeric(given, errors="coerce").astype(np.float64)
        if not np.isfinite(numbers).all():
            row = int(np.flatnonzero(~np.isfinite(numbers))[0])
            raise ValueError(
                f"{path}: the column {channel} has {given[row]} in row {row + 1}, no number: leave such rows "
                "out, or fill them in, for example by pandas.DataFrame.interpolate"
            )
        table[channel] = numbers
    if not len(table.columns):
        raise ValueError(f"{path} has no column but {name}")
    return Series(times, table.to_numpy(np.float64), list(table.columns), name)


class AmbiguousDates(ValueError):
    """Dates that make sense with the day first and with the month first."""


def read_times(column: pd.Series, date_format: str | None) -> np.ndarray:
    """Returns the times (T,) datetime64 of a column, in UTC. The column holds dates in the format, dates that pandas
    reads, or numbers. Numbers are dates (20240131), years (2024), or times since 1970; their size says whether in
    seconds or thousandths, millionths or billionths of a second.

    In dates as 01/02/2020, day and month are read in the order in which the dates increase.

    Raises AmbiguousDates where both orders give increasing dates, and ValueError for a column of something else.
    """
    if date_format is not None:
        return _naive(pd.to_datetime(column, format=date_format, utc=True))
    if pd.api.types.is_numeric_dtype(column):
        largest = column.abs().max()
        digits = (column.astype("int64") if (column % 1 == 0).all() else column).astype(str)
        for form, length in (("%Y%m%d", 8), ("%Y", 4)):
            dates = pd.to_datetime(digits.where(digits.str.len() == length), format=form, errors="coerce", utc=True)
            if dates.notna().all():
                return _naive(dates)
        unit = next((unit for unit, most in UNITS.items() if largest < most), "ns")
        return _naive(pd.to_datetime(column, unit=unit, utc=True))
    parts = column.astype(str).str.extract(r"^\s*(\d{1,2})[./-](\d{1,2})[./-](\d{4})(.*)$")
    if parts.isna().any(axis=None):
        return _naive(pd.to_datetime(column, utc=True))
    first, second, year, rest = (parts[i] for i in range(4))
    found = {}
    for form, day, month in (("%d/%m/%Y", first, second), ("%m/%d/%Y", second, first)):
        if month.astype(int).max() > 12:
            continue
        text = year + "-" + month.str.zfill(2) + "-" + day.str.zfill(2) + rest
        times = pd.to_datetime(text, errors="coerce", utc=True)
        if times.notna().all() and times.is_monotonic_increasing:
            found[form] = _naive(times)
    if len(found) > 1 and not (found["%d/%m/%Y"] == found["%m/%d/%Y"]).all():
        raise AmbiguousDates(
            f"has dates such as {column.iloc[0]}, which increase with the day first and with the month first: "
            "give --date_format, %d/%m/%Y or %m/%d/%Y"
        )
    return next(iter(found.values())) if found else _naive(pd.to_datetime(column, utc=True))


def _naive(times: pd.Series) -> np.ndarray:
    return times.dt.tz_localize(None).to_numpy()


def uneven_step(times: np.ndarray) -> int | None:
    """Returns the first row whose time since the row before is less than half the usual one (the median) or more than
    one and a half times that, counted from 1; None if all steps are usual. With such a row, a cycle of rows is no cycle
    of time.
    """
    shares = np.diff(times) / np.median(np.diff(times))
    uneven = np.flatnonzero((shares < 0.5) | (shares > 1.5))
    return int(uneven[0]) + 2 if len(uneven) else None


def frequency_of(times: np.ndarray) -> str:
    """Names the step of times (T,) as pandas does: "h", "D", "MS" for the first days of months, "B" for business days.
    Where pandas finds none, since rows are left out, it is the usual step (the median).
    """
    return pd.DatetimeIndex(times, freq="infer").freqstr or to_offset(pd.Timedelta(np.median(np.diff(times)))).freqstr


def times_after(last: np.datetime64, frequency: str, number: int) -> pd.DatetimeIndex:
    """Returns the `number` times that follow the last one."""
    offset = to_offset(frequency)
    return pd.date_range(pd.Timestamp(last) + offset, periods=number, freq=offset)


def steps_between(first: np.datetime64, time: np.datetime64, frequency: str) -> int:
    """Counts the steps from one time to another, negative where it is earlier."""
    start, end = sorted((pd.Timestamp(first), pd.Timestamp(time)))
    number = len(pd.date_range(start, end, freq=to_offset(frequency))) - 1
    return number if first <= time else -number
