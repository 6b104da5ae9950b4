"""Makes the tables and plots of DNA runs from their file, with the paper's figures.

    python -m eval.dna.tables eval/results/dna.jsonl --baselines lmm-off cnn --output results/dna

A figure is the accuracy on what was not trained on, in percent: mean and standard deviation over folds, each fold's
accuracy being the mean of its seeds, and the mean of each seed that has all folds.
"""

from pathlib import Path
from statistics import mean

import numpy as np

from eval.common.records import Record
from eval.common.tables import Report, difference_table, plot_curves, read_paper, report_command, with_spread
from eval.dna.models import NAMES
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.markdown_tables import markdown_table

ALIKE = {("data",): ("digest", "folds", "batch_size", "epochs", "reverse_complement", "shape")}
EPOCH, VALIDATION = 0, 3
HEADING = ["model", "parameters", "folds", "accuracy", "each seed", "validation accuracy", "learning rate", "minutes"]
Rows = dict[str, list[Record]]
Scores = dict[tuple[int, int], float]  # by seed and fold


def group_by_row(records: list[Record]) -> dict[str, Rows]:
    """Groups runs by data and row: those at the rate that is best on the first fold's validation part with the first
    seed, in the order of seeds and folds.
    """
    data: dict[str, list[Record]] = {}
    for record in records:
        data.setdefault(record["run"]["data"], []).append(record)
    return {name: _by_row(of_data) for name, of_data in data.items()}


def _by_row(records: list[Record]) -> Rows:
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


def _seed_and_fold(record: Record) -> tuple[int, int]:
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
    return with_spread(values, f"{sign}.1f", 100).replace("-0.0", f"{sign}0.0")


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
    paper = read_paper("dna")
    column = next((i for i, name in enumerate(paper["columns"]) if data.startswith(name)), None)
    for name, figures in paper["rows"].items() if column is not None else ():
        if figures[column] is not None:
            lines.append([f"the paper's {name}", "–", "–", figures[column], *["–"] * 4])
    return markdown_table(HEADING, lines)


def differences(rows: Rows, baseline: str) -> str:
    """Formats the differences of accuracy from a baseline, of equal seed and fold, in percentage points."""

    def cells(records: list[Record], others: list[Record]) -> list[str] | None:
        base = {_seed_and_fold(record): record["test"] for record in others}
        pairs = {x: record["test"] - base[x] for record in records if (x := _seed_and_fold(record)) in base}
        return [*summary(pairs, "+"), len(means_by_fold(pairs))] if pairs else None

    return difference_table(baseline, ["accuracy", "each seed", "folds"], rows, cells)


def make_report(records: list[Record], baselines: list[str], path: Path) -> Report:
    """Makes the tables, and for each data a plot of validation accuracy by epoch."""
    tables, figures = ["# DNA"], {}
    for data, rows in group_by_row(records).items():
        tables += [f"## {data}", table(data, rows)]
        tables += [differences(rows, baseline) for baseline in baselines if baseline in rows]
        figures[data] = plot_curves({data: {row: _curves(of_row) for row, of_row in rows.items()}}, "validation (%)")
    return tables, figures


def _curves(records: list[Record]) -> np.ndarray:
    length = min(len(record["curve"]) for record in records)
    return np.array([record["curve"][:length] for record in records], float)[..., [EPOCH, VALIDATION]]


def main(argv: list[str] | None = None) -> None:
    report_command(__doc__, "dna", ALIKE, make_report, argv)


if __name__ == "__main__":
    run_command(main)
