"""Finished runs, a line of a JSON Lines file each: a repeated command goes on with the runs that are missing."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

FILE = "runs.jsonl"  # in the folder of --output
Record = dict[str, Any]


def read_records(path: Path, benchmark: str | None = None) -> list[Record]:
    """Reads the runs of a JSON Lines file, or of FILE in a folder: those of a benchmark, such as "dna", or all. Where
    there is no file, there are none.

    Raises ValueError, naming the line, for a line that is no JSON object.
    """
    file, found = file_of(path), []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines() if file.exists() else [], 1):
        try:
            found.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}, line {number}, is no JSON object: {error}") from error
    return [record for record in found if benchmark in (None, record.get("benchmark"))]


def file_of(path: Path) -> Path:
    """Returns the file of runs that `--output` names: a JSON Lines file, or FILE in a folder."""
    return path if path.suffix == ".jsonl" else path / FILE


def append_record(record: Record, path: Path) -> None:
    """Adds a line to the file of `file_of`, at once: several processes may write to one file."""
    file = file_of(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as stream:
        stream.write(json.dumps(record).encode() + b"\n")


def describe_commit() -> str:
    """Names the commit of the code, with "+" where files differ from it; empty outside a git checkout."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
