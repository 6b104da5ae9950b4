"""Trains a Titans on the time series of a CSV file, or loads it, and writes the values that follow."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from transformers import set_seed

from titans_hf import TitansForTimeSeriesPrediction, TitansTimeSeriesConfig
from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf.cli.shared.checkpoints import load_config, loading_weights
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.fitting import fit_forecaster
from titans_hf.cli.shared.markdown_tables import markdown_table
from titans_hf.cli.shared.time_series import (
    Scaling,
    Windows,
    frequency_of,
    read_series,
    split_series,
    steps_between,
    uneven_step,
)
from titans_hf_console import FORECAST_TRAINING, parse

TABLE, PICTURE = "forecast.csv", "forecast.png"
FACTS = "series.json"  # beside a model: facts of its training data
MOST_PANELS = 8  # channels that are drawn


def check_args(args: argparse.Namespace) -> None:
    """Raises ValueError for impossible options, and for options without effect."""
    check_minimums(args, horizon=1, cycle_length=0, seed=0)
    check_minimums(args, **dict.fromkeys(("look_back", "batch_size", "max_steps", "eval_steps", "patience"), 1))
    check_folder(args.output, "--output")
    if args.data.resolve() == (args.output / TABLE).resolve():
        raise ValueError(f"--output {args.output}: DATA {args.data} lies there, and would be written over")
    if args.model is not None:
        given = [name for name, (default, _) in FORECAST_TRAINING.items() if getattr(args, name) != default]
        if given:
            raise ValueError(
                f"--{given[0]} is an option of training, but --model {args.model} is already trained: leave one out"
            )
        return
    if args.horizon is None:
        raise ValueError("--horizon is missing: the number of rows to forecast")
    if not args.learning_rate > 0:
        raise ValueError(f"--learning_rate must be above 0, but is {args.learning_rate}")
    if not 0 < args.validation < 1:
        raise ValueError(f"--validation must be a share between 0 and 1, but is {args.validation}")
    patch = TitansTimeSeriesConfig.patch_length
    if args.look_back % patch:
        raise ValueError(f"--look_back must be a multiple of {patch}, but is {args.look_back}")
    if (args.output / FACTS).exists() or (args.output / "config.json").exists():
        raise ValueError(f"--output {args.output} has a model: load it by --model {args.output}, or give a new folder")


@torch.inference_mode()
def absolute_errors(
    model: TitansForTimeSeriesPrediction, windows: Windows, scaling: Scaling, batch_size: int, repeated: int
) -> np.ndarray:
    """Returns the mean absolute error of each channel (C, 2) in the units of the series, of the model and of the last
    `repeated` rows repeated. It needs the memory of `batch_size` windows.
    """
    model.eval()
    sums, steps = torch.zeros(2, windows.values.shape[1], dtype=torch.float64), torch.arange(windows.horizon)
    for batch in torch.utils.data.DataLoader(windows, batch_size):
        past, position = (batch[name].to(model.device) for name in ("past_values", "cycle_position"))
        now = batch["cycle_position"][:, None] + windows.look_back
        forecast = model(past, cycle_position=position).prediction_outputs.cpu()
        for row, guess in enumerate((forecast, windows.values[now - repeated + steps % repeated])):  # (B, horizon, C)
            sums[row] += (guess - batch["future_values"]).abs().double().sum((0, 1))
    return (sums / (len(windows) * windows.horizon)).numpy().T * scaling.std[:, None]


def train(args: argparse.Namespace, series: pd.DataFrame) -> tuple[TitansForTimeSeriesPrediction, dict[str, Any]]:
    """Trains a model and saves it with its facts; then measures its errors and prints them. Returns model and facts.

    Raises ValueError for a file with too few rows, and if no validation loss is a number.
    """
    rows = range(len(series))
    middle = round(len(rows) * (1 - args.validation))
    parts = {"training": rows[:middle], "validation": rows[middle:]}
    (training, validation), scaling = split_series(series, parts, args.look_back, args.horizon)
    set_seed(args.seed)
    config = TitansTimeSeriesConfig(
        context_length=args.look_back,
        prediction_length=args.horizon,
        loss=args.loss,
        cycle_length=args.cycle_length,
        num_input_channels=len(series.columns),
    )
    model = TitansForTimeSeriesPrediction(config)
    if model.cycle is not None:
        trained = training.values[: training.rows.stop]
        if len(trained) < args.cycle_length:
            raise ValueError(f"--cycle_length {args.cycle_length} is more than the {len(trained)} rows to train on")
        model.cycle.fit(trained)
    trainer = fit_forecaster(args, model, training, validation)
    facts = {
        "data": args.data.name,
        "columns": list(series),
        "mean": scaling.mean.tolist(),
        "std": scaling.std.tolist(),
        "frequency": frequency_of(series.index),
        "last_time": str(series.index[-1]),
        "rows": [len(training.rows), len(validation.rows)],
        "best_step": trainer.state.best_global_step,
        "options": {name: getattr(args, name) for name in ("horizon", *FORECAST_TRAINING)},
    }
    model.save_pretrained(args.output)
    (args.output / FACTS).write_text(json.dumps(facts) + "\n", encoding="utf-8")
    repeated = args.cycle_length if 0 < args.cycle_length <= validation.rows.start else 1
    errors = absolute_errors(model, validation, scaling, args.batch_size, repeated)
    heading = ["column", "mean absolute error", f"of the last {'value' if repeated == 1 else 'cycle'} repeated"]
    lines = [[name, *(f"{x:.4g}" for x in row)] for name, row in zip(series.columns, errors, strict=True)]
    print(markdown_table(heading, lines), flush=True)
    return model, facts


def load(folder: Path) -> tuple[TitansForTimeSeriesPrediction, dict[str, Any]]:
    """Loads a model of this command with its facts; raises ValueError for another folder."""
    config = load_config(folder, "--model")
    if not isinstance(config, TitansTimeSeriesConfig) or not (folder / FACTS).is_file():
        raise ValueError(f"--model {folder} is not a model of titans-hf forecast: it has no {FACTS}")
    with loading_weights(folder, "--model"):
        model = TitansForTimeSeriesPrediction.from_pretrained(folder)
    return model.eval(), json.loads((folder / FACTS).read_text(encoding="utf-8"))


def select_columns(series: pd.DataFrame, facts: dict[str, Any], args: argparse.Namespace) -> pd.DataFrame:
    """Returns the columns of the model, in its order; raises ValueError for a missing one, for too few rows and for
    rows at another step.
    """
    if missing := [name for name in facts["columns"] if name not in series]:
        raise ValueError(f"DATA {args.data} has no column {missing[0]}, on which --model {args.model} was trained")
    look_back, step = facts["options"]["look_back"], frequency_of(series.index)
    if len(series) < look_back:
        raise ValueError(f"DATA {args.data} has {len(series)} rows: --model {args.model} reads {look_back}")
    if step != facts["frequency"]:
        raise ValueError(
            f"DATA {args.data} has a row each {step} (as pandas names it), but --model {args.model} was trained on a "
            f"row each {facts['frequency']}"
        )
    return series[facts["columns"]]


def forecast(
    model: TitansForTimeSeriesPrediction, facts: dict[str, Any], series: pd.DataFrame, horizon: int | None
) -> pd.DataFrame:
    """Returns the rows that follow the series, in its units, to six digits of a channel's deviation; the index has
    their times.

    They are made from the last rows, as many as in training. Raises ValueError for a horizon that the model cannot
    reach.
    """
    scaling = Scaling(np.array(facts["mean"]), np.array(facts["std"]))
    look_back, step, end = model.config.context_length, frequency_of(series.index), series.index[-1]
    past = scaling.scale(series.to_numpy()[-look_back:])[None].to(model.device)
    # The cycle counts rows. If rows are missing, its place is counted from the end of the training data.
    last = sum(facts["rows"]) - 1 + steps_between(pd.Timestamp(facts["last_time"]), end, step)
    position = torch.tensor([last - look_back + 1], device=model.device)
    try:
        future = model.generate(past, horizon, cycle_position=position).prediction_outputs
    except ValueError as error:
        raise ValueError(f"--horizon {horizon}: {error}") from error
    digits = 5 - np.floor(np.log10(scaling.std)).astype(int)
    values = np.stack([x.round(n) for x, n in zip(scaling.unscale(future[0].cpu()).T, digits, strict=True)], axis=1)
    times = pd.date_range(end, periods=len(values) + 1, freq=step)[-len(values) :]
    return pd.DataFrame(values, times.rename(series.index.name), series.columns)


def draw(future: pd.DataFrame, before: pd.DataFrame | None, series: pd.DataFrame, path: Path) -> None:
    """Draws the end of the series, its forecast and `before`, the forecast of the series' own last rows from the rows
    before them, a panel for each channel; one legend stands above all panels.
    """
    names = series.columns[:MOST_PANELS]
    measured = series[-max(2 * len(future), 96) :]
    figure = Figure(figsize=(9, 1 + 2.2 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        lines = [
            *axes.plot(measured.index, measured[name], color="gray", label="measured"),
            *axes.plot(future.index, future[name], color="tab:red", label="forecast"),
        ]
        if before is not None:
            label = "forecast of the last measured rows from those before"
            lines += axes.plot(before.index, before[name], color="tab:red", linestyle=":", label=label)
        axes.set_title(name, loc="left", parse_math=False)
    figure.legend(handles=lines, loc="outside upper right", ncols=3, frameon=False)
    panels[-1].tick_params(axis="x", rotation=30)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    args = parse("forecast", argv)
    check_args(args)
    series = read_series(args.data, args.time_column, args.date_format)
    if args.model is None:
        model, facts = train(args, series)
    else:
        model, facts = load(args.model)
        series = select_columns(series, facts, args)
    if (row := uneven_step(series.index)) is not None:
        print(f"DATA {args.data}: row {row} is not at the usual step: rows are taken as if none were missing")
    future = forecast(model, facts, series, args.horizon)
    rest, before = series[: -len(future)], None
    if len(rest) >= model.config.context_length:
        before = forecast(model, facts, rest, len(future))
    args.output.mkdir(parents=True, exist_ok=True)
    table, picture = args.output / TABLE, args.output / PICTURE
    future.to_csv(table, float_format="%.15g")
    draw(future, before, series, picture)
    print(f"{len(future)} rows from {future.index[0]} to {future.index[-1]}\n{table}\n{picture}")


if __name__ == "__main__":
    run_command(main)
