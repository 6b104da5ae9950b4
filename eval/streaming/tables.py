"""The tables of finished runs: how many answers are right, and what one method finds more than the others."""

from collections import defaultdict

import numpy as np

from eval.common.records import Record
from eval.common.tables import with_interval
from titans_hf.cli.shared.markdown_tables import markdown_table

BY_LENGTH = ("ruler", "babilong")  # tasks whose lengths are columns
OURS = "passages"
NOT_FOUND = ("absent", "given")  # kinds of answers that are not a text's facts


def group(records: list[Record], task: str) -> dict[tuple[str, int], dict[str, dict[str, Record]]]:
    """Groups the records of a task by texts and window, then by method and text."""
    groups = defaultdict(lambda: defaultdict(dict))
    for record in records:
        run = record["run"]
        if run["task"] == task:
            groups[run["data"], run["window"]][run["method"]][f"{run['text']} {run['seed']}"] = record
    return groups


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
    return [
        f"## {task}, {data}, window {window}\n\n{answers_table(methods)}"
        for task in sorted({x["run"]["task"] for x in records})
        for (data, window), methods in group(records, task).items()
    ]
