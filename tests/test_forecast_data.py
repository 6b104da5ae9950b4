"""eval/forecast_data.py: months, windows and steps by hand."""

import numpy as np
import pandas as pd
import torch

from eval.forecasting.data import Windows, rows_of_parts, uneven_step


def test_months_are_of_thirty_days():
    """12, 4 and 4 months of hours are 8,640, 2,880 and 2,880 rows, of quarter hours four times as many. If it failed,
    no figure could be compared with published ones.
    """
    for freq, per_hour in (("h", 1), ("15min", 4)):
        times = pd.date_range("2016-07-01", periods=17_420 * per_hour, freq=freq).to_numpy()
        ends = [0, 8640 * per_hour, 11520 * per_hour, 14400 * per_hour]
        assert rows_of_parts(times, [12, 4, 4]) == [range(*ends[i : i + 2]) for i in range(3)]
    assert rows_of_parts(times[:10], [0.5, 0.2, 0.3]) == [range(0, 5), range(5, 7), range(7, 10)]


def test_windows_by_hand():
    """In 10 rows with forecasts within rows 4 to 9, a look-back of 3 and a horizon of 2 there are 5 windows; a first
    part needs its own look-back. If it failed, test values would be trained on, or some never tested.
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
    """The row after a gap is found, and months are even: otherwise a shifted cycle would stay unnoticed, or a warning
    would come for every series of months.
    """
    days = np.arange("2020-01-01", "2020-03-01", dtype="datetime64[D]")
    assert uneven_step(days) is None and uneven_step(np.delete(days, slice(10, 12))) == 11
    assert uneven_step(np.arange("2020-01", "2023-01", dtype="datetime64[M]").astype("datetime64[D]")) is None
