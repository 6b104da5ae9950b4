"""What a run leaves: the best model, its curve, figures and card, and what of that goes to the Hub."""

import json
import shutil
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects
from matplotlib.figure import Figure
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from titans_hf_scripts.training.data import count_tokens
from titans_hf_scripts.training.model_card import model_card

# Those of TrainingArguments that make the model what it is.
ARGUMENTS = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "optim",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "max_grad_norm",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "world_size",
    "bf16",
    "seed",
)
# What Trainer.push_to_hub leaves out of a run's folder.
NOT_PUSHED = ["_*", f"{PREFIX_CHECKPOINT_DIR}-*", *DEFAULT_IGNORE_PATTERNS]


class CardTrainer(Trainer):
    """A Trainer whose model card is made from the run's record instead of Trainer's own."""

    def create_model_card(self, *args, **kwargs) -> None:
        """Writes README.md. Raises FileNotFoundError before the run has been recorded."""
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir)
            model_card(self.model.config, json.loads((folder / "run.json").read_text())).save(folder / "README.md")


def check_push(args: TrainingArguments, dry_run: str | None) -> None:
    """Raises ValueError for options that would publish a secret, or that contradict each other."""
    if args.hub_token:
        raise ValueError(
            "--hub_token: what is given here is written to run.json and training_args.bin, and pushed: set the "
            "environment variable HF_TOKEN or run `hf auth login`"
        )
    if dry_run and args.push_to_hub:
        raise ValueError("--push_dry_run writes what --push_to_hub would push, instead of it: give one of them")
    if dry_run and Path(dry_run).exists() and (not Path(dry_run).is_dir() or any(Path(dry_run).iterdir())):
        raise ValueError(f"--push_dry_run {dry_run} exists: give a new or an empty folder")


def data_facts(train: str, evaluation: str | None, train_blocks: Dataset, eval_blocks: Dataset) -> dict:
    """What run.json says of the data, without the places where it lies: a file's or folder's name, a data set's id."""
    names = [Path(path).resolve().name if Path(path).exists() else path for path in (train, evaluation or train)]
    return {
        "train": names[0],
        "eval": names[1],
        "held_out": evaluation is None,
        "hub": [] if Path(train).exists() else [train],
        "train_blocks": len(train_blocks),
        "train_tokens": count_tokens(train_blocks),
        "eval_blocks": len(eval_blocks),
        "eval_tokens": count_tokens(eval_blocks),
    }


def plot_losses(history: list[dict[str, float]], path: Path) -> None:
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for key, label in (("loss", "train"), ("eval_loss", "eval")):
        logs = [log for log in history if key in log]
        axes.plot([log["num_input_tokens_seen"] for log in logs], [log[key] for log in logs], ".-", label=label)
    axes.set(xlabel="tokens", ylabel="loss per token")
    axes.legend()
    figure.savefig(path)


def save_results(trainer: CardTrainer, facts: dict) -> dict[str, float]:
    """Saves the model, its curve, its metrics, which are those of the best checkpoint, and its card; `facts` goes into
    run.json as it is.
    """
    folder, args = Path(trainer.args.output_dir), trainer.args
    trainer.save_model(_internal_call=True)  # else it is pushed as it is now
    trainer.save_state()
    if trainer.is_world_process_zero():
        plot_losses(trainer.state.log_history, folder / "loss.png")
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        given = args.to_dict() | {"world_size": args.world_size}
        record = {
            **facts,
            "name": trainer.hub_model_id or args.hub_model_id or folder.resolve().name,
            "model_type": trainer.model.config.model_type,
            "parameters": trainer.model.num_parameters(),
            "arguments": facts["arguments"] | {name: given[name] for name in ARGUMENTS},
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "steps": trainer.state.global_step,
            "best_step": trainer.state.best_global_step if args.load_best_model_at_end else None,
            "tokens_seen": trainer.state.num_input_tokens_seen,
            "metrics": metrics,
        }
        (folder / "run.json").write_text(json.dumps(record, indent=2) + "\n")
    trainer.create_model_card()
    return metrics


def write_dry_run(folder: str, dry_run: str) -> None:
    """Copies to `dry_run` the files of a run's folder that a push would upload."""
    names = [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()]
    for name in filter_repo_objects(names, ignore_patterns=NOT_PUSHED):
        target = Path(dry_run) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(folder) / name, target)
