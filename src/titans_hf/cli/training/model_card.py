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
{imports}
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
    variant = [config.variant] if config.model_type == "titans" else []
    record = one_line(record)
    data = record["data"]
    results = [
        EvalResult(
            task_type="text-generation",
            task_name="Language modelling",
            dataset_type=data["eval"],
            dataset_name=evaluated_on(data),
            dataset_split="validation",
            metric_type=kind,
            metric_name=name,
            metric_value=record["metrics"][key],
        )
        for key, (kind, name) in METRICS.items()
        if key in record["metrics"]
    ]
    metadata = ModelCardData(
        license=record["license"],
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[config.model_type, *variant],
        datasets=data["hub"] or None,
        model_name=record["name"].split("/")[-1],
        eval_results=results,
    )
    parts = [f"# {escape(record['name'])}", introduction(config), "## Load", loading(config, record["name"])]
    parts += ["## Sizes", sizes(config, record), "## Training", training(record)]
    parts += ["## Evaluation", evaluation(record), "## Licence", licence(config, record)]
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


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


def code(text: str) -> str:
    """Makes a code span of the text."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}" if fence == "`" else f"{fence} {text} {fence}"


def evaluated_on(data: dict) -> str:
    """Names the text of the evaluation, and whether it was held out from training."""
    return f"{data['eval']} (held out)" if data["held_out"] else data["eval"]


def table(rows: list[tuple]) -> str:
    """Makes a table of names and values, without a heading."""
    return markdown_table(["", ""], [(name, f"{x:,}" if type(x) is int else x) for name, x in rows])


def introduction(config: PreTrainedConfig) -> str:
    """Names the kind of model."""
    if config.model_type == "titans":
        return TITANS.format(variant=config.variant.upper())
    return f"A language model of type {config.model_type}."


def loading(config: PreTrainedConfig, name: str) -> str:
    """Makes the code that loads the model, of Titans with the package, without it, and as a server."""
    quoted = json.dumps(name, ensure_ascii=False)
    if config.model_type != "titans":
        return LOADING.format(imports="", name=quoted, arguments="")
    package = LOADING.format(imports="import titans_hf  # registers the model\n", name=quoted, arguments="")
    alone = LOADING.format(imports="", name=quoted, arguments=", trust_remote_code=True")
    return (
        f"With the package `titans_hf`:\n\n{package}\n"
        f"Without it, by the code in this repository (transformers 5.21 or newer):\n\n{alone}\n"
        f"As a server with OpenAI's API: {code(f'python -m titans_hf serve {shlex.quote(name)}')}."
    )


def sizes(config: PreTrainedConfig, record: dict) -> str:
    """Makes the table of the sizes that mean something to the model."""
    variant = config.variant if config.model_type == "titans" else "mag"  # other models have attention and a window
    shown = {name: fact["card"] for name, fact in field_facts(TitansConfig).items() if variant in fact["variants"]}
    values = [(label, getattr(config, name, None)) for name, label in shown.items() if label is not None]
    return table([("parameters", record["parameters"]), *((label, size) for label, size in values if size is not None)])


def training(record: dict) -> str:
    """Describes what the model was trained on, for how long, with which arguments and versions."""
    data, source = record["data"], escape(record["data"]["train"])
    start = f"From {escape(record['base_model'])}" if record.get("base_model") else "From scratch"
    text = (
        f"{start} on {source} ({data['train_tokens']:,} tokens), {record['tokens_seen']:,} tokens in "
        f"{record['steps']:,} steps. Nothing else was done to it: no instructions, no preferences, no filter."
    )
    if record["best_step"]:
        text += f" The weights are those of step {record['best_step']:,}, the best in evaluation."
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    arguments = table([(code(name), escape(f"{value}")) for name, value in record["arguments"].items()])
    return f"{text}\n\n{arguments}\n\nMade with {versions}."


def evaluation(record: dict) -> str:
    """Makes the table of the losses on the evaluation text."""
    data, metrics = record["data"], record["metrics"]
    figures = table([(name, f"{metrics[key]:.4f}") for key, (_, name) in METRICS.items() if key in metrics])
    return f"On {escape(evaluated_on(data))}, {data['eval_tokens']:,} tokens, by the training script:\n\n{figures}"


def licence(config: PreTrainedConfig, record: dict) -> str:
    """Names the licence of the weights and, of Titans, that of the code beside them."""
    stated = (
        f"Weights: {escape(record['license'])}."
        if record["license"]
        else "Weights: not stated by whoever trained them."
    )
    return stated + " Code (`*.py`): Apache-2.0." * (config.model_type == "titans")
