"""The harness of the benchmarks that train small models: their options, a run, its record."""

import re
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from eval.common.compared_models import parse_settings
from eval.common.records import FILE, Record, append_record, describe_commit, file_of, find_finished, read_records
from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf_console import HelpFormatter


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
    parser.add_argument("--output", type=Path, required=True, help=f"folder of {FILE}")
    return parser


def check_options(args: Namespace, **minimums: float) -> dict[str, Any]:
    """Returns the settings of `--set`; raises ValueError for an option that has no such value."""
    check_minimums(args, batch_size=1, seeds=0, **minimums)
    check_folder(args.output, "--output")
    settings = parse_settings(args.set)
    if not re.fullmatch(r"[\w.-]*", args.label) or (settings and not args.label):
        raise ValueError(f"--label {args.label!r}: --set needs a name of its own, of letters, digits, '.', '_' and '-'")
    return settings


def run_of(kind: type[Run], args: Namespace, **own: Any) -> Run:
    """Makes a run of the options that have the names of its fields, and of `own` fields."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in vars(args).items() if name in names} | own)


def record_run(benchmark: str, run: Run, make: Callable[[], dict[str, Any]], output: Path) -> Record:
    """Returns the record of a run. If `output`, a folder or a JSON Lines file, has none, `make` trains and returns
    the results, and the record is written.
    """
    if record := find_finished(read_records(output, benchmark), run):
        return record
    start = time.time()
    set_seed(run.seed)
    record = {"benchmark": benchmark, "name": run.name, "run": asdict(run), **make()}
    record |= {
        "commit": describe_commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "minutes": round((time.time() - start) / 60, 2),
    }
    append_record(record, file_of(output))
    print(f"{run.name}: {record.get('test', 'finished')}, {record['minutes']} min", flush=True)
    return record
