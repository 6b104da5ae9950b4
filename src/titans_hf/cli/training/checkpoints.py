"""The checkpoints of a run: the checkpoint to go on from, and what a run must share with it."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from titans_hf.cli.shared.checkpoints import find_damage

RECORD = "run.json"  # what a run writes once it has ended
PATTERN = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
WEIGHTS = ("*.safetensors", "*.bin")
# Fields of a configuration that are no property of what is trained.
NOT_COMPARED = ("transformers_version", "auto_map", "use_cache", "dtype", "architectures", "_name_or_path")


class RunFacts(TrainerCallback, ExportableState):
    """Keeps in every checkpoint the facts of its run that a run that goes on from it must share: `facts`, and the
    fields of the configuration.
    """

    def __init__(self, config: PreTrainedConfig, **facts: Any):
        fields = json.loads(json.dumps(config.to_dict(), default=str))
        self.facts = facts | {name: value for name, value in fields.items() if name not in NOT_COMPARED}

    def state(self) -> dict[str, Any]:
        return {"args": {"facts": self.facts}, "attributes": {}}

    def check(self, checkpoint: str, planned_steps: int) -> None:
        """Raises ValueError for a checkpoint of a run with other facts, whose first is named, or of a finished run."""
        state = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text())
        then = state.get("stateful_callbacks", {}).get(RunFacts.__name__, {"args": {"facts": {}}})["args"]["facts"]
        for name in [name for name in self.facts if name in then and then[name] != self.facts[name]]:
            raise ValueError(
                f"--resume_from_checkpoint: {checkpoint} is of a run with {name} {then[name]}, not {self.facts[name]}: "
                "give the same again, or another --output_dir and the checkpoint as --model_name_or_path"
            )
        if state["global_step"] >= planned_steps:  # Trainer would make one step more
            raise ValueError(f"{checkpoint} has made all {planned_steps} steps: give more, or another --output_dir")


def find_checkpoint(args: TrainingArguments) -> str | None:
    """Returns the checkpoint to go on from, None to start anew.

    With --resume_from_checkpoint true that is the last complete one; incomplete ones are skipped with a warning. Raises
    ValueError for a folder with checkpoints or a model without that option, so that a run is never written over by
    accident, and for an incomplete checkpoint that was named; FileNotFoundError where there is none.
    """
    folder, wanted = Path(args.output_dir), args.resume_from_checkpoint or "false"
    steps = {int(match[1]): path for path in folder.glob("*") if (match := PATTERN.fullmatch(path.name))}
    if wanted.lower() == "false":
        if steps:
            raise ValueError(f"{folder} holds checkpoints: pass --resume_from_checkpoint true or another --output_dir")
        if saved := sorted(file.name for pattern in (RECORD, *WEIGHTS) for file in folder.glob(pattern)):
            raise ValueError(f"{folder} holds a trained model ({saved[0]}): give another --output_dir")
        return None
    if wanted.lower() != "true":
        if reason := what_is_missing(Path(wanted)):
            raise ValueError(f"--resume_from_checkpoint {wanted} is incomplete: {reason}")
        return wanted
    for _, checkpoint in sorted(steps.items(), reverse=True):
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
    return find_damage(checkpoint)
