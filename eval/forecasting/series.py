"""Time series of CSV files, cut into scaled windows."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch


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


def split_series(series: pd.DataFrame, parts: dict[str, range], look_back: int, horizon: int) -> list[Windows]:
    """Cuts the windows of each part, given by its name and rows. All parts are scaled by the mean and deviation of the
    first one. Raises ValueError for a part that has no window.
    """
    first = series.to_numpy()[: max(1, next(iter(parts.values())).stop)]
    constant = first.max(0) == first.min(0)  # the deviation of many 0.1 is not exactly 0
    scaled = (series.to_numpy() - first.mean(0)) / np.where(constant, 1.0, first.std(0))
    values = torch.from_numpy(scaled.astype(np.float32))
    windows = [Windows(values, rows, look_back, horizon) for rows in parts.values()]
    for (name, rows), cut in zip(parts.items(), windows, strict=True):
        if not len(cut):
            raise ValueError(
                f"the {name} part has {len(rows)} of {len(values)} rows, in which there is no window of {look_back} "
                f"rows to read and {horizon} to forecast: read or forecast fewer rows, or give more"
            )
    return windows


def read_series(path: Path) -> pd.DataFrame:
    """Reads a CSV file: a column of times that increase, then one column per channel. Returns a frame of float64 whose
    index has the times. Raises ValueError for any other file.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    try:
        table = pd.read_csv(path, index_col=0, encoding="utf-8-sig").astype(np.float64)
        table.index = pd.to_datetime(table.index)
    except ValueError as error:
        raise ValueError(f"{path} is not a CSV file of dates and numbers: {error}") from error
    if not (table.index.is_monotonic_increasing and table.index.is_unique and len(table.columns)):
        raise ValueError(f"{path} must have dates that increase from row to row, and a column of numbers")
    if not np.isfinite(table.to_numpy()).all():
        raise ValueError(f"{path} has values that are not finite numbers")
    return table


def digest_of(series: pd.DataFrame) -> str:
    """Hashes a series; 12 hexadecimal digits."""
    times = series.index.to_numpy().astype("datetime64[ns]").tobytes()
    return hashlib.sha256(times + series.to_numpy().tobytes() + json.dumps(list(series)).encode()).hexdigest()[:12]
