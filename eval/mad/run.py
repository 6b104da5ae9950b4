"""Trains models on the six synthetic tasks of MAD, and records the accuracy as they learn.

    python -m eval.mad.run --models lmm llama --tasks recall compression --epochs 50 --output results/mad
    python -m eval.mad.run --models lmm --set memory_max_lr=0 --label off --epochs 50 --output results/mad

A finished run is kept: the same command again goes on with the next one.
"""

from argparse import Namespace
from itertools import product

import numpy as np
import torch

from eval.common.compared_models import parse_settings
from eval.common.harness import IGNORED, check_options, make_parser, reported, run_of
from eval.mad import tables
from eval.mad.models import NAMES
from eval.mad.tasks import TASKS
from eval.mad.training import Run, config_for, settings_of, train
from titans_hf.cli.shared.command_line import run_command


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
    return parser.parse_args(argv)


def make_runs(args: Namespace) -> list[Run]:
    """Makes the runs of the command; raises ValueError for options with which a run is not possible."""
    settings = check_options(args, epochs=1, evaluate_every=1, learning_rates=0, weight_decay=0)
    if args.epochs % args.evaluate_every:
        raise ValueError(f"--epochs {args.epochs} must be a multiple of --evaluate_every {args.evaluate_every}")
    for name in ("bf16", "graph"):
        if getattr(args, name) and not torch.cuda.is_available():
            raise ValueError(f"--{name} needs a CUDA device")
    shared, runs = {"settings": settings, "task_settings": parse_settings(args.task_set)}, []
    for seed, task, model, rate in product(args.seeds, args.tasks, args.models, args.learning_rates):
        own = {"data": task, "model": model, "row": f"{model} {args.label}".strip(), "learning_rate": rate}
        runs.append(run := run_of(Run, args, seed=seed, **own, **shared))
        try:
            drawn = TASKS[task].make(np.random.default_rng(0), settings_of(run), 64, True)
            if (drawn.labels == IGNORED).all():
                raise ValueError("no token has a label")
        except (ValueError, IndexError, TypeError) as error:
            raise ValueError(f"--task_set: {task} has no sequences of {args.task_set}: {error}") from error
    return runs


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    runs = make_runs(args)
    with reported("mad", tables, runs, config_for, args.output):
        for run in runs:
            train(run, args.output, args.graph)


if __name__ == "__main__":
    run_command(main)
