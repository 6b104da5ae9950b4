"""The harness of the benchmarks that train small models: their options, a run, its training by Trainer, its record."""

import re
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, set_seed

from eval.common.compared_models import parse_settings
from eval.common.records import FILE, Record, append_record, describe_commit, file_of, find_finished, read_records
from eval.common.tables import check_alike, write_report
from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf.cli.shared.command_line import HelpFormatter

DECIMALS = 4
ConfigOf = Callable[[Any], PreTrainedConfig | None]


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that a run depends on; each benchmark adds fields and a `name`. `row` names the model with its `settings`,
    which replace fields of its configuration.
    """

    data: str
    row: str
    model: str
    settings: dict[str, Any]
    seed: int
    learning_rate: float
    batch_size: int


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """What a run of each study that trains rows with `optimise` depends on; a study adds its fields and a `name`."""

    row: str
    seed: int
    steps: int
    batch_size: int
    learning_rate: float


def make_parser(doc: str, models: Sequence[str], default_models: Sequence[str], batch_size: int) -> ArgumentParser:
    """Makes a parser of the options that all benchmarks have."""
    parser = ArgumentParser(description=doc, formatter_class=HelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=models, default=list(default_models), metavar="MODEL", help=", ".join(models)
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="fields of the models' config")
    parser.add_argument("--label", default="", help="name of the models with these settings in files and tables")
    parser.add_argument("--batch_size", type=int, default=batch_size)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of weights and batches")
    parser.add_argument("--output", type=Path, required=True, help=f"folder of {FILE}, tables and plots")
    return parser


def check_options(args: Namespace, **minimums: float) -> dict[str, Any]:
    """Returns the settings of `--set`; raises ValueError for an option that has no such value."""
    check_minimums(args, batch_size=1, seeds=0, **minimums)
    check_folder(args.output, "--output")
    settings = parse_settings(args.set)
    if not re.fullmatch(r"[\w.-]*", args.label) or (settings and not args.label):
        raise ValueError(f"--label {args.label!r}: --set needs a name of its own, of letters, digits, '.', '_' and '-'")
    return settings


def optimise(model: nn.Module, draw_loss: Callable[[torch.Generator], Tensor], run: StudyRun) -> None:
    """Trains on sequences that are drawn for each step, by AdamW without decay, and leaves the model in evaluation."""
    optimizer, start = torch.optim.AdamW(model.parameters(), run.learning_rate, weight_decay=0.0), time.time()
    warmup = 0.1 if run.steps > 10 else 0.0  # OneCycleLR divides by the number of warm-up steps less one
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, run.learning_rate, run.steps, pct_start=warmup)
    generator = torch.Generator().manual_seed(run.seed)
    model.train()
    for step in range(1, run.steps + 1):
        loss = draw_loss(generator)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"{run.name}: step {step}, loss {loss.item():.3f}, {time.time() - start:.0f} s", flush=True)
    model.eval()


def run_of(kind: type[Run | StudyRun], args: Namespace, **own: Any) -> Run | StudyRun:
    """Makes a run of the options that have the names of its fields, and of `own` fields."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in vars(args).items() if name in names} | own)


@contextmanager
def reported(
    benchmark: str, tables: ModuleType, runs: Sequence[Run], config_of: ConfigOf, output: Path
) -> Iterator[None]:
    """Compares the runs of a command with the runs in its folder before the first is made, and prints their number.
    Writes the report of the benchmark's module `tables` after the last.

    Raises ValueError for a finished run of other settings, and for runs that would not be comparable.
    """
    records = read_records(output, benchmark)
    finished = [run for run in runs if find_finished(records, run, config_of(run))]
    check_alike([*(record["run"] for record in records), *map(asdict, runs)], tables.ALIKE)
    print(f"{len(runs)} runs, {len(finished)} of them finished", flush=True)
    yield
    write_report(tables.make_report(read_records(output, benchmark), []), output)


def record_run(
    benchmark: str, run: Run, config: PreTrainedConfig | None, make: Callable[[], dict[str, Any]], output: Path
) -> Record:
    """Returns the record of a run. If `output`, a folder or a JSON Lines file, has none, `make` trains and returns
    the results.

    Nothing is written before the run has finished.
    """
    if record := find_finished(read_records(output, benchmark), run, config):
        return record
    start = time.time()
    set_seed(run.seed)
    record = {"benchmark": benchmark, "name": run.name, "run": asdict(run)}
    record |= {"config": None if config is None else config.to_diff_dict(), **make()}
    record |= {
        "commit": describe_commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "minutes": round((time.time() - start) / 60, 2),
    }
    append_record(record, file_of(output))
    print(f"{run.name}: {record.get('test', 'finished')}, {record['minutes']} min", flush=True)
    return record


def add_row_options(parser: ArgumentParser, rows: str, sequences: str, **defaults: float) -> None:
    """Adds the options of a study that trains rows with `optimise`. `rows` is the help of ROW; `sequences` is the name
    of the examples in a batch; `defaults` are of steps, batch_size and learning_rate.
    """
    parser.add_argument("rows", metavar="ROW", nargs="*", help=rows)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help=f"seeds of weights and {sequences}")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--batch_size", type=int, help=f"{sequences} of a step")
    parser.add_argument("--learning_rate", type=float, help="AdamW's largest learning rate")
    parser.add_argument("--output", type=Path, required=True, help="a JSON Lines file, to which runs are added")
    parser.set_defaults(**defaults)


def train_rows(
    benchmark: str, kind: type[StudyRun], args: Namespace, config_of: ConfigOf, train: Callable[..., dict]
) -> None:
    """Trains each row with each seed, unless the output has its record. All configs are made before the first run."""
    check_minimums(args, seeds=0, steps=1, batch_size=1)
    runs = [run_of(kind, args, row=row, seed=seed) for row in args.rows for seed in args.seeds]
    for run, config in [(run, config_of(run)) for run in runs]:
        record_run(benchmark, run, config, partial(train, run, config), args.output)
