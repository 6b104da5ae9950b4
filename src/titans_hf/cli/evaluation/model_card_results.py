"""Writes benchmark results into a checkpoint's model card: as metadata for the Hub (model-index), and as a table."""

import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard

from titans_hf.cli.evaluation.result_tables import CHANCE, COLUMNS, NEEDLES, Results, cell, score
from titans_hf.cli.shared.markdown_tables import markdown_table

METRICS = [(task, metric) for _, task, metric in COLUMNS] + [(task, "acc") for task in (*NEEDLES, *CHANCE)]
HEADING = "## Benchmarks"
SECTION = re.compile(rf"^{HEADING}$.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def card_of(path: str) -> Path:
    """Returns the path of a checkpoint's model card. Raises FileNotFoundError where there is none."""
    card = Path(path) / "README.md"
    if not card.is_file():
        raise FileNotFoundError(f"--update_cards: {path} holds no README.md, which titans-hf train writes")
    return card


def update_card(path: Path, results: Results, model: str) -> None:
    """Writes the results of `model` into a card, in the place of earlier ones of these tasks; the rest stays."""
    card = ModelCard.load(path)
    entries, rows = [], []
    for task, length in sorted(results[model], key=str):
        for metric in (metric for known, metric in METRICS if known == task):
            value, result = score(results, model, task, metric, length), results[model][task, length]
            entries.append(_entry(result, metric, value[0]))
            rows.append([task, "" if length is None else f"{length:,}", str(result["documents"]), metric, cell(value)])
    others = [old for old in card.data.eval_results or [] if not any(map(old.is_equal_except_value, entries))]
    card.data.eval_results = [*others, *entries]
    card.data.model_name = card.data.model_name or model
    table = markdown_table(["task", "length", "documents", "metric", "value"], rows)
    section = f"{HEADING}\n\nBy lm-eval; accuracies in percent, ± the standard error.\n\n{table}\n"
    card.text = f"{SECTION.sub('', card.text).rstrip()}\n\n{section}"
    card.save(path)


def _entry(result: dict, metric: str, value: float) -> EvalResult:
    at = "" if result["length"] is None else f" at {result['length']:,} tokens"
    books = " (local data)" if result["source"] == "local" else ""
    return EvalResult(
        task_type="text-generation",
        task_name="Text generation",
        dataset_type=result["task"],
        dataset_name=f"{result['task']}{at}{books}",
        dataset_config=at.strip() or None,
        metric_type="perplexity" if "perplexity" in metric else "accuracy",
        metric_name=metric,
        metric_value=value,
    )
