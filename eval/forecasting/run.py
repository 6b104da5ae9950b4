"""Trains models to forecast the series of CSV files, scores them, and writes their tables.

    python -m eval.forecasting.run ETTh1.csv --horizons 96 192 336 720 --look_back 96 --output results/forecasting

A CSV file has a time column and a column per channel. A finished run is kept: the same command again goes on with the
next one.
"""

from argparse import Namespace
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader

from eval.common import harness
from eval.common.compared_models import named_errors, num_trained
from eval.common.harness import check_options, make_parser, record_run, run_of
from eval.common.records import read_records
from eval.forecasting import tables
from eval.forecasting.data import make_splits
from eval.forecasting.models import BASELINES, NAMES, ForecastTask, build_model
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.fitting import fit_forecaster
from titans_hf.cli.shared.time_series import Windows, digest_of, read_series, uneven_step

POSITIVE = {"look_back": 96, "max_steps": 1000, "eval_steps": 100, "patience": 3}
DECIMALS = 5


@dataclass(frozen=True, kw_only=True)
class Run(harness.Run):
    """`digest` is of the series; `settings` are fields of a Titans' configuration."""

    digest: str
    look_back: int
    horizon: int
    cycle_length: int
    split: list[float]
    max_steps: int
    eval_steps: int
    patience: int

    @property
    def name(self) -> str:
        return f"{self.data}-{self.look_back}-{self.horizon}-{self.row}-seed{self.seed}"

    def build_model(self, series: pd.DataFrame) -> nn.Module:
        """Builds the model for a series. Raises what `build_model` does."""
        task = ForecastTask(len(series.columns), self.look_back, self.horizon, self.cycle_length)
        return build_model(self.model, task, self.settings)


def parse_args(argv: list[str] | None) -> Namespace:
    parser = make_parser(__doc__, NAMES, NAMES, batch_size=32)
    parser.add_argument("files", nargs="+", type=Path, metavar="DATA.csv")
    parser.add_argument("--split", nargs=3, type=float, default=[12, 4, 4], help="months of 30 days of the three parts")
    parser.add_argument("--horizons", nargs="+", type=int, default=[96, 192, 336, 720], help="values to forecast")
    parser.add_argument("--cycle_length", type=int, default=0, help="values of a cycle that each model learns; 0: none")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    for name, number in POSITIVE.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    return parser.parse_args(argv)


def make_runs(args: Namespace, series: dict[str, pd.DataFrame]) -> list[Run]:
    """Makes the runs of the command; raises ValueError for options with which a run is not possible."""
    settings = check_options(args, **dict.fromkeys(POSITIVE, 1), horizons=1, cycle_length=0)
    if args.label in BASELINES:
        raise ValueError(f"--label {args.label} is the name of another model: give another name")
    changes = f"-cycle{args.cycle_length}" * bool(args.cycle_length)
    runs = []
    for data, horizon, model, seed in product(series, args.horizons, args.models, args.seeds):
        own = {"data": data, "digest": digest_of(series[data]), "model": model, "horizon": horizon, "seed": seed}
        own |= {"row": model.replace("titans", args.label or "titans") + changes}
        runs.append(run_of(Run, args, settings=settings if model.startswith("titans") else {}, **own))
    for run in {(run.data, run.horizon, run.model): run for run in runs}.values():
        of_run = series[run.data]
        window = next(iter(DataLoader(make_splits(of_run, run.split, run.look_back, run.horizon).train)))
        run.build_model(of_run)(**window)
    return runs


@torch.inference_mode()
def score(model: nn.Module, windows: Windows, batch_size: int, device: torch.device | str = "cpu") -> dict[str, float]:
    """Returns the mean squared and the mean absolute error over all windows, scaled as in training."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in DataLoader(windows, batch_size):
        future = batch.pop("future_values")
        forecast = model(**{name: x.to(device) for name, x in batch.items()})["prediction_outputs"].cpu()
        error = (forecast - future).double()
        sums += torch.stack([error.square().sum(), error.abs().sum()])
    means = sums / (len(windows) * windows[0]["future_values"].numel())
    return {name: round(x, DECIMALS) for name, x in zip(tables.METRICS, means.tolist(), strict=True)}


def train(run: Run, series: pd.DataFrame) -> dict[str, Any]:
    """Trains by AdamW with a cosine to 0, and scores the weights of the lowest validation loss.

    Raises ValueError where no validation loss was a number.
    """
    splits, model = make_splits(series, run.split, run.look_back, run.horizon), run.build_model(series)
    if model.cycle is not None:
        model.cycle.fit(splits.train.values[: splits.train.rows.stop])
    with named_errors(run.name):
        device = fit_forecaster(run, model, splits.train, splits.valid).args.device
    scores = {part: score(model, getattr(splits, part), 4 * run.batch_size, device) for part in ("valid", "test")}
    return {"parameters": num_trained(model), **scores}


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    series = {path.stem: read_series(path) for path in args.files}
    runs = make_runs(args, series)
    for name, one in series.items():
        if args.cycle_length and (row := uneven_step(one.index)) is not None:
            print(f"{name}: row {row} is not at the usual step: --cycle_length counts rows, not time", flush=True)
    for run in runs:
        record_run("forecasting", run, lambda run=run: train(run, series[run.data]), args.output)
    print("\n\n".join(tables.make_report(read_records(args.output, "forecasting"), [])))


if __name__ == "__main__":
    run_command(main)
