"""Writes the JSON file of a finished task."""

import json
from pathlib import Path
from typing import Any


def write_record(record: dict[str, Any], file: Path) -> None:
    """Writes a finished run's record to a JSON file, which is there complete or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".partial")
    unfinished.write_text(json.dumps(record) + "\n", encoding="utf-8")
    unfinished.replace(file)
