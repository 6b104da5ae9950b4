"""The model card of a run of titans-hf train, from its configuration and its record (run.json)."""

import json
import re
import shlex
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig

from titans_hf.cli.shared.markdown_tables import markdown_table
from titans_hf.configuration_titans import TitansConfig, field_facts

METRICS = {
    "eval_loss": ("loss", "loss per token, in nats"),
    "eval_perplexity": ("perplexity", "perplexity per token"),
    "eval_bits_per_byte": ("bits_per_byte", "bits per byte"),
}
LOADING = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({name}{arguments})
tokenizer = AutoTokenizer.from_pretrained({name}{arguments})
prompt = tokenizer("It was a dark night, and", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=80)[0]))
```
"""
TITANS = """A language model with a memory that learns while it reads: Titans
([Learning to Memorize at Test Time](https://arxiv.org/abs/2501.00663)), variant **{variant}**.
State and time per token are constant at any context length. A cache holds what was read: treat it like the text."""


def model_card(config: PreTrainedConfig, record: dict) -> ModelCard:
    """Makes the card of a run; `record` is what `run_folder.save_results` writes to run.json."""
    titans, record = config.model_type == "titans", one_line(record)
    data, metrics = record["data"], {key: value for key, value in record["metrics"].items() if key in METRICS}
    evaluated_on = f"{data['eval']} (held out)" if data["held_out"] else data["eval"]
    results = [
        EvalResult(
            task_type="text-generation",
            task_name="Language modelling",
            dataset_type=data["eval"],
            dataset_name=evaluated_on,
            dataset_split="validation",
            metric_type=METRICS[key][0],
            metric_name=METRICS[key][1],
            metric_value=value,
        )
        for key, value in metrics.items()
    ]
    metadata = ModelCardData(
        license=record["license"],
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[config.model_type, config.variant] if titans else [config.model_type],
        datasets=data["hub"] or None,
        model_name=record["name"].split("/")[-1],
        eval_results=results,
    )
    kind = TITANS.format(variant=config.variant.upper()) if titans else f"A language model of type {config.model_type}."
    weights = escape(record["license"]) if record["license"] else "not stated by whoever trained them"
    text = f"""# {escape(record["name"])}

{kind}

## Load

{loading(titans, record["name"])}

## Sizes

{sizes(config, record)}

## Training

{training(record)}

## Evaluation

On {escape(evaluated_on)}, {data["eval_tokens"]:,} tokens, by the training script:

{table([(METRICS[key][1], f"{value:.4f}") for key, value in metrics.items()])}

## Licence

Weights: {weights}.{" Code (`*.py`): Apache-2.0." * titans}
"""
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}")


def one_line(value: Any) -> Any:
    """Puts every text in the value on one line: a line's end would end a heading, a row or an entry of the card."""
    if isinstance(value, dict):
        return {key: one_line(x) for key, x in value.items()}
    if isinstance(value, list):
        return [one_line(x) for x in value]
    return " ".join(value.split()) if isinstance(value, str) else value


def escape(text: str) -> str:
    """Escapes a text for Markdown, but for the | of tables, which `markdown_table` escapes."""
    return re.sub(r"([\\`*_{}\[\]<>#~$&])", r"\\\1", text)


def table(rows: list[tuple]) -> str:
    """Makes a table of names and values, without a heading."""
    return markdown_table(["", ""], [(name, f"{x:,}" if type(x) is int else x) for name, x in rows])


def loading(titans: bool, name: str) -> str:
    """Makes the code that loads the model; of Titans by the code beside the weights, or as a server."""
    code = LOADING.format(name=json.dumps(name, ensure_ascii=False), arguments=", trust_remote_code=True" * titans)
    if not titans:
        return code
    return f"""{code}
The code needs transformers 5.21 or newer. With the package, `import titans_hf` takes the place of
`trust_remote_code=True`. A server with OpenAI's API:

```bash
python -m titans_hf serve {shlex.quote(name)}
```"""


def sizes(config: PreTrainedConfig, record: dict) -> str:
    """Makes the table of the sizes that mean something to the model."""
    variant = config.variant if config.model_type == "titans" else "mag"  # other models have attention and a window
    shown = {name: fact["card"] for name, fact in field_facts(TitansConfig).items() if variant in fact["variants"]}
    values = [(label, getattr(config, name, None)) for name, label in shown.items() if label is not None]
    return table([("parameters", record["parameters"]), *((label, size) for label, size in values if size is not None)])


def training(record: dict) -> str:
    """Describes what the model was trained on, for how long, with which arguments and versions."""
    data, start = record["data"], f"From {escape(record['base_model'])}" if record["base_model"] else "From scratch"
    best = f" The weights are of step {record['best_step']:,}, the best in evaluation." if record["best_step"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"{start} on {escape(data['train'])} ({data['train_tokens']:,} tokens), {record['tokens_seen']:,} tokens in "
        f"{record['steps']:,} steps. Nothing else was done to it: no instructions, no preferences, no filter.{best}\n\n"
        f"{table([(f'`{name}`', escape(str(value))) for name, value in record['arguments'].items()])}\n\n"
        f"Made with {versions}."
    )
