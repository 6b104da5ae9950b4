"""The parts of a time series: to train, to validate and to test on."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from titans_hf.cli.shared.time_series import Scaling, Windows, split_series

DAYS_OF_A_MONTH = 30  # as in the benchmark: 12, 4 and 4 months are 8,640, 2,880 and 2,880 hours


class Splits(NamedTuple):
    """The windows of each part, and the scaling of the training part, by which all are scaled."""

    train: Windows
    valid: Windows
    test: Windows
    scaling: Scaling


def rows_of_parts(times: pd.DatetimeIndex, parts: list[float]) -> list[range]:
    """Splits T rows in time: three months of 30 days each, or three shares where they sum to at most 1.

    Raises ValueError for parts that are not positive, for shares above 1 in sum and for more months than the rows span.
    """
    name = f"--split {' '.join(map(str, parts))}"
    if min(parts) <= 0:
        raise ValueError(f"{name}: must be three numbers above 0")
    if sum(parts) > 1 + 1e-9 and max(parts) < 1:
        raise ValueError(f"{name}: shares must sum to at most 1, but sum to {sum(parts):g}")
    if sum(parts) <= 1 + 1e-9:
        rows = [int(share * len(times)) for share in parts]
    else:
        month = np.timedelta64(DAYS_OF_A_MONTH, "D") / np.median(np.diff(times))
        rows = [round(part * month) for part in parts]
    ends = np.cumsum(rows).tolist()
    if ends[-1] > len(times):
        raise ValueError(
            f"{name}: months of 30 days are {ends[-1]} rows, but there are {len(times)}; shares, as 0.7 0.1 0.2, split "
            "any number"
        )
    return [range(end - length, end) for length, end in zip(rows, ends, strict=True)]


def make_splits(series: pd.DataFrame, parts: list[float], look_back: int, horizon: int) -> Splits:
    """Splits a series in time, scales it by the training part, and cuts the windows of each part.

    Raises ValueError for a part that has no window, and for a channel that is constant while training.
    """
    rows = dict(zip(("training", "validation", "test"), rows_of_parts(series.index, parts), strict=True))
    for name, values in series[: rows["training"].stop].items():
        if values.nunique() < 2:
            raise ValueError(f"the channel {name} is constant in the training part")
    windows, scaling = split_series(series, rows, look_back, horizon)
    return Splits(*windows, scaling)
