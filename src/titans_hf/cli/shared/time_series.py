"""Time series in CSV files: reading them, the step of their dates, scaling, and windows to forecast.

A series is a data frame: its columns are the channels, float64, and its index has the times, in UTC.
"""

import hashlib
import json
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from pandas.tseries.frequencies import to_offset

SEPARATORS = (",", ";", "\t")
UNITS = ("s", "ms", "us", "ns")  # of numbers since 1970, as a format of dates


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
        """Returns values (T, C) float32 with mean 0 and deviation 1. The difference is taken in float64: the mean may
        be much larger than the deviation.
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

    def __len__(self) -> int:
        return max(0, self.rows.stop - self.horizon - self.first_forecast + 1)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Returns past_values (look_back, C), future_values (horizon, C) and cycle_position, the row of the first
        value, a scalar: at equal steps, it gives the place in a cycle of any length.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        now = self.first_forecast + index
        return {
            "past_values": self.values[now - self.look_back : now],
            "future_values": self.values[now : now + self.horizon],
            "cycle_position": torch.tensor(now - self.look_back),
        }


def split_series(
    series: pd.DataFrame, parts: dict[str, range], look_back: int, horizon: int
) -> tuple[list[Windows], Scaling]:
    """Cuts the windows of each part, given by its name and rows, and returns the scaling of the first part, which
    scales all parts. Raises ValueError for a part that has no window.
    """
    first = next(iter(parts.values()))
    scaling = Scaling.of(series.to_numpy()[: max(1, first.stop)])
    values = scaling.scale(series.to_numpy())
    windows = [Windows(values, rows, look_back, horizon) for rows in parts.values()]
    for (name, rows), cut in zip(parts.items(), windows, strict=True):
        if not len(cut):
            raise ValueError(
                f"the {name} part has {len(rows)} of {len(values)} rows, in which there is no window of {look_back} "
                f"rows to read and {horizon} to forecast: read or forecast fewer rows, or give more"
            )
    return windows, scaling


def read_series(path: Path, time_column: str | None = None, date_format: str | None = None) -> pd.DataFrame:
    """Reads a CSV file: a time column, the first unless named, and one column per channel. The separator is the comma,
    semicolon or tab that is most frequent in the header. Without commas as separators, the decimal sign of the file may
    be a comma.

    Raises ValueError for a file that is not a CSV file or has no header, and, naming the column, for times that
    `read_times` cannot read or that do not increase, and for values that are not finite numbers.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    try:
        with path.open(encoding="utf-8-sig") as stream:
            header = re.sub('"[^"]*"', "", stream.readline())
        separator = max(SEPARATORS, key=header.count)
        read = partial(pd.read_csv, path, sep=separator, encoding="utf-8-sig")
        names = list(read(nrows=0).columns)
        name = names[0] if time_column is None else time_column
        table = read(dtype={name: str})
        kinds = table.dtypes[table.columns != name]
        decimal_comma = separator != "," and not all(map(pd.api.types.is_numeric_dtype, kinds))
        if decimal_comma:
            table = read(dtype={name: str}, decimal=",")
    except ValueError as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8 with a header: {error}") from error
    if name not in table:
        raise ValueError(f"--time_column {name}: {path} has the columns {', '.join(names)}")
    times = _times_of(path, table.pop(name), date_format)
    for channel, given in table.items():
        if not pd.api.types.is_numeric_dtype(given):
            signs = str.maketrans(",.", ".?") if decimal_comma else {}  # a point beside decimal commas is no number
            given = pd.to_numeric(given.astype(str).str.translate(signs), errors="coerce")
        wrong = ~np.isfinite(given.to_numpy(np.float64))
        if wrong.any():
            row = int(wrong.argmax())
            sign = " with a decimal comma, as this file has them" if decimal_comma else ""
            raise ValueError(
                f"{path}: the column {channel} has {table[channel][row]} in row {row + 1}, not a number{sign}: leave "
                "such rows out, or fill them in, for example by pandas.DataFrame.interpolate"
            )
    if not len(table.columns):
        raise ValueError(f"{path} has no column but {name}")
    return table.astype(np.float64).set_index(times)


def _times_of(path: Path, column: pd.Series, date_format: str | None) -> pd.DatetimeIndex:
    """Reads the column of times of a file; raises ValueError, naming file and column, as `read_series` says."""
    try:
        times = read_times(column, date_format)
    except ValueError as error:
        raise ValueError(f"{path}: the column {column.name} {error}") from error
    if len(times) < 2 or not (times.is_monotonic_increasing and times.is_unique):
        raise ValueError(f"{path}: the dates of the column {column.name} must increase from row to row")
    try:
        read_times(pd.Series([str(column.name)]), date_format)
    except ValueError:
        return times
    raise ValueError(f"{path} begins with {column.name}, which is a date: give the file a first row of names")


def read_times(column: pd.Series, date_format: str | None) -> pd.DatetimeIndex:
    """Returns the times of a column of strings, in UTC without a zone: dates in ISO 8601 (2020-01-31), or in
    `date_format`, a Python format or a unit of UNITS. Raises ValueError, naming a value, for any other column.
    """
    column = column.fillna("").str.strip()
    parse = partial(pd.to_datetime, utc=True, errors="coerce")
    if date_format in UNITS:
        times = parse(pd.to_numeric(column, errors="coerce"), unit=date_format)
    elif date_format is not None:
        times = parse(column, format=date_format)
    else:  # a number alone would be read as a year
        times = parse(column.where(column.str.match(r"\d{4}-\d")), format="ISO8601")
    if times.isna().any():
        form = f"of --date_format {date_format}" if date_format else "as 2020-01-31"
        raise ValueError(
            f"holds no dates {form}, but {column[times.isna()].iloc[0]!r}: give a --date_format, such as %d/%m/%y, or "
            "another --time_column"
        )
    return pd.DatetimeIndex(times).tz_localize(None)


def digest_of(series: pd.DataFrame) -> str:
    """Hashes a series; 12 hexadecimal digits."""
    times = series.index.to_numpy().astype("datetime64[ns]").tobytes()
    return hashlib.sha256(times + series.to_numpy().tobytes() + json.dumps(list(series)).encode()).hexdigest()[:12]


def uneven_step(times: pd.DatetimeIndex) -> int | None:
    """Returns the first row, counted from 1, whose step from the row before is below 0.5 or above 1.5 times the median
    step; None if there is none. With such a row, a cycle of rows is not a cycle of time.
    """
    shares = np.diff(times) / np.median(np.diff(times))
    uneven = np.flatnonzero((shares < 0.5) | (shares > 1.5))
    return int(uneven[0]) + 2 if len(uneven) else None


def frequency_of(times: pd.DatetimeIndex) -> str:
    """Names the step of times as pandas does: "h", "D", "MS" for the first days of months, "B" for business days.
    If pandas finds none, because rows are missing, it is the median step.
    """
    return pd.DatetimeIndex(times, freq="infer").freqstr or to_offset(pd.Timedelta(np.median(np.diff(times)))).freqstr


def steps_between(first: pd.Timestamp, time: pd.Timestamp, frequency: str) -> int:
    """Counts the steps from one time to another, negative if the second is earlier."""
    number = len(pd.date_range(*sorted((first, time)), freq=frequency)) - 1
    return number if first <= time else -number
