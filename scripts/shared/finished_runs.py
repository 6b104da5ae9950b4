"""Tells whether the file of a run is there already, so that a repeated command goes on where it stopped."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any


def is_finished(run: Any, file: Path) -> bool:
    """Whether the JSON file has this run, a dataclass; raises ValueError if it has one of other settings."""
    if not file.exists():
        return False
    found = json.loads(file.read_text(encoding="utf-8"))["run"]
    for name, value in asdict(run).items():
        if found[name] != value:
            raise ValueError(
                f"{file} is of a run with {name}={found[name]}, not {value}: give another --label or --output"
            )
    return True
