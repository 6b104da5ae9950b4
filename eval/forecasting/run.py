"""Trains models to forecast the series of CSV files, scores them, and writes their tables.

    python -m eval.forecasting.run ETTh1.csv --horizons 96 192 336 720 --look_back 96 --output results/forecasting

A CSV file has a time column and a column per channel. A finished run is kept: the same command again goes on with the
next one.
"""

from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader

from eval.common.compared_models import num_trained
from eval.common.fitting import fit_forecaster
from eval.common.harness import check_options, make_parser, record_run
from eval.common.records import read_records
from eval.forecasting import tables
from eval.forecasting.models import MODELS
from eval.forecasting.series import Windows, digest_of, read_series, split_series
from titans_hf import TitansTimeSeriesConfig
from titans_hf.cli.shared.command_line import run_command

POSITIVE = {"look_back": 96, "max_steps": 1000, "eval_steps": 100, "patience": 3}
FIELDS = (*POSITIVE, "batch_size", "cycle_length", "learning_rate", "split")  # of a run, by the options' names
DAYS_OF_A_MONTH = 30  # as in the benchmark: 12, 4 and 4 months are 8,640, 2,880 and 2,880 hours


def make_splits(series: pd.DataFrame, months: list[float], look_back: int, horizon: int) -> list[Windows]:
    """Splits a series in time into three parts of so many months: the windows to train, to validate and to test on,
    scaled by the first part. Raises ValueError for parts that end after the series, or that have no window.
    """
    month = np.timedelta64(DAYS_OF_A_MONTH, "D") / np.median(np.diff(series.index))
    first, second, last = ends = np.cumsum([round(part * month) for part in months]).tolist()
    if last > len(series):
        raise ValueError(f"--split {' '.join(map(str, months))}: the parts end after {ends} of {len(series)} rows")
    rows = {"training": range(first), "validation": range(first, second), "test": range(second, last)}
    return split_series(series, rows, look_back, horizon)


@torch.inference_mode()
def score(model: nn.Module, windows: Windows, batch_size: int, device: torch.device | str = "cpu") -> dict[str, float]:
    """Returns the mean squared and the mean absolute error over all windows, scaled as in training."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in DataLoader(windows, batch_size):
        past = {name: x.to(device) for name, x in batch.items() if name != "future_values"}
        error = (model(**past)["prediction_outputs"].cpu() - batch["future_values"]).double()
        sums += torch.stack([error.square().sum(), error.abs().sum()])
    means = sums / (len(windows) * windows[0]["future_values"].numel())
    return {name: round(x, 5) for name, x in zip(tables.METRICS, means.tolist(), strict=True)}


def train(run: Namespace, series: pd.DataFrame) -> dict[str, Any]:
    """Trains by AdamW with a cosine to 0, and scores the weights of the lowest validation loss."""
    training, valid, test = make_splits(series, run.split, run.look_back, run.horizon)
    fields = (
        {"context_length": run.look_back} | run.settings | ({"memory_max_lr": 0} if run.model == "titans-off" else {})
    )
    fields |= dict(prediction_length=run.horizon, cycle_length=run.cycle_length, num_input_channels=len(series.columns))
    model = MODELS[run.model](TitansTimeSeriesConfig(**fields))
    if model.cycle is not None:
        model.cycle.fit(training.values[: training.rows.stop])
    device = fit_forecaster(run, model, training, valid).args.device
    scores = {name: score(model, part, 4 * run.batch_size, device) for name, part in (("valid", valid), ("test", test))}
    return {"parameters": num_trained(model), **scores}


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__, list(MODELS), batch_size=32)
    parser.add_argument("files", nargs="+", type=Path, metavar="DATA.csv")
    parser.add_argument("--split", nargs=3, type=float, default=[12, 4, 4], help="months of 30 days of the three parts")
    parser.add_argument("--horizons", nargs="+", type=int, default=[96, 192, 336, 720], help="values to forecast")
    parser.add_argument("--cycle_length", type=int, default=0, help="values of a cycle that each model learns; 0: none")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    for name, number in POSITIVE.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    args = parser.parse_args(argv)
    settings = check_options(args, TitansTimeSeriesConfig(), **dict.fromkeys(POSITIVE, 1), horizons=1, cycle_length=0)
    shared, cycle = {x: getattr(args, x) for x in FIELDS}, f"-cycle{args.cycle_length}" if args.cycle_length else ""
    for path in args.files:
        series = read_series(path)
        shared |= {"data": path.stem, "digest": digest_of(series)}
        for horizon, model, seed in product(args.horizons, args.models, args.seeds):
            of_model = settings if model.startswith("titans") else {}
            row = model.replace("titans", args.label or "titans") + cycle
            run = Namespace(**shared, model=model, row=row, settings=of_model, horizon=horizon, seed=seed)
            name = f"{path.stem}-{args.look_back}-{horizon}-{row}-seed{seed}"
            record_run("forecasting", name, run, lambda run=run, series=series: train(run, series), args.output)
    print("\n\n".join(tables.make_report(read_records(args.output, "forecasting"), [])))


if __name__ == "__main__":
    run_command(main)
