"""Tables and the picture of finished runs: gains over the window alone, their intervals over texts, and facts."""

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import t as student

from eval.common.records import Record
from titans_hf.cli.shared.figures import save_figure
from titans_hf.cli.shared.markdown_tables import markdown_table

EDGES = (0, 1024, 2048, 4096, 8192, 16384, 32768)
BY_LENGTH = ("ruler", "babilong")  # tasks whose lengths are columns
BASE, RIVAL = "window", "full"
LABELS = {  # of the methods in the picture
    "both": "fast weights and list",
    "fast": "fast weights",
    "start": "fitted start, no learning",
    "list": "the list",
    "full": "full attention",
    "full-start": "full attention, fitted start",
    "full-both": "full attention, fast weights and list",
    "longer 18 MB": "a longer window",
    "tova 4 MB": "TOVA",
    "tova 4 MB 4 bits": "TOVA, 4 bits",
    "sgd": "SGD",
    "bm25": "BM25",
    "window+knn-4mb": "kNN",
    "window+neural+match": "neural cache and match",
    "window+match": "longest match",
}


def interval(values: np.ndarray, form: str = ".3f") -> str:
    """Formats a mean over texts with its 95 % interval by Student's t."""
    if len(values) < 2:
        return f"{values.mean():{form}}"
    half = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():{form}} [{values.mean() - half:{form}}, {values.mean() + half:{form}}]"


def group(records: list[Record], task: str) -> dict[tuple[str, int], dict[str, dict[str, Record]]]:
    """Groups the records of a task by texts and window, then by method and text."""
    groups = defaultdict(lambda: defaultdict(dict))
    for record in records:
        run = record["run"]
        if run["task"] == task:
            loss = task == "loss"  # a seed is of the fit there, and of the questions with facts
            method = f"{run['method']}, fit {run['seed']}" if loss and run["seed"] else run["method"]
            groups[run["data"], run["window"]][method][run["text"] if loss else f"{run['text']} {run['seed']}"] = record
    return groups


def gains(methods: dict[str, dict[str, Record]], name: str, other: str = BASE) -> tuple[np.ndarray, float]:
    """Returns the gain over the window of each text that it, the method and another one have read, (texts, blocks), and
    the bytes beyond the window.
    """
    texts = sorted(methods[BASE].keys() & methods[name].keys() & methods[other].keys())
    if not texts:
        return np.zeros((0, 1)), 0.0
    losses = [np.array([methods[x][text]["result"]["losses"] for text in texts]) for x in (BASE, name)]
    more = [methods[name][text]["bytes"] - methods[BASE][text]["bytes"] for text in texts]
    return losses[0] - losses[1], float(np.mean(more))


def loss_table(methods: dict[str, dict[str, Record]], per_block: int) -> str:
    """Formats the gains of all methods, the largest first."""
    found = {name: gains(methods, name) for name in methods}
    found = {name: x for name, x in found.items() if len(x[0])}
    blocks = next(iter(found.values()))[0].shape[1]
    edges = [x for x in EDGES if x < blocks * per_block] + [blocks * per_block]
    rows = []
    for name, (gain, more) in sorted(found.items(), key=lambda x: -x[1][0].mean()):
        of_full = ""
        if RIVAL in found and name != BASE:  # of the texts that both have read
            same, full = gains(methods, name, RIVAL)[0], gains(methods, RIVAL, name)[0]
            of_full = f"{same.mean() / full.mean():.0%} of {len(full)}" if len(full) else ""
        parts = [f"{gain[:, low // per_block : high // per_block].mean():.3f}" for low, high in pairwise(edges)]
        rows.append([name, f"{more / 1e6:.2f}", interval(gain.mean(1)), of_full, *parts, len(gain)])
    ranges = [f"{low:,} to {high:,}" for low, high in pairwise(edges)]
    return markdown_table(
        ["method", "MB beyond the window", "gain, nats", "share of full attention's, of texts", *ranges, "texts"], rows
    )


def floor_of(answers: list[list]) -> str:
    """Returns how many would be right by the most frequent answer, or by any option, whichever is more."""
    if not answers or len(answers[0]) < 5 or not isinstance(answers[0][4], dict):
        return ""
    values = [answer[1] for answer in answers]
    return f"{max(*map(values.count, values), sum(1 / len(answer[4]) for answer in answers)):.3g} of {len(answers)}"


def answers_table(methods: dict[str, dict[str, Record]]) -> str:
    """Formats how many answers of each kind are right, of texts of each length."""
    found = {name: defaultdict(list) for name in methods}
    for name, texts in methods.items():
        for record in texts.values():
            length = record["run"]["text"].partition(", ")[2] if record["run"]["task"] in BY_LENGTH else ""
            for answer in record["result"]["answers"]:
                found[name][f"{answer[0]} {length}".strip()].append(answer)
    kinds, rows = sorted({kind for x in found.values() for kind in x}), []
    for name, of_kind in found.items():
        right = [f"{sum(x[3] for x in of_kind[kind]):.3g} of {len(of_kind[kind])}" for kind in kinds]
        told = [x[4] for y in of_kind.values() for x in y if len(x) == 5 and x[0] != "absent"]
        rows.append([name, *right, f"{np.mean(told):.1f}" if told and isinstance(told[0], float) else ""])
    floors = [max((floor_of(x[kind]) for x in found.values()), key=len) for kind in kinds]
    rows += [["most frequent answer, or any", *floors, ""]] if any(floors) else []
    return markdown_table(["method", *kinds, "log p of told answers"], rows)


def tables(records: list[Record]) -> list[str]:
    """Makes the table of each task, texts and window."""
    result = []
    for (data, window), methods in group(records, "loss").items():
        if BASE not in methods:  # a gain is over the window alone
            continue
        result.append(f"## {data}, window {window}\n\n{loss_table(methods, 256)}")
    for task in ("facts", *BY_LENGTH, "conversation"):
        for (data, window), methods in group(records, task).items():
            result.append(f"## {task}, {data}, window {window}\n\n{answers_table(methods)}")
    return result


def plot(records: list[Record], path: Path) -> None:
    """Draws the gain of each method of LABELS that has read all texts against its bytes beyond the window."""
    groups = {key: x for key, x in group(records, "loss").items() if BASE in x and RIVAL in x}
    rows = (len(groups) + 1) // 2
    figure = Figure(figsize=(12, 4.5 * rows), layout="constrained")
    for axes, ((data, window), methods) in zip(
        np.ravel(figure.subplots(rows, 2, squeeze=False)), groups.items(), strict=False
    ):
        found = {name: gains(methods, name) for name in LABELS if name in methods}
        found = {name: (more, gain.mean()) for name, (gain, more) in found.items() if len(gain) == len(methods[BASE])}
        top, lowest = max(y for _, y in found.values()), {}
        for name, (x, y) in sorted(found.items(), key=lambda item: -item[1][1]):
            axes.semilogx(x, y, "o")
            side, place = ("left", x * 1.3) if x < 1e5 or 2e6 < x < 1e8 else ("right", x / 1.3)
            height = lowest[side, x > 2e6] = min(y, lowest.get((side, x > 2e6), np.inf) - top / 22)  # one below another
            axes.text(place, height, LABELS[name], fontsize=9, va="bottom" if x > 1e8 else "center", ha=side)
        axes.axhline(0, color="gray", linewidth=1)
        axes.set(title=f"{data}, {len(methods[BASE])} texts, window {window}", ylabel="gain (nats per token)")
        axes.set(xlabel="bytes beyond the window", xlim=(5e3, 1e9))
    save_figure(figure, path)
