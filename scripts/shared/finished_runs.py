"""The JSON files of finished runs: a repeated command goes on where it stopped."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any


def is_finished(run: Any, file: Path) -> bool:
    """Returns True if the JSON file has this run, a dataclass; raises ValueError if it has one of other settings."""
    if not file.exists():
        return False
    found = json.loads(file.read_text(encoding="utf-8"))["run"]
    for name, value in asdict(run).items():
        if found[name] != value:
            raise ValueError(
                f"{file} is of a run with {name}={found[name]}, not {value}: give another --label or --output"
            )
    return True


def write_record(record: dict[str, Any], file: Path) -> None:
    """Writes a finished run's record to a JSON file, which is there complete or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".partial")
    unfinished.write_text(json.dumps(record) + "\n", encoding="utf-8")
    unfinished.replace(file)
