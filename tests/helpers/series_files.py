"""CSV files of time series for tests."""

from pathlib import Path

import numpy as np
import pandas as pd


def write_series(path: Path, rows: int = 60, channels: int = 2, seed: int = 0) -> Path:
    """Writes hourly sine waves with noise, and returns the path."""
    generator = np.random.default_rng(seed)
    table = {"date": pd.date_range("2020-01-01", periods=rows, freq="h")}
    for c in range(channels):
        table[f"c{c}"] = np.sin(np.arange(rows) / 3 + c) + 0.1 * generator.standard_normal(rows)
    pd.DataFrame(table).to_csv(path, index=False)
    return path
