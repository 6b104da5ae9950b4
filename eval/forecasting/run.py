"""Trains models to forecast the series of CSV files, scores them, and writes their tables.

    python -m eval.forecasting.run ETTh1.csv --horizons 96 192 336 720 --look_back 96 --output results/forecasting
    python -m eval.forecasting.run mine.csv --split 0.7 0.1 0.2 --horizons 24 --output results/mine

A CSV file has a time column and a column per channel. A finished run is kept: the same command again goes on with the
next one.
"""

from argparse import Namespace
from itertools import product
from pathlib import Path

import pandas as pd
from torch.utils.data import DataLoader

from eval.common.harness import check_options, make_parser, reported, run_of
from eval.forecasting import tables
from eval.forecasting.data import make_splits
from eval.forecasting.models import BASELINES, NAMES, build_model, config_of, forecasts
from eval.forecasting.training import INPUTS, Run, make_run
from titans_hf import TitansTimeSeriesConfig
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.time_series import digest_of, read_series, uneven_step
from titans_hf.time_series_titans import LOSSES

POSITIVE = ("look_back", "max_steps", "eval_steps", "patience")


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
    parser.add_argument("--loss", choices=LOSSES, default="mse", help="squared or absolute error, of all models")
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
    # Cycle and loss of all models of the command are in the names of the rows, unless they are the published ones.
    changes = f"-cycle{args.cycle_length}" * bool(args.cycle_length) + f"-{args.loss}" * (args.loss != "mse")
    runs = []
    for data, horizon, model, seed in product(series, args.horizons, args.models, args.seeds):
        own = {"data": data, "digest": digest_of(series[data]), "model": model, "horizon": horizon, "seed": seed}
        own |= {"row": model.replace("titans", args.label or "titans") + changes}
        runs.append(run_of(Run, args, settings=settings if model.startswith("titans") else {}, **own))
    for run in {(run.data, run.horizon, run.model): run for run in runs}.values():
        of_run = series[run.data]
        window = next(iter(DataLoader(make_splits(of_run, run.split, run.look_back, run.horizon).train)))
        model = build_model(run.model, run.task(len(of_run.columns)), run.settings)
        forecasts(model, *(window[name] for name in INPUTS))
    return runs


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    series = {path.stem: read_series(path, args.time_column, args.date_format) for path in args.files}
    if len(series) < len(args.files):
        raise ValueError(f"two DATA.csv have the same name: {', '.join(map(str, args.files))}")
    runs = make_runs(args, series)
    for name, one in series.items():
        if args.cycle_length and (row := uneven_step(one.index)) is not None:
            print(f"{name}: row {row} is not at the usual step: --cycle_length counts rows, not time", flush=True)

    def config_for(run: Run) -> TitansTimeSeriesConfig | None:
        return config_of(run.model, run.task(len(series[run.data].columns)), run.settings)

    with reported("forecasting", tables, runs, config_for, args.output):
        for run in runs:
            make_run(run, series[run.data], args.output)


if __name__ == "__main__":
    run_command(main)
