"""The model card of a run: Titans in a paragraph, loading, and the texts read, before Trainer's own sections."""

import json
import re
import shlex
from pathlib import Path

from huggingface_hub import ModelCard

from titans_hf.cli.shared.markdown_tables import markdown_table
from titans_hf.configuration_titans import TitansConfig, field_facts

CARD = Path(__file__).resolve().parents[1] / "cards" / "train.md"
LOSSES = "losses.png"  # the picture of the losses
PROCEDURE = "## Training procedure"  # Trainer's section of hyperparameters, results and versions


def fill_card(card: ModelCard, config: TitansConfig, record: dict) -> ModelCard:
    """Replaces the general part of Trainer's card of a Titans. `record`: the content of run.json (`save_results`)."""
    name, metrics, best = " ".join(record["name"].split()), record["metrics"], record["best_step"]
    card.data.license, card.data.model_name = record["license"], name.split("/")[-1]
    card.data.pipeline_tag, card.data.tags = "text-generation", [config.model_type, config.variant]
    card.data.datasets = record["hub"] or None
    labels = {"eval_loss": "nats per token", "eval_perplexity": "perplexity", "eval_bits_per_byte": "bits per byte"}
    labels["eval_loss_memory_off"] = "nats per token with the memory off"
    stopped = f" (stopped; {record['planned_steps']:,} were planned)" * (record["steps"] < record["planned_steps"])
    facts = {
        x: fact for x, fact in field_facts(TitansConfig).items() if fact["card"] and config.variant in fact["variants"]
    }
    sizes = {fact["card"]: getattr(config, x) for x, fact in facts.items() if getattr(config, x) is not None}
    sizes = {"parameters": record["parameters"]} | sizes
    general = CARD.read_text(encoding="utf-8").format(
        title=escape(name),
        variant=config.variant.upper(),
        literal=json.dumps(name, ensure_ascii=False),
        quoted=shlex.quote(name),
        sizes=markdown_table(["", ""], [(label, f"{x:,}" if type(x) is int else x) for label, x in sizes.items()]),
        start=f"From {escape(record['base_model'])}" if record["base_model"] else "From scratch",
        train=escape(record["train_data"]),
        tokens=record["tokens_seen"],
        steps=record["steps"],
        stopped=stopped,
        losses=LOSSES,
        block_length=record["block_length"],
        best=f" The weights are of step {best:,}, the best in evaluation." if best else "",
        evaluated_on=escape(record["eval_data"]) + " (held out)" * record["held_out"],
        eval_tokens=record["eval_tokens"],
        metrics=", ".join(f"{label} {metrics[x]:.4f}" for x, label in labels.items() if x in metrics),
        weights=escape(record["license"]) if record["license"] else "not stated by whoever trained them",
    )
    card.text = general + PROCEDURE + card.text.partition(PROCEDURE)[2]
    return card


def escape(text: str) -> str:
    """Puts a text on one line, and escapes it for Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>#~$&|])", r"\\\1", " ".join(text.split()))
