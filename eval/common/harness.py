"""The harness of the benchmarks that train small models: their options, a run, its record.

A run is a Namespace of all that it depends on. Its `row` names the model with its `settings`, which replace fields of
its configuration.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, set_seed

from eval.common.compared_models import parse_settings
from eval.common.records import FILE, Record, append_record, describe_commit, read_records
from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf_console import HelpFormatter


def make_parser(doc: str, models: Sequence[str], batch_size: int) -> ArgumentParser:
    """Makes a parser of the options that all benchmarks have."""
    parser = ArgumentParser(description=doc, formatter_class=HelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models, default=models, metavar="MODEL", help=", ".join(models))
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="fields of the models' config")
    parser.add_argument("--label", default="", help="name of the models with these settings in files and tables")
    parser.add_argument("--batch_size", type=int, default=batch_size)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of weights and batches")
    parser.add_argument("--output", type=Path, required=True, help=f"folder of {FILE}")
    return parser


def check_options(args: Namespace, config: PreTrainedConfig, **minimums: float) -> dict[str, Any]:
    """Returns the settings of `--set`, fields of the config; raises ValueError for an option that has no such value."""
    check_minimums(args, batch_size=1, seeds=0, **minimums)
    check_folder(args.output, "--output")
    if args.set and not args.label:
        raise ValueError("--set needs a --label, the name of the models with these settings")
    return parse_settings(args.set, config)


def record_run(benchmark: str, name: str, run: Namespace, make: Callable[[], dict[str, Any]], output: Path) -> Record:
    """Returns the record of a run. If the runs of `output` have none of its name, `make` trains and returns the
    results, and the record is added. Raises ValueError for a record of the name with other settings.
    """
    for record in read_records(output, benchmark):
        if record["name"] == name:
            for field, value in vars(run).items():
                if record["run"].get(field, value) != value:  # a field that was added since then is not compared
                    raise ValueError(
                        f"{name} is finished with {field}={record['run'][field]}, not {value}: "
                        "give another --label or --output"
                    )
            return record
    start = time.time()
    set_seed(run.seed)
    record = {"benchmark": benchmark, "name": name, "run": vars(run), **make()}
    record |= {
        "commit": describe_commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "minutes": round((time.time() - start) / 60, 2),
    }
    append_record(record, output)
    print(f"{name}: {record['test']}, {record['minutes']} min", flush=True)
    return record
