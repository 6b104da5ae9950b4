"""The model card of a run: what a Titans is, how it is loaded and what it read, before Trainer's own sections."""

import json
import re
import shlex

from huggingface_hub import ModelCard

from titans_hf.cli.shared.markdown_tables import markdown_table
from titans_hf.configuration_titans import TitansConfig, field_facts

PROCEDURE = "## Training procedure"  # Trainer's section of hyperparameters, results and versions
CARD = """# {title}

A language model with a memory that learns while it reads: Titans
([Learning to Memorize at Test Time](https://arxiv.org/abs/2501.00663)), variant **{variant}**.
State and time per token are constant at any context length. A cache holds what it has read: treat it like the text.

## Load

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({literal}, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained({literal}, trust_remote_code=True)
prompt = tokenizer("It was a dark night, and", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=80)[0]))
```

The code needs transformers 5.21 or newer. With the package, `import titans_hf` takes the place of
`trust_remote_code=True`. A server with OpenAI's API:

```bash
python -m titans_hf serve {quoted}
```

## Sizes

{sizes}

## Data

{start} on {train}: {tokens:,} tokens in {steps:,} steps, in blocks of {block_length:,}. Nothing else was done to it: no
instructions, no preferences, no filter.{best}

Evaluated on {evaluated_on}, {eval_tokens:,} tokens: {metrics}.

## Licence

Weights: {weights}. Code (`*.py`): Apache-2.0.

"""


def fill_card(card: ModelCard, config: TitansConfig, record: dict) -> ModelCard:
    """Replaces the general part of Trainer's card of a Titans. `record` is what `save_results` writes to run.json."""
    name, metrics, best = " ".join(record["name"].split()), record["metrics"], record["best_step"]
    card.data.license, card.data.model_name = record["license"], name.split("/")[-1]
    card.data.pipeline_tag, card.data.tags = "text-generation", [config.model_type, config.variant]
    card.data.datasets = record["hub"] or None
    labels = {"eval_loss": "nats per token", "eval_perplexity": "perplexity", "eval_bits_per_byte": "bits per byte"}
    facts = {
        x: fact for x, fact in field_facts(TitansConfig).items() if fact["card"] and config.variant in fact["variants"]
    }
    sizes = {fact["card"]: getattr(config, x) for x, fact in facts.items() if getattr(config, x) is not None}
    sizes = {"parameters": record["parameters"]} | sizes
    general = CARD.format(
        title=escape(name),
        variant=config.variant.upper(),
        literal=json.dumps(name, ensure_ascii=False),
        quoted=shlex.quote(name),
        sizes=markdown_table(["", ""], [(label, f"{x:,}" if type(x) is int else x) for label, x in sizes.items()]),
        start=f"From {escape(record['base_model'])}" if record["base_model"] else "From scratch",
        train=escape(record["train_data"]),
        tokens=record["tokens_seen"],
        steps=record["steps"],
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
