"""The tables and plots of DNA, with the paper's figures.

A figure is the accuracy on the test part, in percent. The mean and standard deviation are over folds; the accuracy of a
fold is the mean of its seeds. The column "each seed" has the mean over folds of each seed that has all folds.
"""

from statistics import mean

from eval.common.records import Record
from eval.common.tables import (
    Report,
    Rows,
    Scores,
    best_rate,
    difference_table,
    group_runs,
    of_complete_seeds,
    plot_curves,
    read_paper,
    with_spread,
)
from eval.dna.models import NAMES
from titans_hf.cli.shared.markdown_tables import markdown_table

ALIKE = {("data",): ("digest", "folds", "batch_size", "epochs", "reverse_complement", "shape")}
VALIDATION = 3  # column of a curve
HEADING = ["model", "parameters", "folds", "accuracy", "each seed", "validation accuracy", "learning rate", "minutes"]


def results_of(records: list[Record]) -> dict[str, Rows]:
    """Groups runs by data and row, those at the rate that is best on the first fold's validation part with the first
    seed. A row without such a run has no rate yet and is left out.
    """
    results = group_runs(records, NAMES, "data", "row")
    for rows in results.values():
        for row, runs in list(rows.items()):
            first = (runs[0]["run"]["seed"], 0)

            def score(of_rate: list[Record], first: tuple[int, int] = first) -> tuple[float, int]:
                return scores_of(of_rate, "valid").get(first, -1), len(of_rate)  # of equal rates one has all folds

            rows[row] = best_rate(runs, score)
            if first not in scores_of(rows[row], "valid"):
                del rows[row]
    return results


def scores_of(runs: list[Record], name: str) -> Scores:
    return {(run["run"]["seed"], run["run"]["fold"]): run[name] for run in runs}


def percent(values: list[float], sign: str = "") -> str:
    """Formats the mean of shares in percent, with the standard deviation of several."""
    return with_spread(values, f"{sign}.1f", 100).replace("-0.0", f"{sign}0.0")


def summary(scores: Scores, sign: str = "") -> tuple[int, str, str]:
    """Formats the number of folds, the mean and deviation over them, and each seed's mean."""
    folds = sorted({fold for _, fold in scores})
    of_folds = [mean(x for (_, other), x in scores.items() if other == fold) for fold in folds]
    of_seeds = ", ".join(percent([mean(x)], sign) for x in of_complete_seeds(scores, folds))
    return len(folds), percent(of_folds, sign), of_seeds


def table(data: str, rows: Rows) -> str:
    """Formats a row per model, and the paper's below them where the data are of GenomicBenchmarks."""
    lines = []
    for row, runs in rows.items():
        rate, minutes = runs[0]["run"]["learning_rate"], mean(run["minutes"] for run in runs)
        scores = [*summary(scores_of(runs, "test")), summary(scores_of(runs, "valid"))[1]]
        lines.append([row, f"{runs[0]['parameters']:,}", *scores, f"{rate:g}", f"{minutes:.1f}"])
    paper = read_paper("dna")
    column = next((i for i, name in enumerate(paper["columns"]) if data.startswith(name)), None)
    for name, figures in paper["rows"].items() if column is not None else ():
        if figures[column] is not None:
            lines.append([f"the paper's {name}", "–", "–", figures[column], *["–"] * 4])
    return markdown_table(HEADING, lines)


def differences(rows: Rows, baseline: str) -> str:
    """Formats the differences of accuracy from a baseline, of equal seed and fold, in percentage points."""

    def cells(runs: list[Record], others: list[Record]) -> list[str] | None:
        mine, base = scores_of(runs, "test"), scores_of(others, "test")
        number, *both = (
            summary({x: score - base[x] for x, score in mine.items() if x in base}, "+")
            if mine.keys() & base.keys()
            else (0,)
        )
        return [*both, number] if number else None

    return difference_table(baseline, ["accuracy", "each seed", "folds"], rows, cells)


def make_report(records: list[Record], baselines: list[str]) -> Report:
    """Makes the tables, and for each data a plot of validation accuracy by epoch."""
    tables, figures = ["# DNA"], {}
    for data, rows in results_of(records).items():
        tables += [f"## {data}", table(data, rows)]
        tables += [differences(rows, baseline) for baseline in baselines if baseline in rows]
        figures[data] = plot_curves({data: rows}, VALIDATION, "validation (%)")
    return tables, figures
