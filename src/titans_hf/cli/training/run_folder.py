"""The files that a run writes: the best model, its curve, figures and card."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from matplotlib.figure import Figure
from transformers import Trainer

from titans_hf.cli.shared.figures import save_figure
from titans_hf.cli.training.arguments import DataArguments
from titans_hf.cli.training.checkpoints import RECORD
from titans_hf.cli.training.data import Blocks, count_tokens
from titans_hf.cli.training.model_card import model_card

# The TrainingArguments that decide on the result.
ARGUMENTS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "adam_beta1", "adam_beta2"),
    *("max_grad_norm", "per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "bf16", "seed"),
)


class CardTrainer(Trainer):
    """A Trainer that makes the model card from the run's record, and evaluates per token: Trainer's own mean over
    sequences gives a short last block the weight of a full one.
    """

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args, **kwargs) -> Any:
        return super().compute_loss(model, {**inputs, "use_cache": False}, *args, **kwargs)

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        """Returns summed loss and number of predicted tokens of every row, as `train.perplexity` takes them."""
        inputs = self._prepare_inputs(inputs)
        targets = F.pad(inputs.pop("labels")[:, 1:], (0, 1), value=-100)
        targets = inputs.pop("shift_labels", targets)
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**inputs, use_cache=False).logits
        losses = F.cross_entropy(logits.mT.float(), targets, reduction="none")
        return None, losses.sum(1), (targets != -100).sum(1)

    def create_model_card(self, *args, **kwargs) -> None:
        """Writes README.md. Raises FileNotFoundError before the run has been recorded."""
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir)
            model_card(self.model.config, json.loads((folder / RECORD).read_text())).save(folder / "README.md")


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
    folder, args, state = Path(trainer.args.output_dir), trainer.args, trainer.state
    trainer.save_model(_internal_call=True)  # an external call would push the unfinished folder
    trainer.save_state()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        plot_losses(state.log_history, folder / "loss.png")
        given = args.to_dict() | {"world_size": args.world_size}
        record = {
            **facts,
            "name": trainer.hub_model_id or args.hub_model_id or folder.resolve().name,
            "model_type": trainer.model.config.model_type,
            "parameters": trainer.model.num_parameters(),
            "arguments": facts["arguments"] | {name: given[name] for name in ARGUMENTS},
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "steps": state.global_step,
            "best_step": state.best_global_step if args.load_best_model_at_end else None,
            "tokens_seen": state.num_input_tokens_seen,
            "metrics": metrics,
        }
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    trainer.create_model_card()
    return metrics
