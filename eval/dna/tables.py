"""Makes the tables and plots of DNA runs from their file, with the paper's figures.

    python -m eval.dna.tables results/dna --baselines lmm-stopped cnn --output results/dna

A figure is the accuracy on what was not trained on, in percent: mean and standard deviation over folds, each fold's
accuracy being the mean of its seeds, and the mean of each seed that has all folds.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eval.common.records import read_records
from eval.common.tables import read_paper
from eval.dna.models import NAMES
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.figures import line_styles, plot_with_spread, save_figure
from titans_hf.cli.shared.markdown_tables import markdown_table

PAPER = read_paper("dna")
SETUP = ("digest", "folds", "batch_size", "epochs", "reverse_complement", "shape")
EPOCH, VALIDATION = 0, 3
HEADING = ["model", "parameters", "folds", "accuracy", "each seed", "validation accuracy", "learning rate", "minutes"]
Rows = dict[str, list[dict[str, Any]]]
Scores = dict[tuple[int, int], float]  # by seed and fold


def read_results(path: Path) -> dict[str, Rows]:
    """Reads the runs of a file or folder, by data and row: those at the rate that is best on the first fold's
    validation part with the first seed, in the order of seeds and folds.

    Raises ValueError for runs that were not made alike, and for other files.
    """
    data: dict[str, list[dict[str, Any]]] = {}
    records = read_records(path, "dna")
    if not records:
        raise ValueError(f"RUNS {path} has no runs of eval.dna.run")
    for record in records:
        data.setdefault(record["run"]["data"], []).append(record)
    check_alike(record["run"] for record in records)
    return {name: _by_row(records) for name, records in data.items()}


def check_alike(runs: Iterable[dict[str, Any]]) -> None:
    """Raises ValueError, naming the setting, for runs of one data set that were not made alike."""
    first: dict[str, dict[str, Any]] = {}
    for run in runs:
        other = first.setdefault(run["data"], run)
        for name in SETUP:
            if run[name] != other[name]:
                raise ValueError(
                    f"{run['data']}, {run['row']}: {name} is {run[name]}, elsewhere {other[name]}: each --output has "
                    "runs that were made alike"
                )


def _by_row(records: list[dict[str, Any]]) -> Rows:
    names = {(NAMES.index(record["run"]["model"]), record["run"]["row"]) for record in records}
    rows = {}
    for _, row in sorted(names):
        of_row = sorted((x for x in records if x["run"]["row"] == row), key=_seed_and_fold)
        first = [record for record in of_row if _seed_and_fold(record) == (of_row[0]["run"]["seed"], 0)]
        if first:  # otherwise no rate has been chosen yet
            rates = [record["run"]["learning_rate"] for record in of_row]  # of equal ones, the command went on with one
            best = max(first, key=lambda record: (record["valid"], rates.count(record["run"]["learning_rate"])))
            rows[row] = [
                record for record, rate in zip(of_row, rates, strict=True) if rate == best["run"]["learning_rate"]
            ]
    return rows


def _seed_and_fold(record: dict[str, Any]) -> tuple[int, int]:
    return record["run"]["seed"], record["run"]["fold"]


def means_by_fold(scores: Scores) -> list[float]:
    """Averages each fold's scores over its seeds."""
    folds = sorted({fold for _, fold in scores})
    return [mean(x for (_, other), x in scores.items() if other == fold) for fold in folds]


def means_by_seed(scores: Scores) -> list[float]:
    """Averages the scores of each seed that has all folds."""
    folds = {fold for _, fold in scores}
    complete = [seed for seed in sorted({seed for seed, _ in scores}) if all((seed, fold) in scores for fold in folds)]
    return [mean(scores[seed, fold] for fold in folds) for seed in complete]


def percent(values: list[float], sign: str = "") -> str:
    """Formats the mean of shares in percent, with the standard deviation of several."""
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{round(100 * mean(values), 1) + 0.0:{sign}.1f}{spread}"  # + 0.0: no "-0.0"


def summary(scores: Scores, sign: str = "") -> tuple[str, str]:
    """Formats the mean and deviation over folds, and each seed's mean."""
    return percent(means_by_fold(scores), sign), ", ".join(percent([x], sign) for x in means_by_seed(scores))


def table(data: str, rows: Rows) -> str:
    """Formats a row per model, and the paper's below them where the data are of GenomicBenchmarks."""
    lines = []
    for row, records in rows.items():
        test, valid = ({_seed_and_fold(record): record[name] for record in records} for name in ("test", "valid"))
        rate, minutes = records[0]["run"]["learning_rate"], mean(record["minutes"] for record in records)
        scores = [len(means_by_fold(test)), *summary(test), summary(valid)[0]]
        lines.append([row, f"{records[0]['parameters']:,}", *scores, f"{rate:g}", f"{minutes:.1f}"])
    column = next((i for i, name in enumerate(PAPER["columns"]) if data.startswith(name)), None)
    for name, figures in PAPER["rows"].items() if column is not None else ():
        if figures[column] is not None:
            lines.append([f"the paper's {name}", "–", "–", figures[column], *["–"] * 4])
    return markdown_table(HEADING, lines)


def difference_table(rows: Rows, baseline: str) -> str:
    """Formats the differences of accuracy from a baseline, of equal seed and fold, in percentage points."""
    base = {_seed_and_fold(record): record["test"] for record in rows[baseline]}
    lines = []
    for row, records in rows.items():
        pairs = {x: record["test"] - base[x] for record in records if (x := _seed_and_fold(record)) in base}
        if row != baseline and pairs:
            lines.append([row, *summary(pairs, "+"), len(means_by_fold(pairs))])
    return markdown_table([f"less {baseline}", "accuracy", "each seed", "folds"], lines)


def plot(data: str, rows: Rows, path: Path) -> None:
    """Draws validation accuracy by epoch: the mean over runs, and a band from the least to the greatest."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes, styles = figure.subplots(), line_styles(rows)
    for row, records in rows.items():
        length = min(len(record["curve"]) for record in records)
        curves = np.array([record["curve"][:length] for record in records])
        epochs, accuracies = curves[..., EPOCH].mean(0), 100 * curves[..., VALIDATION]
        plot_with_spread(axes, epochs, accuracies, styles[row] | {"markersize": 4})
    axes.set(title=data, xlabel="epoch", ylabel="validation accuracy (%)")
    save_figure(figure, path)


def write_report(runs: Path, output: Path, baselines: list[str] | None = None) -> None:
    """Writes to `output` table.md and a plot per data from the runs of a file or folder.

    Raises ValueError for a baseline that no data have.
    """
    results = read_results(runs)
    output.mkdir(parents=True, exist_ok=True)
    known = sorted({row for rows in results.values() for row in rows})
    for baseline in baselines or []:
        if baseline not in known:
            raise ValueError(f"--baselines must be of {', '.join(known)}, but has {baseline}")
    parts = ["# DNA"]
    for data, rows in results.items():
        parts += [f"## {data}", table(data, rows)]
        parts += [difference_table(rows, baseline) for baseline in baselines or [] if baseline in rows]
        plot(data, rows, output / f"{data}.png")
    (output / "table.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"wrote {output / 'table.md'}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("runs", type=Path, help="a JSON Lines file of runs, or its folder")
    parser.add_argument("--baselines", nargs="*", default=[], help="rows that the others are compared with")
    parser.add_argument("--output", type=Path, required=True, help="the folder for table.md and the plots")
    args = parser.parse_args(argv)
    write_report(args.runs, args.output, args.baselines)


if __name__ == "__main__":
    run_command(main)
