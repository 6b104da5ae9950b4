"""The checkpoints of a run: which one to go on from, what a run must share with it, and whether the run is finished."""

import json
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from titans_hf.cli.shared.checkpoints import find_damage

RECORD = "run.json"  # what a run writes once it has ended
PATTERN = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "pytorch_model_fsdp*", "*.distcp")


# Fields of a configuration that are no property of what is trained.
NOT_COMPARED = ("transformers_version", "auto_map", "use_cache", "dtype", "architectures", "_name_or_path")


class RunFacts(TrainerCallback, ExportableState):
    """Keeps in every checkpoint the facts of its run that one that goes on from it must share."""

    def __init__(self, facts: dict[str, Any]):
        self.facts = facts

    def state(self) -> dict[str, Any]:
        return {"args": {"facts": self.facts}, "attributes": {}}


def config_facts(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the fields of a configuration that a run must share with the checkpoint that it goes on from."""
    fields = json.loads(json.dumps(config.to_dict(), default=str))
    return {name: value for name, value in fields.items() if name not in NOT_COMPARED}


def check_facts(checkpoint: str, facts: dict[str, Any]) -> None:
    """Raises ValueError, naming the first fact that differs, for a checkpoint of a run with other facts."""
    state = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text())
    then = state.get("stateful_callbacks", {}).get(RunFacts.__name__, {"args": {"facts": {}}})["args"]["facts"]
    for name in [name for name in facts if name in then]:
        if then[name] != facts[name]:
            raise ValueError(
                f"--resume_from_checkpoint: {checkpoint} is of a run with {name} {then[name]}, not {facts[name]}: give "
                "the same again, or another --output_dir and the checkpoint as --model_name_or_path"
            )


def find_checkpoint(args: TrainingArguments) -> str | None:
    """Returns the checkpoint to go on from, None to start anew.

    With --resume_from_checkpoint true that is the last complete one; incomplete ones are skipped with a warning. Raises
    ValueError for a folder with checkpoints or a model without that option, so that a run is never written over by
    accident, and for an incomplete checkpoint that was named; FileNotFoundError where there is none.
    """
    folder, wanted = Path(args.output_dir), args.resume_from_checkpoint or "false"
    steps = {int(match[1]): path for path in folder.glob("*") if (match := PATTERN.fullmatch(path.name))}
    checkpoints = [path for _, path in sorted(steps.items(), reverse=True)]
    if wanted.lower() == "false":
        if checkpoints:
            raise ValueError(f"{folder} holds checkpoints: pass --resume_from_checkpoint true or another --output_dir")
        if saved := sorted(file.name for pattern in (RECORD, *WEIGHTS) for file in folder.glob(pattern)):
            raise ValueError(f"{folder} holds a trained model ({saved[0]}): give another --output_dir")
        return None
    if wanted.lower() != "true":
        if not Path(wanted).is_dir():
            raise FileNotFoundError(f"--resume_from_checkpoint {wanted}: no checkpoint in {wanted}")
        if reason := what_is_missing(Path(wanted)):
            raise ValueError(f"--resume_from_checkpoint {wanted} is incomplete: {reason}")
        return wanted
    for checkpoint in checkpoints:
        if not (reason := what_is_missing(checkpoint)):
            return str(checkpoint)
        warnings.warn(f"{checkpoint} is incomplete and skipped: {reason}", stacklevel=2)
    raise FileNotFoundError(f"--resume_from_checkpoint {wanted}: no complete checkpoint in {folder}")


def what_is_missing(checkpoint: Path) -> str | None:
    """Returns why a checkpoint cannot be resumed, None for a complete one. Trainer writes its state last."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return f"it holds no readable {TRAINER_STATE_NAME}, which is written last"
    if not any(file for pattern in WEIGHTS for file in checkpoint.glob(pattern)):
        return "it holds no weights"
    if damage := find_damage(checkpoint):
        return damage
    for file in sorted(path for pattern in ("*.pt", "*.pth", "*.bin") for path in checkpoint.glob(pattern)):
        if not zipfile.is_zipfile(file):
            return f"{file.name} is cut off"
    return None


def read_record(folder: str) -> dict[str, Any] | None:
    """Reads run.json, which a run writes at its end; None where there is none."""
    try:
        record = json.loads((Path(folder) / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return record if {"command", "steps", "planned_steps", "metrics"} <= record.keys() else None
