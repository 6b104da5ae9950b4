"""Trains models to classify DNA sequences, by cross-validation within files or with files to train and to test on.

    python -m eval.dna.run human_nontata_promoters/test.tsv --output results/dna
    python -m eval.dna.run --train train.tsv --test test.tsv --output results/mine

The learning rate of a model is chosen on the first fold with the first seed; all other folds and seeds use it. A
finished run is kept: the same command again goes on with the next one.
"""

import hashlib
from argparse import Namespace
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from transformers import PreTrainedConfig

from eval.common.compared_models import VARIANTS
from eval.common.harness import check_options, make_parser, reported, run_of
from eval.common.records import Record
from eval.dna import tables
from eval.dna.folds import Fold, group_sequences, hold_out, make_folds
from eval.dna.models import MEMORY_OFF, NAMES, build_model, config_of
from eval.dna.sequences import read_sequences
from eval.dna.training import DataOfRun, Run, make_run
from titans_hf.cli.shared.command_line import run_command

SHAPE = ("parameters", "hidden_size", "num_hidden_layers")
DEFAULT_MODELS = ("lmm", "lmm" + MEMORY_OFF, "mag", "mag" + MEMORY_OFF, "llama", "mamba2", "cnn")
Folds = dict[tuple[str, str], list[DataOfRun]]  # by the name and the digest of the data


def parse_args(argv: list[str] | None) -> Namespace:
    parser = make_parser(__doc__, NAMES, DEFAULT_MODELS, batch_size=16)
    parser.add_argument("files", nargs="*", type=Path, metavar="DATA", help="files, each cross-validated in itself")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument(
        "--train", nargs="+", type=Path, default=[], metavar="FILE", help="files to train on, instead of DATA"
    )
    parser.add_argument("--test", nargs="+", type=Path, default=[], metavar="FILE", help="files to test on")
    parser.add_argument(
        "--parameters", type=int, default=30_000, help="about so many parameters of every model but the CNN"
    )
    parser.add_argument("--hidden_size", type=int, default=32)
    parser.add_argument(
        "--num_hidden_layers", type=int, default=2, help="layers of every model but Mamba2, which has more"
    )
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[1e-3, 3e-3])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--evaluations", type=int, default=10, help="evaluations on the validation part")
    parser.add_argument("--reverse_complement", action="store_true", help="train on either strand, drawn each time")
    return parser.parse_args(argv)


def digest_of(path: Path) -> str:
    """Hashes the contents of a file; 12 hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def read_folds(args: Namespace) -> Folds:
    """Reads and splits the files; files to train and to test on are one fold.

    Raises ValueError for two files of one name, for one class, for a label in the test files alone, and as
    `read_sequences` and `make_folds` do.
    """
    found: Folds = {}
    for path in args.files or args.train[:1]:
        name, digest = f"{path.resolve().parent.name}-{path.name.split('.')[0]}", digest_of(path)
        sequences = read_sequences(args.train or [path])
        classes = sorted(sequences["label"].unique())
        if len(classes) < 2:
            raise ValueError(f"{path} has one class only: {classes[0]}")
        if args.train:
            digest = " ".join(["train", *map(digest_of, args.train), "test", *map(digest_of, args.test)])
            sequences, fold = add_test_part(sequences, read_sequences(args.test))
            folds = [fold]
        else:
            folds = make_folds(sequences, args.folds)
        parts = ", ".join(f"{len(rows)} {part}" for part, rows in zip(Fold._fields, folds[0], strict=True))
        print(f"{name}: {len(sequences)} sequences of {len(classes)} classes; in the first fold {parts}", flush=True)
        found[name, digest] = [DataOfRun(sequences, classes, fold) for fold in folds]
    if len({name for name, _ in found}) < len(args.files):
        raise ValueError(f"two DATA files have the same name: {', '.join(map(str, args.files))}")
    return found


def add_test_part(train: pd.DataFrame, test: pd.DataFrame) -> tuple[pd.DataFrame, Fold]:
    """Returns all sequences, and their fold, with a tenth of those to train on held out for validation.

    Raises ValueError for a label in the test part alone.
    """
    if unknown := set(test["label"]) - set(train["label"]):
        raise ValueError(f"--test has the label {min(unknown)}, --train only {', '.join(sorted(set(train['label'])))}")
    sequences = pd.concat([train, test], ignore_index=True)
    groups, (rows, tested) = group_sequences(sequences), np.split(np.arange(len(sequences)), [len(train)])
    if known := np.isin(groups[tested], groups[rows]).sum():
        print(f"{known} of {len(tested)} test sequences overlap, or are in a group, with one to train on", flush=True)
    return sequences, Fold(*hold_out(sequences["label"].to_numpy(), groups, rows), tested)


def make_runs(args: Namespace, data: Folds) -> list[Run]:
    """Makes each model's run on the first fold of each data at the first rate with the first seed.

    Raises ValueError for a model that cannot be built.
    """
    settings, runs = check_options(args), []
    shared = {"shape": {name: getattr(args, name) for name in SHAPE}, "seed": args.seeds[0], "fold": 0}
    shared |= {"learning_rate": args.learning_rates[0], "folds": args.folds if args.files else 0}
    for ((name, digest), folds), model in product(data.items(), args.models):
        titans = model.removesuffix(MEMORY_OFF) in VARIANTS
        own = {"row": f"{model}-{args.label}" if titans and args.label else model, "model": model}
        own |= {"settings": settings if titans else {}, "data": name, "digest": digest}
        runs.append(run := run_of(Run, args, **own, **shared))
        length = folds[0].sequences["seq"].str.len().max() + 1
        build_model(model, config_of(model, folds[0].classes, run.shape, run.settings), length)
    return runs


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if bool(args.files) == bool(args.train) or bool(args.train) != bool(args.test):
        raise ValueError("give either DATA files, or --train and --test files")
    if not min(args.learning_rates) > 0:
        raise ValueError(f"--learning_rates must be above 0, but has {min(args.learning_rates)}")
    check_options(args, **dict.fromkeys((*SHAPE, "epochs", "evaluations"), 1), folds=2)
    data = read_folds(args)
    first = make_runs(args, data)
    classes = {name: folds[0].classes for (name, _), folds in data.items()}

    def config_for(run: Run) -> PreTrainedConfig:
        return config_of(run.model, classes[run.data], run.shape, run.settings)

    def finish(run: Run) -> Record:
        return make_run(run, data[run.data, run.digest][run.fold], args.output)

    with reported("dna", tables, first, config_for, args.output):
        tried = [[replace(run, learning_rate=rate) for rate in args.learning_rates] for run in first]
        best = [max(runs, key=lambda run: finish(run)["valid"]) for runs in tried]
        _, *others = product(args.seeds, range(args.folds if args.files else 1))
        for (seed, fold), run in product(others, best):
            finish(replace(run, seed=seed, fold=fold))


if __name__ == "__main__":
    run_command(main)
