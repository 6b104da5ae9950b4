"""Finished runs, a line of a JSON Lines file each: a repeated command goes on with the runs that are missing."""

import json
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

FILE = "runs.jsonl"  # in the folder of --output
Record = dict[str, Any]


def read_lines(file: Path) -> list[Record]:
    """Reads the objects of a JSON Lines file. Raises ValueError, naming the line, for a line that is no JSON object."""
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number}, is no JSON: {error}") from error
        if not isinstance(found[-1], dict):
            raise ValueError(f"{file}, line {number}, is no JSON object, but {line[:40]}")
    return found


def file_of(path: Path) -> Path:
    """Returns the file of runs that `--output` names: a JSON Lines file, or FILE in a folder."""
    return path if path.suffix == ".jsonl" else path / FILE


def read_records(path: Path, benchmark: str) -> list[Record]:
    """Reads the runs of a file, or of FILE in a folder: none where there is no file.

    Raises ValueError for a line that is no run of the benchmark, such as "dna".
    """
    file = file_of(path)
    records = read_lines(file) if file.exists() else []
    for number, record in enumerate(records, 1):
        if record.get("benchmark") != benchmark:
            raise ValueError(f"{file}, line {number}, is no run of eval.{benchmark}")
    return records


def append_record(record: Record, file: Path) -> None:
    """Adds a line to the file, at once: several processes may write to one file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as stream:
        stream.write(json.dumps(record).encode() + b"\n")


def find_finished(records: list[Record], run: Any) -> Record | None:
    """Returns the record of this run, a dataclass; None if it is not finished. Raises ValueError for a record of the
    run's name with other settings.
    """
    record = next((record for record in records if record["name"] == run.name), None)
    for name, value in asdict(run).items() if record else ():
        if record["run"].get(name, value) != value:  # a field that was added since then is not compared
            raise ValueError(
                f"{run.name} is finished with {name}={record['run'][name]}, not {value}: "
                "give another --label or --output"
            )
    return record


def describe_commit() -> str:
    """Names the commit of the code, with "+" where files differ from it; empty outside a git checkout."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
