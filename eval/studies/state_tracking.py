"""Which models keep a state beyond the length they were trained at? Words over a group (paper, theorem 4.1).

    python -m eval.studies.state_tracking parity lmm-delta mamba2 --seeds 0 1 2 --output runs.jsonl
    python -m eval.studies.state_tracking --output runs.jsonl   # prints the tables

A sequence is a word of group elements, drawn independently, and a model names the product of all elements so far at
each of them. The groups are `parity` (2 elements), `s3` (6) and `s5` (120, not solvable). Accuracy is by position, on
words that were not used before and are four times as long as in training.

A row names a variant, with the form of its memory where that is not `titans`, or another model of the same size. With
-chunk-1, hidden layers are written after each token, as eq. 10 has it; with -chunk-128 not within a word. -plain has no
momentum, -kept no forgetting, -momentum has it in `delta`. With -step-1, the largest step is 1, with which a linear
memory can reflect its state: a write is I - 2 theta k k^T, with eigenvalues from -1 to 1, by default from 0 to 1.
"""

import argparse
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise, permutations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig

from eval.common.compared_models import Sizes, build_model, fit_config
from eval.common.harness import StudyRun, add_row_options, optimise, train_rows
from eval.common.records import Record, read_records
from eval.common.tables import with_interval
from titans_hf.cli.shared.argument_checks import check_minimums
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.markdown_tables import markdown_table

BENCHMARK = "state_tracking"
GROUPS = {"parity": 2, "s3": 3, "s5": 5}  # of all permutations of so many things
PARAMETERS, SCORED, TIMES = 120_000, 256, (1, 2, 4)
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.05}
SHAPE |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SPAN = {"sliding_window": 16, "segment_length": 16, "memory_chunk_size": 8}  # attention sees half of a trained word
SIZES = Sizes(SHAPE, SPAN, {"chunk_size": 32})
DELTA = {"memory_form": "delta"}
ROWS = {
    **{variant: (variant, {}) for variant in ("lmm", "mac", "mag", "mal")},
    "lmm-chunk-1": ("lmm", {"memory_chunk_size": 1}),
    "lmm-chunk-128": ("lmm", {"memory_chunk_size": 128, "segment_length": 128}),
    "lmm-plain": ("lmm", {"memory_momentum": False}),
    "lmm-kept": ("lmm", {"memory_forget": False}),
    "lmm-off": ("lmm", {"memory_max_lr": 0}),
    "lmm-step-1": ("lmm", {"memory_max_lr": 1}),
    "lmm-delta": ("lmm", DELTA),
    "lmm-delta-momentum": ("lmm", DELTA | {"memory_momentum": True}),
    "lmm-delta-step-1": ("lmm", DELTA | {"memory_max_lr": 1}),
    **{name: (name, {}) for name in ("gated-deltanet", "mamba2", "llama")},
}


@dataclass(frozen=True, kw_only=True)
class Run(StudyRun):
    """All that a run depends on."""

    task: str
    length: int

    @property
    def name(self) -> str:
        return f"{self.task}: {self.row}, rate {self.learning_rate:g}, seed {self.seed}"


def multiplication(task: str) -> Tensor:
    """Returns the products (N, N) of a group's elements: entry (a, b) is b after a."""
    elements = list(permutations(range(GROUPS[task])))
    index = {element: i for i, element in enumerate(elements)}
    return torch.tensor([[index[tuple(b[i] for i in a)] for b in elements] for a in elements])


def draw(products: Tensor, rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws words and the products of their elements so far, both (B, T)."""
    words = torch.randint(len(products), (rows, length), generator=generator)
    states = [words[:, 0]]
    for t in range(1, length):
        states.append(products[states[-1], words[:, t]])
    return words, torch.stack(states, 1)


def config_of(task: str, row: str) -> PreTrainedConfig:
    """Makes the config of a row, of about PARAMETERS parameters without the embeddings of larger groups."""
    if row not in ROWS:
        raise ValueError(f"ROW {row!r} must be one of {', '.join(ROWS)}")
    name, settings = ROWS[row]
    size = len(multiplication(task))
    return fit_config(name, PARAMETERS + 2 * 64 * size, settings | {"vocab_size": size}, SIZES)


def train(run: Run, config: PreTrainedConfig) -> Record:
    """Trains a row; returns its accuracy by position, in units of the trained length."""
    products = multiplication(run.task)
    model = build_model(ROWS[run.row][0], config)

    def draw_loss(generator: torch.Generator) -> Tensor:
        words, states = draw(products, run.batch_size, run.length, generator)
        return cross_entropy(model(input_ids=words, use_cache=False).logits.mT, states)

    optimise(model, draw_loss, run)
    words, states = draw(products, SCORED, TIMES[-1] * run.length, torch.Generator().manual_seed(10**6))
    with torch.inference_mode():
        parts = [model(input_ids=part, use_cache=False).logits.argmax(-1) for part in words.split(64)]
    right = (torch.cat(parts) == states).float()
    edges = [0, *(times * run.length for times in TIMES)]
    accuracy = {f"{b // run.length}": round(right[:, a:b].mean().item(), 4) for a, b in pairwise(edges)}
    return {"result": accuracy, "parameters": model.num_parameters()}


def tables(records: list[Record]) -> str:
    """Formats the accuracy of all rows, a table for each group."""
    found = defaultdict(lambda: defaultdict(list))
    for record in records:
        run = record["run"]
        found[run["task"]][run["row"], run["learning_rate"], run["steps"]].append(record)
    parts = []
    for task, rows in found.items():
        lines = []
        for (row, rate, steps), runs in rows.items():
            cells = [with_interval([run["result"][f"{times}"] for run in runs], ".3f") for times in TIMES]
            lines.append([row, rate, steps, f"{runs[0]['parameters']:,}", len(runs), *cells])
        names = [f"to {times} times the trained length" for times in TIMES]
        parts.append(markdown_table([task, "rate", "steps", "parameters", "seeds", *names], lines))
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("task", choices=list(GROUPS), nargs="?", help="without a task, the tables are printed")
    add_row_options(parser, ", ".join(ROWS), "words", steps=600, batch_size=32, learning_rate=3e-3)
    parser.add_argument("--length", type=int, default=32, help="elements of a word in training")
    args = parser.parse_args(argv)
    check_minimums(args, length=4)
    train_rows(BENCHMARK, Run, args, lambda run: config_of(run.task, run.row), train)
    if not args.rows:
        print(tables(read_records(args.output, BENCHMARK)))


if __name__ == "__main__":
    run_command(main)
