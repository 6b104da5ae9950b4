"""Makes tables in the form of the paper's tables 1 and 2, with its figures, and plots of accuracy by context length."""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from titans_hf.cli.shared.figures import line_styles, mark_failures, mark_trained_length, save_figure
from titans_hf.cli.shared.markdown_tables import markdown_table

PAPER = json.loads((Path(__file__).parent / "paper_tables.json").read_text())
# Heading, task, metric of lm-eval; in the paper's order, where the whole file is ours.
COLUMNS = (
    ("Wiki. ppl ↓", "wikitext", "word_perplexity"),
    ("Wiki. whole ppl ↓", "wikitext_whole", "word_perplexity"),
    ("LMB. ppl ↓", "lambada_openai", "perplexity"),
    ("LMB. acc ↑", "lambada_openai", "acc"),
    ("PIQA acc ↑", "piqa", "acc"),
    ("Hella. acc_n ↑", "hellaswag", "acc_norm"),
    ("Wino. acc ↑", "winogrande", "acc"),
    ("ARC-e acc ↑", "arc_easy", "acc"),
    ("ARC-c acc_n ↑", "arc_challenge", "acc_norm"),
    ("SIQA acc ↑", "social_iqa", "acc"),
    ("BoolQ acc ↑", "boolq", "acc"),
)
NEEDLES = {"niah_single_1": "S-NIAH-PK", "niah_single_2": "S-NIAH-N", "niah_single_3": "S-NIAH-W"}
# A guess among the answers that occur: six places, or four people and three things.
CHANCE = {f"babilong_qa{i}": 1 / (7 if i == 5 else 6) for i in range(1, 6)}

Results = dict[str, dict[tuple[str, int | None], dict[str, Any]]]
Score = tuple[float, float | None]


def read_results(folder: Path, fingerprints: dict[str, str], limit: int | None, source: str) -> tuple[Results, int]:
    """Reads saved results of one limit and source by model, task and length, and counts the results that are left
    out.

    A result of a model of this call counts if the model has not changed since; results of earlier calls' models count
    as well.
    """
    results, others = defaultdict(dict), 0
    for path in sorted(folder.glob("*/*.json")):
        result = json.loads(path.read_text())
        if "settings" not in result:  # no result of this command
            continue
        same_model = result["settings"]["model"] == fingerprints.get(result["model"], result["settings"]["model"])
        if same_model and (result["limit"], result["source"]) == (limit, source):
            results[result["model"]][result["task"], result["length"]] = result
        else:
            others += 1
    return dict(results), others


def score(results: Results, model: str, task: str, metric: str, length: int | None = None) -> Score | None:
    """Returns value and standard error, None without one; accuracies in percent, as in the paper."""
    result = results[model].get((task, length))
    if result is None:
        return None
    metrics = result["metrics"]
    name = metric if metric in metrics else str(length)  # lm-eval's own needles call it by the length
    factor = 1 if "perplexity" in metric else 100
    error = metrics.get(f"{name}_stderr")
    return factor * metrics[name], factor * error if isinstance(error, float) else None


def cell(value: Score | None) -> str:
    """Formats a value with its standard error; a dash for None."""
    if value is None:
        return "–"
    return " ±".join(f"{x:.2f}" if x < 1e5 else f"{x:.3g}" for x in value if x is not None)


def mean(values: list[Score | None]) -> Score | None:
    """Averages scores; None if a score is missing. Standard errors add as for independent means."""
    if not values or None in values:
        return None
    errors = [error for _, error in values if error is not None]
    error = math.hypot(*errors) / len(values) if len(errors) == len(values) else None
    return sum(value for value, _ in values) / len(values), error


def table_1(results: Results) -> str:
    """Makes the table of language modelling and common sense: the models, then the paper's rows of the nearest size."""
    tasks = {task for _, task, _ in COLUMNS}
    models = [model for model in results if any(task in tasks for task, _ in results[model])]
    if not models:
        return ""
    accuracies = [(task, metric) for _, task, metric in COLUMNS if "perplexity" not in metric]
    shared = [pair for pair in accuracies if all(score(results, model, *pair) for model in models)]
    rows = []
    for model in models:
        values = [score(results, model, task, metric) for _, task, metric in COLUMNS]
        parameters = next(iter(results[model].values()))["parameters"]
        average = mean([score(results, model, *pair) for pair in shared])
        rows.append([f"**{model}** ({parameters / 1e6:.3g}M)", *map(cell, values), cell(average)])
    for size in sorted({nearest(next(iter(results[model].values()))["parameters"]) for model in models}, key=int):
        rows += paper_rows(size, [task if metric != "perplexity" else "ppl" for task, metric in shared])
    columns = [[results[model].get((task, None)) for model in models] for _, task, _ in COLUMNS]
    rows.append(
        ["documents", *("/".join(sorted({str(r["documents"]) for r in column if r})) for column in columns), ""]
    )
    averaged = f"Avg. of {len(shared)} acc ↑"
    return "## Table 1: language modelling and common-sense reasoning\n\n" + markdown_table(
        ["model", *(heading for heading, _, _ in COLUMNS), averaged], rows
    )


def nearest(parameters: int) -> str:
    """Finds the size in the paper's table 1 whose ratio to `parameters` is nearest to 1."""
    return min(PAPER["table_1"]["sizes"], key=lambda size: abs(math.log(int(size) / parameters)))


def paper_rows(size: str, averaged: list[str]) -> list[list[str]]:
    """Makes the paper's rows of one size; the last cell is the mean of the columns `averaged`."""
    table, group = PAPER["table_1"]["columns"], PAPER["table_1"]["sizes"][size]
    names = {("lambada_openai", "perplexity"): "lambada_ppl", ("lambada_openai", "acc"): "lambada_acc"}
    rows = []
    for name, figures in group["rows"].items():
        known = dict(zip(table, figures, strict=True))
        values = [known.get(names.get((task, metric), task)) for _, task, metric in COLUMNS]
        average = mean([(known[names.get((task, "acc"), task)], None) for task in averaged])
        label = f"paper: {name}, {int(size) // 10**6}M, {group['trained_on']}"
        rows.append([label, *("–" if value is None else f"{value:.2f}" for value in values), cell(average)])
    return rows


def table_2(results: Results) -> str:
    """Makes the table of needles by length, with the paper's rows."""
    lengths = sorted({length for rows in results.values() for task, length in rows if task in NEEDLES})
    if not lengths:
        return ""
    asked = [task for task in NEEDLES if any(task == done for rows in results.values() for done, _ in rows)]
    columns = [(task, length) for task in asked for length in lengths]
    models = [model for model in results if any(task in NEEDLES for task, _ in results[model])]
    rows = [[f"**{m}**", *(cell(score(results, m, task, "acc", n)) for task, n in columns)] for m in models]
    positions = [(task, length) for task in PAPER["table_2"]["tasks"] for length in PAPER["table_2"]["lengths"]]
    for name, figures in PAPER["table_2"]["rows"].items():
        known = dict(zip(positions, figures, strict=True))
        rows.append([f"paper: {name}", *(f"{known[c]:.2f}" if c in known else "–" for c in columns)])
    rows.append(documents(results, models, columns))
    heading = ["model", *(f"{needle_name(results, task)} {short(length)}" for task, length in columns)]
    return "## Table 2: single needles in a haystack\n\n" + markdown_table(heading, rows)


def needle_name(results: Results, task: str) -> str:
    """Names a needle as the paper does, with "(books)" where the haystack is not RULER's."""
    books = task != "niah_single_1" and any(r["source"] == "local" for m in results.values() for r in m.values())
    return NEEDLES[task] + (" (books)" if books else "")


def documents(results: Results, models: list[str], columns: list[tuple[str, int]]) -> list[str]:
    """Makes the row of the numbers of documents, all that occur in a column."""
    counts = [{str(results[m][c]["documents"]) for m in models if c in results[m]} for c in columns]
    return ["documents", *("/".join(sorted(count)) for count in counts)]


def short(length: int) -> str:
    """Formats a length; whole multiples of 1,024 as 2K."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def babilong_table(results: Results) -> str:
    """Makes the table of BABILong by length: the mean over the tasks, then each."""
    lengths = sorted({length for rows in results.values() for task, length in rows if task in CHANCE})
    if not lengths:
        return ""
    rows = []
    for model in (m for m in results if any(task in CHANCE for task, _ in results[m])):
        scores = {task: [score(results, model, task, "acc", n) for n in lengths] for task in CHANCE}
        means = [mean(list(column)) for column in zip(*scores.values(), strict=True)]
        rows.append([f"**{model}**", "mean", *map(cell, means)])
        for task, values in scores.items():
            counts = sorted({results[model][task, n]["documents"] for n in lengths if (task, n) in results[model]})
            if counts:
                name = f"{task.removeprefix('babilong_')} ({'/'.join(map(str, counts))} questions)"
                rows.append([model, name, *map(cell, values)])
    return "## BABILong (figure 6 of the paper)\n\n" + markdown_table(["model", "task", *map(short, lengths)], rows)


def notes(results: Results, limit: int | None, source: str, skipped: list[str]) -> str:
    """Lists the conditions of these figures."""
    kept = [result for rows in results.values() for result in rows.values()]
    lines = [
        f"Evaluated with lm-eval {', '.join(sorted({r['settings']['lm_eval'] for r in kept}))}, zero-shot but for "
        "BABILong, which has its own examples. ± is the standard error. Accuracies in percent."
    ]
    if limit is not None:
        lines.append(f"**Only the first {limit} documents of every task** (`--limit {limit}`): a trial, not a result.")
    if source == "local":
        lines.append(
            "Data of a local folder, with lm-eval's prompts and metrics. (books): the haystack is books/test, "
            "where RULER has essays; BABILong's facts lie in the same books."
        )
    lines.append(
        "Rows of the paper are quoted from arXiv 2501.00663 for the size nearest to each model's; they were "
        "trained on 15B or 30B tokens. Averages are over the columns that all models here have, also in those rows."
    )
    lines.append("Wiki. whole: the test file as one document; a model without a memory is given it in windows.")
    lines += [f"Left out: {reason}." for reason in skipped]
    for model in results:
        cut = {task: r["cut_tokens"] for (task, _), r in results[model].items() if r["cut_tokens"]}
        if cut:
            total = ", ".join(f"{task} {number:,}" for task, number in cut.items())
            lines.append(f"**{model} cut tokens off prompts longer than its limit**: {total}.")
    return "\n".join(f"- {line}" for line in lines)


def plot(results: Results, panels: dict[str, list[str]], title: str, trained: int | None, path: Path) -> None:
    """Draws accuracy against length, a panel per group of tasks (their mean), a line per model; lines also for
    the chance of a right guess, where the tasks have one, and for the length `trained` on.
    """
    done = {task for rows in results.values() for task, _ in rows}
    panels = {title: group for title, group in panels.items() if done & set(group)}
    tasks = {task for group in panels.values() for task in group}
    lengths = sorted({length for rows in results.values() for task, length in rows if task in tasks})
    if not lengths:
        return
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4 * columns + 3.5, 3.2 * rows), layout="constrained")
    figure.suptitle(f"{title} against prompt length", x=0.02, ha="left")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    shortest = min(filter(None, lengths), default=1)
    for axes, (name, group) in zip(grid.flat, panels.items(), strict=True):
        axes.set_xscale("symlog", base=2, linthresh=shortest, linscale=0.5)  # 0 tokens are a length, too
        for model, style in line_styles(results).items():
            values = [mean([score(results, model, task, "acc", length) for task in group]) for length in lengths]
            points = [(length, *value) for length, value in zip(lengths, values, strict=True) if value]
            if points:
                x, y, errors = zip(*points, strict=True)
                axes.errorbar(x, y, [error or 0 for error in errors], capsize=3, **style)
                zeros = [at for at, accuracy in zip(x, y, strict=True) if accuracy == 0]
                mark_failures(axes, zeros, [0] * len(zeros), label="none right")
        if group[0] in CHANCE:
            guess = 100 * sum(CHANCE[task] for task in group) / len(group)
            axes.axhline(guess, color="gray", linewidth=0.8, label="chance", zorder=0)
        if trained:
            mark_trained_length(axes, trained)
        axes.set_xticks(lengths, [short(length) for length in lengths])
        axes.minorticks_off()
        axes.set(title=name, ylim=(-5, 105))
        axes.grid(alpha=0.3)
    for axes in grid[-1]:
        axes.set_xlabel("sequence length (tokens)")
    for axes in grid[:, 0]:
        axes.set_ylabel("accuracy (%)")
    save_figure(figure, path)


def write_report(
    folder: Path,
    fingerprints: dict[str, str],
    limit: int | None,
    source: str,
    skipped: list[str],
    trained: int | None = None,
) -> Results:
    """Writes results.json, table.md, niah.png and babilong.png from the results saved in the folder, and returns them.

    The plots mark the length `trained` that the models of this call were trained on, if they have no others.
    """
    results, others = read_results(folder, fingerprints, limit, source)
    if not results:
        return results
    if others:
        print(f"{others} saved results of other settings are left out of the tables")
    flat = [result for rows in results.values() for result in rows.values()]
    (folder / "results.json").write_text(json.dumps(flat, indent=2) + "\n")
    parts = [table_1(results), table_2(results), babilong_table(results), notes(results, limit, source, skipped)]
    (folder / "table.md").write_text("\n\n".join(filter(None, parts)) + "\n")
    trained = trained if results.keys() <= fingerprints.keys() else None
    needles = {needle_name(results, task): [task] for task in NEEDLES}
    plot(results, needles, "Recall of a needle", trained, folder / "niah.png")
    questions = {"mean of qa1 to qa5": list(CHANCE)} | {task.removeprefix("babilong_"): [task] for task in CHANCE}
    plot(results, questions, "Right answers in BABILong", trained, folder / "babilong.png")
    print(f"wrote {folder / 'table.md'}")
    return results
