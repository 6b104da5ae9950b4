"""The JSON files of finished runs: a repeated command goes on where it stopped."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

VERSION = "transformers_version"  # in every config, and no property of the model


def is_finished(run: Any, file: Path, config: PreTrainedConfig | None) -> bool:
    """Returns True if the JSON file has this run, a dataclass, of a model of this config, None for one without.

    Raises ValueError if it has one of other settings, or of a model whose defaults were others when it was made.
    """
    if not file.exists():
        return False
    record = json.loads(file.read_text(encoding="utf-8"))
    for name, value in asdict(run).items():
        if record["run"].get(name, value) != value:  # a field that was added since then is not compared
            raise ValueError(
                f"{file} is of a run with {name}={record['run'][name]}, not {value}: give another --label or --output"
            )
    if config is None:
        return True
    then, now = record.get("config"), json.loads(json.dumps(config.to_diff_dict()))
    if then is None:
        raise ValueError(f"{file} does not say what defaults its model had: give another --output")
    for name in sorted(then.keys() & now.keys() - {VERSION}):
        if then[name] != now[name]:
            raise ValueError(
                f"{file} is of a model with {name}={then[name]}, which is {now[name]} by default now: "
                "give another --output"
            )
    return True


def write_record(record: dict[str, Any], file: Path) -> None:
    """Writes a finished run's record to a JSON file, which is there complete or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".partial")
    unfinished.write_text(json.dumps(record) + "\n", encoding="utf-8")
    unfinished.replace(file)
