"""The parts of a time series: to train, to validate and to test on."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from titans_hf.cli.shared.time_series import Windows, split_series

DAYS_OF_A_MONTH = 30  # as in the benchmark: 12, 4 and 4 months are 8,640, 2,880 and 2,880 hours


class Splits(NamedTuple):
    """The windows of each part, whose values are scaled by the training part."""

    train: Windows
    valid: Windows
    test: Windows


def make_splits(series: pd.DataFrame, months: list[float], look_back: int, horizon: int) -> Splits:
    """Splits a series in time into three parts of so many months, and cuts the windows of each part.

    Raises ValueError for parts that are not above 0, that have more rows than the series, or that have no window.
    """
    month = np.timedelta64(DAYS_OF_A_MONTH, "D") / np.median(np.diff(series.index))
    first, second, last = ends = np.cumsum([round(part * month) for part in months]).tolist()
    if min(months) <= 0 or last > len(series):
        text = f"must be three numbers of months above 0, of {len(series)} rows together, but end after {ends}"
        raise ValueError(f"--split {' '.join(map(str, months))}: {text}")
    rows = {"training": range(first), "validation": range(first, second), "test": range(second, last)}
    return Splits(*split_series(series, rows, look_back, horizon)[0])
