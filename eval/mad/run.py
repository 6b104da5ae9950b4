"""Trains models on the six synthetic tasks of MAD, and records the accuracy as they learn.

    python -m eval.mad.run --models lmm llama --tasks recall compression --epochs 50 --output results/mad
    python -m eval.mad.run --models lmm --set memory_max_lr=0 --label off --epochs 50 --output results/mad

A finished run is kept: the same command again goes on with the next one.
"""

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from eval.common.compared_models import parse_settings
from eval.common.harness import check_options, make_parser
from eval.common.records import describe_commit, find_finished, read_records
from eval.mad.models import NAMES
from eval.mad.tasks import TASKS
from eval.mad.training import Run, config_for, settings_of, train
from titans_hf.cli.shared.command_line import run_command

MINIMUMS = {"epochs": 1, "evaluate_every": 1, "jobs": 1, "learning_rates": 0, "weight_decay": 0}


def parse_args(argv: list[str] | None) -> Namespace:
    parser = make_parser(__doc__, NAMES, NAMES, batch_size=128)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[5e-4, 1e-3])
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--evaluate_every", type=int, default=1, help="epochs between two evaluations")
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--bf16", action="store_true", help="matrix products in bf16")
    parser.add_argument("--task_set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the tasks")
    parser.add_argument("--graph", action="store_true", help="on a GPU: forward and backward pass as one CUDA graph")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, each in a process of its own")
    parser.add_argument("--commit", default=None, help="commit of the code, where there is no git checkout")
    return parser.parse_args(argv)


def make_runs(args: Namespace) -> list[Run]:
    """Makes the runs of the command, checked; raises ValueError for what none of them can be made with."""
    settings = check_options(args, **MINIMUMS)
    if args.epochs % args.evaluate_every:
        raise ValueError(f"--epochs {args.epochs} must be a multiple of --evaluate_every {args.evaluate_every}")
    for name in ("bf16", "graph"):
        if getattr(args, name) and not torch.cuda.is_available():
            raise ValueError(f"--{name} needs a CUDA device")
    shared = {name: getattr(args, name) for name in ("epochs", "evaluate_every", "weight_decay", "batch_size", "bf16")}
    shared |= {"settings": settings, "task_settings": parse_settings(args.task_set)}
    runs = []
    for seed, task, model, rate in product(args.seeds, args.tasks, args.models, args.learning_rates):
        row = f"{model} {args.label}".strip()
        runs.append(Run(data=task, row=row, model=model, learning_rate=rate, seed=seed, **shared))
    for run in runs:
        settings = settings_of(run)
        config_for(run)
        try:
            TASKS[run.data].make(np.random.default_rng(0), settings, 1, True)
        except (ValueError, IndexError) as error:
            raise ValueError(f"--task_set: {run.data} has no sequences of {settings}: {error}") from error
    return runs


def train_apart(*args: Any) -> int:
    """Calls `train` in a process of its own, which prints its error, and returns the exit status."""
    process = get_context("spawn").Process(target=train, args=args, daemon=True)
    process.start()
    process.join()
    return process.exitcode


def train_all(runs: list[Run], args: Namespace) -> None:
    """Trains `--jobs` runs at a time; goes on when one fails, and raises ValueError at the end."""
    failed, commit = [], describe_commit() if args.commit is None else args.commit
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {pool.submit(train_apart, run, args.output, commit, args.graph): run.name for run in runs}
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                status, name = future.result(), waiting[future]
                print(f"{done}/{len(runs)} {name} {f'failed ({status})' if status else 'finished'}", flush=True)
                failed += [name] if status else []
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    if failed:
        raise ValueError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    runs, records = make_runs(args), read_records(args.output, "mad")
    left = [run for run in runs if not find_finished(records, run, config_for(run))]
    print(f"{len(runs)} runs, {len(runs) - len(left)} of them finished", flush=True)
    if left:
        train_all(left, args)


if __name__ == "__main__":
    run_command(main)
