"""The checkpoints of a run: the checkpoint to resume, and the facts that both runs must share."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

FEW_STEPS = 100
RECORD = "run.json"  # the file that a run writes once it has ended
PATTERN = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
# Facts that a run shares with the checkpoint that it resumes, as `run_folder.describe` names them.
COMPARED = ("block_length", "repeat_passages", "seed", "train_tokens", "eval_tokens")
# Fields of a configuration that do not change the trained function.
NOT_COMPARED = ("transformers_version", "auto_map", "use_cache", "dtype", "architectures", "_name_or_path")


class RunFacts(TrainerCallback, ExportableState):
    """Facts of a run and its configuration's fields, in every checkpoint: a run resumes it only if they are equal."""

    def __init__(self, model: PreTrainedModel, record: dict[str, Any]):
        fields = json.loads(json.dumps(model.config.to_dict(), default=str))
        fields = {name: value for name, value in fields.items() if name not in NOT_COMPARED}
        self.facts = fields | {"parameters": model.num_parameters()} | {name: record[name] for name in COMPARED}

    def state(self) -> dict[str, Any]:
        return {"args": {"facts": self.facts}, "attributes": {}}

    def check(self, checkpoint: str) -> None:
        """Raises ValueError for a checkpoint of a run with other facts; the error names the first that differs."""
        callbacks = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text()).get("stateful_callbacks", {})
        then = callbacks[RunFacts.__name__]["args"]["facts"] if RunFacts.__name__ in callbacks else {}
        for name in [name for name in self.facts if name in then and then[name] != self.facts[name]]:
            raise ValueError(
                f"--resume_from_checkpoint: {checkpoint} is of a run with {name} {then[name]}, not {self.facts[name]}: "
                "give the same again, or another --output_dir and the checkpoint as --model_name_or_path"
            )

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            few = args.max_steps < 1 and state.max_steps < FEW_STEPS
            print(*[f"{name}: {self.facts[name]}" for name in ("model_type", "parameters", *COMPARED)], sep="\n")
            hint = ", too few to learn from: give a smaller --tokens_per_step or more --num_train_epochs"
            print(f"steps: {state.max_steps}{hint * few}")
            if state.global_step >= state.max_steps:
                print("all steps have been made: only the final files are written")
            elif state.global_step:
                print(f"goes on after step {state.global_step}")


def find_checkpoint(args: TrainingArguments) -> str | None:
    """Returns the checkpoint that --resume_from_checkpoint names, for `true` the last complete checkpoint; None without
    the option.

    Raises ValueError for an --output_dir with checkpoints or a model if nothing is resumed: a run never overwrites
    another run. Raises FileNotFoundError if no checkpoint is complete.
    """
    folder, wanted = Path(args.output_dir), args.resume_from_checkpoint or "false"
    steps = {int(match[1]): path for path in folder.glob("*") if (match := PATTERN.fullmatch(path.name))}
    if wanted.lower() == "false":
        if steps:
            raise ValueError(f"{folder} holds checkpoints: pass --resume_from_checkpoint true or another --output_dir")
        for file in [file for pattern in (RECORD, "*.safetensors", "*.bin") for file in folder.glob(pattern)]:
            raise ValueError(f"{folder} holds a trained model ({file.name}): give another --output_dir")
        return None
    for checkpoint in [steps[x] for x in sorted(steps, reverse=True)] if wanted.lower() == "true" else [Path(wanted)]:
        try:
            json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
            return str(checkpoint)
        except (OSError, ValueError):
            reason = f"it holds no readable {TRAINER_STATE_NAME}, which is written last"
            warnings.warn(f"{checkpoint} is incomplete and skipped: {reason}", stacklevel=2)
    raise FileNotFoundError(f"--resume_from_checkpoint {wanted}: no complete checkpoint (--output_dir {folder})")


def how_to_go_on(step: int, args: TrainingArguments) -> str:
    """Says what an interrupted run has lost, and by which option the same command goes on."""
    last = get_last_checkpoint(args.output_dir)
    if last is None:
        return f"stopped at step {step}, before the first checkpoint: the run begins anew (--save_steps saves sooner)"
    lost = step - int(Path(last).name.rpartition("-")[2])
    return f"stopped at step {step}: the same command with --resume_from_checkpoint true goes on, {lost} steps are lost"
