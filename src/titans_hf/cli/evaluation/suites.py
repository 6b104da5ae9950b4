"""The suites of tasks, each with its data from the Hub or from a local folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEEDLE_LENGTHS = (2048, 4096, 8192, 16384)
BABILONG_LENGTHS = (0, *(1024 * 2**i for i in range(8)))


@dataclass(frozen=True)
class Task:
    """One column of a table. `hub` and `local` are lm-eval's names of the task, `needs` the files that it reads."""

    name: str
    suite: str
    hub: str
    local: str | None
    needs: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Unit:
    """A task, at one length if it has lengths: the unit of evaluating and saving."""

    task: Task
    lm_eval_name: str
    length: int | None = None

    def __str__(self) -> str:
        return self.lm_eval_name if self.length is None else f"{self.lm_eval_name}-{self.length}"

    def metadata(self, data: Path | None, tokenizer: str, limit: int | None) -> dict[str, Any]:
        """Returns the metadata that lm-eval passes to the code that makes the task's documents."""
        lengths: Any = [self.length]
        if self.task.suite == "babilong":
            lengths = f"{self.length // 1024}k" if data is None else self.length
        metadata = {"data": data and str(data), "tokenizer": tokenizer, "samples": limit, "max_seq_lengths": lengths}
        return {name: value for name, value in metadata.items() if value not in (None, [None])}


def _local(name: str, suite: str, *needs: str) -> Task:
    return Task(name, suite, name, f"{name}_local", needs)


def _books(name: str, suite: str, needs: tuple[str, ...], lengths: tuple[int, ...]) -> Task:
    return Task(name, suite, name, f"{name}_books", needs, lengths)


_WIKITEXT = ("wikitext/wiki.test.raw", "wikitext/wikitext-2/test.txt")
TASKS = {
    task.name: task
    for task in (
        _local("wikitext", "lm", *_WIKITEXT),
        Task("wikitext_whole", "lm", "wikitext_whole", "wikitext_whole", _WIKITEXT),
        _local("lambada_openai", "lm", "lambada/lambada_test.jsonl"),
        _local("piqa", "commonsense", "commonsense/piqa"),
        _local("hellaswag", "commonsense", "commonsense/hellaswag"),
        _local("winogrande", "commonsense", "commonsense/winogrande"),
        _local("arc_easy", "commonsense", "commonsense/arc"),
        _local("arc_challenge", "commonsense", "commonsense/arc"),
        Task("social_iqa", "commonsense", "social_iqa", None),
        _local("boolq", "commonsense", "commonsense/boolq"),
        Task("niah_single_1", "niah", "niah_single_1", "niah_single_1_local", (), NEEDLE_LENGTHS),
        *(_books(f"niah_single_{i}", "niah", ("books/test",), NEEDLE_LENGTHS) for i in (2, 3)),
        *(_books(f"babilong_qa{i}", "babilong", ("babi/en-10k", "books/test"), BABILONG_LENGTHS) for i in range(1, 6)),
    )
}
SUITES = tuple(dict.fromkeys(task.suite for task in TASKS.values()))


def choose(names: list[str]) -> list[Task]:
    """Finds the tasks of suites and single tasks by name, each once; raises ValueError for an unknown name."""
    if unknown := [name for name in names if name not in (*SUITES, *TASKS, "all")]:
        known = f"Suites: all {' '.join(SUITES)}. Tasks: {' '.join(TASKS)}"
        raise ValueError(f"--suite {' '.join(unknown)}: no such suite or task. {known}")
    return [task for task in TASKS.values() if {"all", task.suite, task.name} & set(names)]


def plan(tasks: list[Task], data: Path | None, lengths: list[int] | None) -> tuple[list[Unit], list[str]]:
    """Lists the units to evaluate, and the reasons for tasks left out.

    Raises FileNotFoundError for missing data, ValueError for lengths that no chosen task has.
    """
    if data is not None and not data.is_dir():
        raise FileNotFoundError(f"--data {data}: no such folder")
    units, skipped, missing = [], [], []
    for task in tasks:
        if data is not None and task.local is None:
            skipped.append(f"{task.name}: only the Hub has it, and --data was given")
            continue
        missing += [need for need in task.needs if data is not None and not (data / need).exists()]
        name = task.hub if data is None else task.local
        units += [Unit(task, name, length) for length in (task.lengths and (lengths or task.lengths)) or (None,)]
    if missing:
        raise FileNotFoundError(f"--data {data} holds no {', '.join(dict.fromkeys(missing))}")
    if lengths and not any(task.lengths for task in tasks):
        raise ValueError("--lengths: no chosen task has lengths")
    return units, skipped
