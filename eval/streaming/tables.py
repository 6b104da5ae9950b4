"""Tables and pictures of finished runs: gains over the window alone, facts found, and their intervals over texts."""

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from eval.common.records import Record
from eval.common.tables import half_width, with_interval
from titans_hf.cli.shared.figures import save_figure
from titans_hf.cli.shared.markdown_tables import markdown_table

EDGES = (0, 1024, 2048, 4096, 8192, 16384, 32768)
BY_LENGTH = ("ruler", "babilong")  # tasks whose lengths are columns
BASE, RIVAL, OURS = "window", "full", "passages"
NOT_FOUND = ("absent", "given")  # kinds of answers that are not a text's facts
LABELS = {  # of the methods in the pictures
    "passages": "passages",
    "fast-passages": "passages, fast weights",
    "fast": "fast weights",
    "both": "fast weights and list",
    "full": "full attention",
    "window": "window",
    "pasted": "the passage pasted",
    "search": "longest match",
    "longer 18 MB": "longer window",
    "tova 4 MB 4 bits": "TOVA, 4 bits",
    "sgd": "SGD",
    "window+knn-4mb": "kNN",
    "window+neural+match": "neural cache and match",
}
COLOURS = {"passages": "tab:red", "fast-passages": "tab:orange", "fast": "tab:blue", "both": "tab:purple"}  # of ours


def group(records: list[Record], task: str) -> dict[tuple[str, int], dict[str, dict[str, Record]]]:
    """Groups the records of a task by texts and window, then by method and text."""
    groups = defaultdict(lambda: defaultdict(dict))
    for record in records:
        run = record["run"]
        if run["task"] == task:
            loss = task == "loss"  # a seed is of the fit there, and of the questions with facts
            method = run["method"]
            method = f"{method}, fit {run['seed']}" if loss and run["seed"] else method
            groups[run["data"], run["window"]][method][run["text"] if loss else f"{run['text']} {run['seed']}"] = record
    return groups


def gains(methods: dict[str, dict[str, Record]], name: str, other: str = BASE) -> tuple[np.ndarray, float]:
    """Returns the gain over the window of each text that it, the method and another one have read, (texts, blocks read
    by all), and the bytes beyond the window.
    """
    texts = sorted(methods[BASE].keys() & methods[name].keys() & methods[other].keys())
    if not texts:
        return np.zeros((0, 1)), 0.0
    read = [[methods[x][text]["result"]["losses"] for text in texts] for x in (BASE, name, other)]
    losses = [np.array(x)[:, : min(len(y[0]) for y in read)] for x in read[:2]]
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
        rows.append([name, f"{more / 1e6:.2f}", with_interval(gain.mean(1)), of_full, *parts, len(gain)])
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


def found_by_text(methods: dict[str, dict[str, Record]], name: str) -> dict[str, float]:
    """Returns the share of right answers of each text, for facts that were told."""
    answers = {text: record["result"]["answers"] for text, record in methods[name].items()}
    told = {text: [x[3] for x in of_text if x[0] not in NOT_FOUND] for text, of_text in answers.items()}
    return {text: float(np.mean(right)) for text, right in told.items() if right}


def answers_table(methods: dict[str, dict[str, Record]]) -> str:
    """Formats how many answers of each kind are right, of texts of each length."""
    found = {name: defaultdict(list) for name in methods}
    for name, texts in methods.items():
        for record in texts.values():
            length = record["run"]["text"].partition(", ")[2] if record["run"]["task"] in BY_LENGTH else ""
            for answer in record["result"]["answers"]:
                found[name][f"{answer[0]} {length}".strip()].append(answer)
    kinds, rows = sorted({kind for x in found.values() for kind in x if kind != "given"}), []
    ours = found_by_text(methods, OURS) if OURS in methods else {}
    for name, of_kind in found.items():
        right = [f"{sum(x[3] for x in of_kind[kind]):.3g} of {len(of_kind[kind])}" for kind in kinds]
        told = [x[4] for y in of_kind.values() for x in y if len(x) == 5 and x[0] != "absent"]
        its = found_by_text(methods, name)
        both = sorted(ours.keys() & its.keys())
        paired = with_interval([ours[x] - its[x] for x in both]) if both and name != OURS else ""
        rows.append([name, *right, f"{np.mean(told):.3f}" if told and isinstance(told[0], float) else "", paired])
    floors = [max((floor_of(x[kind]) for x in found.values()), key=len) for kind in kinds]
    rows += [["most frequent answer, or any", *floors, "", ""]] if any(floors) else []
    return markdown_table(["method", *kinds, "log p", f"{OURS} minus it, share found"], rows)


def tables(records: list[Record]) -> list[str]:
    """Makes the table of each task, texts and window."""
    result = []
    for (data, window), methods in group(records, "loss").items():
        if BASE not in methods:  # a gain is over the window alone
            continue
        result.append(f"## {data}, window {window}\n\n{loss_table(methods, 256)}")
    for task in sorted({x["run"]["task"] for x in records} - {"loss"}):
        for (data, window), methods in group(records, task).items():
            result.append(f"## {task}, {data}, window {window}\n\n{answers_table(methods)}")
    return result


def plot(records: list[Record], path: Path) -> None:
    """Draws what each method of LABELS gains or finds against its bytes beyond the window, with intervals over texts:
    the loss of each kind of texts of which full attention has read all, and facts.
    """
    panels = {}
    for (data, window), methods in group(records, "loss").items():
        if BASE not in methods or RIVAL not in methods:
            continue
        found = {name: gains(methods, name) for name in LABELS if name in methods and name != BASE}
        found = {x: (more, gain.mean(1)) for x, (gain, more) in found.items() if len(gain) == len(methods[BASE])}
        if found:
            panels[f"{data}, {len(methods[BASE])} texts, window {window}"] = "gain (nats per token)", found
    for (data, window), methods in group(records, "facts").items():
        if not {BASE, OURS} <= methods.keys():
            continue
        base = {text: record["bytes"] for text, record in methods[BASE].items()}
        found = {}
        for name in (x for x in LABELS if x in methods):
            of_text = found_by_text(methods, name)
            own, of_window = np.mean([(methods[name][x]["bytes"], base[x]) for x in of_text if x in base], 0)
            more = own - of_window if own > of_window else own  # a method that keeps the text alone has no window
            more = 1e3 if name == BASE else more  # it has none, and a logarithm no 0
            found[name] = more, 100 * np.array(list(of_text.values()))
        panels[f"facts, {data}, {len(methods[OURS])} texts, window {window}"] = "facts found, %", found
    if not panels:
        raise ValueError("--plot: --output has no losses of a window and full attention, and no facts of passages")
    figure = Figure(figsize=(12, 4.2 * ((len(panels) + 1) // 2)), layout="constrained")
    all_axes = np.ravel(figure.subplots((len(panels) + 1) // 2, 2, squeeze=False))
    for axes in all_axes[len(panels) :]:
        axes.remove()
    for axes, (title, (unit, found)) in zip(all_axes, panels.items(), strict=False):
        draw(axes, found)
        axes.axhline(0, color="lightgray", linewidth=1, zorder=0)
        axes.set(title=title, ylabel=unit, xlabel="bytes beyond the window")
    save_figure(figure, path)


def draw(axes, found: dict[str, tuple[float, np.ndarray]]) -> None:
    """Draws methods by bytes and values of texts. Labels stand in a column on the right, none above another."""
    tops = [y.mean() + half_width(y) for _, y in found.values()]
    gap, below = max(tops) / 14, np.inf
    for name, (x, y) in sorted(found.items(), key=lambda item: -item[1][1].mean()):
        colour, is_ours = COLOURS.get(name, "gray"), name in COLOURS
        form = {"fmt": "o", "color": colour, "capsize": 3, "markersize": 5 + 3 * is_ours, "elinewidth": 1 + is_ours}
        axes.errorbar(x, y.mean(), half_width(y), **form)
        below = min(y.mean(), below - gap)
        text = {"xytext": (1.03, below), "textcoords": axes.get_yaxis_transform(), "va": "center"}
        text["fontsize"] = 9 + is_ours
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.4, "alpha": 0.6}
        axes.annotate(LABELS[name], (x, y.mean()), arrowprops=arrow, annotation_clip=False, color=colour, **text)
    axes.set_xscale("log")
    axes.margins(x=0.1)
    axes.set_ylim(min(0, below - gap, axes.get_ylim()[0]), None)
