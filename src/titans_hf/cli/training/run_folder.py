"""The files that a run writes: the best model, its curve, figures and card; and the selection that goes to the Hub."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects
from matplotlib.figure import Figure
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from titans_hf.cli.shared.figures import save_figure
from titans_hf.cli.training.arguments import DataArguments
from titans_hf.cli.training.data import Blocks, count_tokens
from titans_hf.cli.training.model_card import model_card

# The TrainingArguments that decide on the result.
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
# The files of a run's folder that Trainer.push_to_hub leaves out.
NOT_PUSHED = ["_*", f"{PREFIX_CHECKPOINT_DIR}-*", *DEFAULT_IGNORE_PATTERNS]


class CardTrainer(Trainer):
    """A Trainer that makes the model card from the run's record, and saves configurations with `use_cache` true.

    During training Trainer sets `use_cache` to false; saved so, a checkpoint that is called plainly would forget.
    """

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with self._use_cache():
            super()._save(output_dir, state_dict)

    def save_config(self) -> None:
        """Saves the configuration, and the code that travels with it, into the run's folder."""
        with self._use_cache():
            self.model.config.save_pretrained(self.args.output_dir)

    @contextlib.contextmanager
    def _use_cache(self) -> Iterator[None]:
        config, before = self.model.config, self.model.config.use_cache
        config.use_cache = True
        try:
            yield
        finally:
            config.use_cache = before

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


def public_name(source: str | None) -> str | None:
    """Returns the name of a file or folder without its path; a name on the Hub as it is."""
    return Path(source).resolve().name if source and Path(source).exists() else source


def data_facts(args: DataArguments, blocks: Blocks, streamed_tokens: int) -> dict:
    """Describes the data for run.json by names alone: of a file or folder, or a data set's id; paths stay private."""
    return {
        "train": public_name(args.train_data),
        "eval": public_name(args.eval_data or args.train_data),
        "held_out": args.eval_data is None,
        "hub": [] if Path(args.train_data).exists() else [args.train_data],
        "train_blocks": None if args.streaming else len(blocks.train),
        "train_tokens": streamed_tokens if args.streaming else count_tokens(blocks.train),
        "eval_blocks": len(blocks.evaluation),
        "eval_tokens": count_tokens(blocks.evaluation),
    }


def plot_losses(history: list[dict[str, float]], path: Path) -> None:
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for key, label in (("loss", "train"), ("eval_loss", "eval")):
        logs = [log for log in history if key in log]
        axes.plot([log["num_input_tokens_seen"] for log in logs], [log[key] for log in logs], ".-", label=label)
    axes.set(title="Loss while training", xlabel="training tokens", ylabel="loss (nats per token)")
    save_figure(figure, path)


def save_results(trainer: CardTrainer, facts: dict) -> dict[str, float]:
    """Saves the best model, its curve, metrics and card, and run.json, which contains `facts`; returns the metrics."""
    folder, args = Path(trainer.args.output_dir), trainer.args
    trainer.save_model(_internal_call=True)  # an external call would push the unfinished folder
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
