"""The files that a run writes: the best model, its figures and card."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from matplotlib.figure import Figure
from transformers import Trainer

from titans_hf.cli.shared.figures import save_figure
from titans_hf.cli.training.checkpoints import RECORD
from titans_hf.cli.training.data import Blocks, count_tokens
from titans_hf.cli.training.model_card import LOSSES, fill_card
from titans_hf.cli.training.trainer_arguments import TrainingArguments
from titans_hf_console import RunArguments


class CardTrainer(Trainer):
    """A Trainer that evaluates per token and fills in the model card of a Titans.

    Trainer's own mean over sequences would give a short last block the weight of a full one.
    """

    def _run_epoch(self, *args, **kwargs) -> None:
        """Reads an epoch, unless a run has been resumed after its last step: Trainer would make one step more."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args, **kwargs) -> Any:
        return super().compute_loss(model, {**inputs, "use_cache": False}, *args, **kwargs)

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        """Returns summed loss and number of predicted tokens of every row, as `train.perplexity` takes them."""
        inputs = self._prepare_inputs(inputs)
        targets = F.pad(inputs.pop("labels")[:, 1:], (0, 1), value=-100)
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**inputs, use_cache=False).logits
        losses = F.cross_entropy(logits.mT.float(), targets, reduction="none")
        return None, losses.sum(1), (targets != -100).sum(1)

    def create_model_card(self, *args, **kwargs) -> None:
        """Writes README.md. Raises FileNotFoundError before the run has been recorded."""
        if not self.is_world_process_zero():
            return
        file, config = Path(self.args.output_dir) / "README.md", self.model.config
        record = json.loads(file.with_name(RECORD).read_text())
        # A resumed run's first logs come sorted from a file. The table has the columns of its first line in all lines.
        history = self.state.log_history = [dict(sorted(log.items())) for log in self.state.log_history]
        for log in [log for log in history if "train_loss" not in log]:
            log.pop("train_runtime", None)  # Trainer takes the first log with it for the last: its table would be empty
        super().create_model_card(*args, **kwargs | {"license": record["license"]})
        if config.model_type == "titans":
            draw_losses(history, file.with_name(LOSSES))
            fill_card(ModelCard.load(file), config, record).save(file)


def draw_losses(history: list[dict[str, float]], path: Path) -> None:
    """Draws the losses of a run's logs by step."""
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    for key, label in {"loss": "training", "eval_loss": "evaluation"}.items():
        logs = [log for log in history if key in log]
        axes.plot([log["step"] for log in logs], [log[key] for log in logs], label=label)
    axes.set(xlabel="step", ylabel="nats per token")
    save_figure(figure, path)


def public_name(source: str | None) -> str | None:
    """Returns the name of a file or folder; its path stays private. A name on the Hub is returned unchanged."""
    return Path(source).resolve().name if source and Path(source).exists() else source


def describe(run: RunArguments, args: TrainingArguments, blocks: Blocks) -> dict[str, Any]:
    """Returns the facts of a run that are known before it begins, for run.json."""
    return {
        "license": run.license,
        "base_model": public_name(run.model_name_or_path),
        "train_data": public_name(run.train_data),
        "eval_data": public_name(run.eval_data or run.train_data),
        "held_out": run.eval_data is None,
        "hub": [] if Path(run.train_data).exists() else [run.train_data],
        "block_length": run.block_length,
        "repeat_passages": run.repeat_passages,
        "seed": args.seed,
        "train_tokens": None if run.streaming else count_tokens(blocks.train),
        "eval_tokens": count_tokens(blocks.evaluation),
    }


def save_results(trainer: CardTrainer, record: dict) -> dict[str, float]:
    """Saves the best model, its metrics and card, and run.json: `record` with the results. Returns the metrics."""
    folder, args, state = Path(trainer.args.output_dir), trainer.args, trainer.state
    trainer.save_model(_internal_call=True)  # an external call would push the unfinished folder
    trainer.save_state()
    metrics = trainer.evaluate()
    if hasattr(trainer.model, "set_memory_learning"):
        trainer.model.set_memory_learning(False)
        metrics["eval_loss_memory_off"] = trainer.evaluate(metric_key_prefix="memory_off")["memory_off_loss"]
        trainer.model.set_memory_learning(True)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        record |= {
            "name": trainer.hub_model_id or args.hub_model_id or folder.resolve().name,
            "model_type": trainer.model.config.model_type,
            "parameters": trainer.model.num_parameters(),
            "steps": state.global_step,
            "planned_steps": state.max_steps,
            "best_step": state.best_global_step if args.load_best_model_at_end else None,
            "tokens_seen": state.num_input_tokens_seen,
            "metrics": metrics,
        }
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        trainer.create_model_card()
    return metrics
