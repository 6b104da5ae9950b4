"""Trains models to forecast the series of CSV files, scores them, and writes their tables.

    python -m eval.forecasting.run ETTh1.csv --horizons 96 192 336 720 --look_back 96 --output results/forecasting
    python -m eval.forecasting.run mine.csv --split 0.7 0.1 0.2 --horizons 24 --output results/mine

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
from eval.common.records import Record, read_records
from eval.forecasting import tables
from eval.forecasting.data import make_splits
from eval.forecasting.models import BASELINES, NAMES, ForecastTask, build_model, config_of
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.fitting import fit_forecaster
from titans_hf.cli.shared.time_series import Windows, digest_of, read_series, uneven_step

POSITIVE = ("look_back", "max_steps", "eval_steps", "patience")
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

    def task(self, num_channels: int) -> ForecastTask:
        """Returns the task, the same for all models."""
        return ForecastTask(num_channels, self.look_back, self.horizon, self.cycle_length)


def parse_args(argv: list[str] | None) -> Namespace:
    parser = make_parser(__doc__, NAMES, NAMES, batch_size=32)
    parser.add_argument("files", nargs="+", type=Path, metavar="DATA.csv")
    parser.add_argument("--time_column", help="name of the column of dates; default: the first column")
    parser.add_argument("--date_format", help="format of the dates, such as %%d/%%m/%%Y, or s, ms, ... since 1970")
    parser.add_argument(
        "--split",
        nargs=3,
        type=float,
        default=[12, 4, 4],
        help="training, validation and test part: months of 30 days, or shares that sum to at most 1",
    )
    parser.add_argument("--look_back", type=int, default=96, help="values that a forecast is made from")
    parser.add_argument("--horizons", nargs="+", type=int, default=[96, 192, 336, 720], help="values to forecast")
    parser.add_argument("--cycle_length", type=int, default=0, help="values of a cycle that each model learns; 0: none")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--eval_steps", type=int, default=100, help="steps between two evaluations")
    parser.add_argument("--patience", type=int, default=3, help="evaluations without a lower validation loss")
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
        build_model(run.model, run.task(len(of_run.columns)), run.settings)(**window)
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


def make_run(run: Run, series: pd.DataFrame, output: Path) -> Record:
    """Trains by AdamW with a cosine to 0, and scores the weights of the lowest validation loss, unless the folder
    `output` has the record.

    Raises ValueError where no validation loss was a number.
    """
    task = run.task(len(series.columns))

    def make() -> dict[str, Any]:
        splits = make_splits(series, run.split, run.look_back, run.horizon)
        model, best, device = build_model(run.model, task, run.settings), 0, torch.device("cpu")
        if model.cycle is not None:
            model.cycle.fit(splits.train.values[: splits.train.rows.stop])
        if parameters := num_trained(model):
            with named_errors(run.name):
                trainer = fit_forecaster(run, model, splits.train, splits.valid)
            best, device = trainer.state.best_global_step, trainer.args.device
        parts = {"valid": splits.valid, "test": splits.test}
        return {
            "parameters": parameters,
            "best_step": best,
            **{name: score(model, part, 4 * run.batch_size, device) for name, part in parts.items()},
            "windows": [len(part) for part in splits[:3]],
        }

    return record_run("forecasting", run, config_of(run.model, task, run.settings), make, output)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    series = {path.stem: read_series(path, args.time_column, args.date_format) for path in args.files}
    if len(series) < len(args.files):
        raise ValueError(f"two DATA.csv have the same name: {', '.join(map(str, args.files))}")
    runs = make_runs(args, series)
    for name, one in series.items():
        if args.cycle_length and (row := uneven_step(one.index)) is not None:
            print(f"{name}: row {row} is not at the usual step: --cycle_length counts rows, not time", flush=True)
    for run in runs:
        make_run(run, series[run.data], args.output)
    print("\n\n".join(tables.make_report(read_records(args.output, "forecasting"), [])))


if __name__ == "__main__":
    run_command(main)
