"""Do recurrences of equal size recall the demo's facts far beyond the trained distance, as Titans do?

    python -m eval.studies.recalled_facts lmm gated-deltanet mamba2 --seeds 0 1 2 --output runs.jsonl
    python -m eval.studies.recalled_facts --output runs.jsonl --plot recall.png   # prints the table, draws the picture

The task is that of `titans-hf demo`: six facts, at most 16 tokens of filler, 16 questions; then one question after up
to 1,024 tokens. Rows are Titans' variants as the demo has them, lmm-off, never written, and baselines with as many
parameters as lmm. gated-deltanet-late starts as Titans do: keys a token late, a tenth of the output, and little is
forgotten.
"""

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from eval.common.compared_models import Sizes, build_model, count_parameters, fit_config, start_like_titans
from eval.common.harness import StudyRun, add_row_options, optimise, train_rows
from eval.common.records import Record, read_records
from eval.common.tables import with_interval
from titans_hf.cli import demo
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.markdown_tables import markdown_table

BENCHMARK = "recalled_facts"
VARIANTS = ("lmm", "mac", "mag", "mal")
ROWS = (*VARIANTS, "lmm-off", "gated-deltanet", "gated-deltanet-late", "mamba2")
SHAPE = {"vocab_size": demo.VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = Sizes(SHAPE | {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}, {}, {"chunk_size": 16})
QUESTIONS = 128  # at each distance


@dataclass(frozen=True, kw_only=True)
class Run(StudyRun):
    """All that a run depends on."""

    @property
    def name(self) -> str:
        return f"{self.row}, rate {self.learning_rate:g}, {self.steps} steps, seed {self.seed}"


def config_of(row: str) -> PreTrainedConfig:
    """Makes the config of a row."""
    if row in VARIANTS:
        return demo.make_configs(row)[f"Titans {row.upper()}"]
    if row == "lmm-off":
        config = config_of("lmm")
        config.memory_max_lr = 0
        return config
    if row not in ROWS:
        raise ValueError(f"ROW {row!r} must be one of {', '.join(ROWS)}")
    return fit_config(row.removesuffix("-late"), count_parameters("lmm", config_of("lmm")), {}, SIZES)


def train(run: Run, config: PreTrainedConfig) -> Record:
    """Trains a row; returns the share of right answers at each distance."""
    model = build_model(run.row, config)
    if run.row.endswith("-late"):
        start_like_titans(model)

    def draw_loss(generator: torch.Generator) -> Tensor:
        filler = int(torch.randint(demo.TRAINED_FILLER + 1, (), generator=generator))
        ids, labels = demo.make_batch(run.batch_size, filler, generator)
        return model(input_ids=ids, labels=labels, use_cache=False).loss

    optimise(model, draw_loss, run)
    found = {}
    for distance in demo.DISTANCES:
        ids, _ = demo.make_batch(QUESTIONS, distance, torch.Generator().manual_seed(10**6), num_queries=1)
        with torch.inference_mode():
            logits = [model(input_ids=part[:, :-1], use_cache=False).logits[:, -1] for part in ids.split(32)]
        found[f"{distance}"] = (torch.cat(logits).argmax(-1) == ids[:, -1]).float().mean().item()
    return {"result": found, "parameters": model.num_parameters()}


def table(records: list[Record]) -> str:
    """Formats the recall of all rows by distance: the mean, its interval over seeds, and the least."""
    rows = defaultdict(list)
    for record in records:
        run = record["run"]
        rows[run["row"], run["learning_rate"], run["steps"]].append(record)
    lines = []
    for name, runs in rows.items():
        found = [[run["result"][f"{distance}"] for run in runs] for distance in demo.DISTANCES]
        cells = [f"{with_interval(x, '.2f')}, least {min(x):.2f}" for x in found]
        lines.append([*name, f"{runs[0]['parameters']:,}", len(runs), *cells])
    distances = [f"after {distance} tokens" for distance in demo.DISTANCES]
    return markdown_table(["recall", "rate", "steps", "parameters", "seeds", *distances], lines)


def plot(records: list[Record], learning_rate: float, path: Path) -> None:
    """Draws the recall of each row by distance, of the runs at one rate: the mean and the spread over seeds."""
    rows = defaultdict(list)
    for record in records:
        if record["run"]["learning_rate"] == learning_rate:
            rows[record["run"]["row"]].append([record["result"][f"{distance}"] for distance in demo.DISTANCES])
    demo.plot({row: rows[row] for row in ROWS if row in rows}, path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add_row_options(parser, ", ".join(ROWS), "sequences", steps=600, batch_size=32, learning_rate=2e-3)
    parser.add_argument("--plot", type=Path, help="a file for a picture of the runs at --learning_rate")
    args = parser.parse_args(argv)
    train_rows(BENCHMARK, Run, args, lambda run: config_of(run.row), train)
    records = read_records(args.output, BENCHMARK)
    if not args.rows:
        print(table(records))
    if args.plot:
        plot(records, args.learning_rate, args.plot)


if __name__ == "__main__":
    run_command(main)
