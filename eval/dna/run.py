"""Trains models to classify DNA sequences, by cross-validation within files or with files to train and to test on.

    python -m eval.dna.run human_nontata_promoters/test.tsv --output results/dna
    python -m eval.dna.run --train positive.fa negative.fa --test test.csv --output results/mine

Each model is trained on the first fold at every learning rate with the first seed, and on the others, and with the
other seeds, at the one that was best in validation there. A finished run is kept: the same command again goes on with
the next one.
"""

import hashlib
from argparse import Namespace
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils.logging import disable_progress_bar

from eval.common.compared_models import VARIANTS
from eval.common.harness import check_options, make_parser
from eval.common.records import find_finished, read_records
from eval.common.tables import check_alike, write_report
from eval.dna.folds import Fold, group_sequences, hold_out, make_folds
from eval.dna.models import MEMORY_OFF, NAMES, build_model, config_of
from eval.dna.sequences import Sequences, read_sequences
from eval.dna.sequences import name_of as file_name
from eval.dna.tables import ALIKE, make_report
from eval.dna.training import DataOfRun, Run, make_run
from titans_hf.cli.shared.command_line import run_command

SHAPE = ("parameters", "hidden_size", "num_hidden_layers")
TRAINING = ("epochs", "evaluations")
DEFAULT_MODELS = ("lmm", "lmm" + MEMORY_OFF, "mag", "mag" + MEMORY_OFF, "llama", "mamba2", "cnn")


def parse_args(argv: list[str] | None) -> Namespace:
    """Parses the command line, without checking what the values mean."""
    parser = make_parser(__doc__, NAMES, DEFAULT_MODELS, batch_size=16)
    parser.add_argument("data", nargs="*", type=Path, metavar="DATA", help="files, each cross-validated in itself")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--train", nargs="+", type=Path, default=[], metavar="FILE", help="instead of DATA")
    parser.add_argument("--test", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--parameters", type=int, default=30_000, help="about, of every model but the CNN")
    parser.add_argument("--hidden_size", type=int, default=32)
    parser.add_argument("--num_hidden_layers", type=int, default=2, help="but for Mamba2, which has more")
    parser.add_argument("--learning_rates", nargs="+", type=float, default=[1e-3, 3e-3])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--evaluations", type=int, default=10, help="evaluations on the validation part")
    parser.add_argument("--reverse_complement", action="store_true", help="train on either strand, drawn each time")
    parser.add_argument("--save_models", action="store_true", help="save each model but the CNN, with its tokenizer")
    return parser.parse_args(argv)


def check_args(args: Namespace) -> dict[str, Any]:
    """Returns the settings of Titans; raises ValueError for options that cannot be."""
    if bool(args.data) == bool(args.train) or bool(args.train) != bool(args.test):
        raise ValueError("give either DATA files, or --train and --test files")
    if not min(args.learning_rates) > 0:
        raise ValueError(f"--learning_rates must be above 0, but has {min(args.learning_rates)}")
    return check_options(args, **dict.fromkeys((*SHAPE, *TRAINING), 1), folds=2)


def name_of(path: Path) -> str:
    """Names the data by folder and file, as in human_nontata_promoters-test."""
    return f"{path.resolve().parent.name}-{file_name(path)}"


def digest_of(path: Path) -> str:
    """Hashes the contents of a file; 12 hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def classes_of(path: Path, sequences: Sequences) -> list[str]:
    """Returns the labels, sorted; raises ValueError where there is only one."""
    classes = sorted(set(sequences.labels))
    if len(classes) < 2:
        raise ValueError(f"{path} has one class only: {classes[0]}")
    return classes


def read_folds(args: Namespace) -> dict[tuple[str, str], list[DataOfRun]]:
    """Reads and splits the files; returns the folds of each by its name and digest, one for files to train and test on.

    Raises ValueError for two files of one name, and as `read_sequences`, `make_folds` and `read_train_and_test` do.
    """
    found = {}
    for path in args.data:
        sequences = read_sequences([path])
        classes = classes_of(path, sequences)
        folds = [DataOfRun(sequences, classes, fold) for fold in make_folds(sequences, args.folds)]
        found[name_of(path), digest_of(path)] = folds
    if len({name for name, _ in found}) < len(args.data):
        raise ValueError(f"two DATA files have the same name: {', '.join(map(str, args.data))}")
    if args.train:
        digest = " ".join(["train", *map(digest_of, args.train), "test", *map(digest_of, args.test)])
        found[name_of(args.train[0]), digest] = [read_train_and_test(args)]
    for (name, _), folds in found.items():
        print(f"{name}: {describe(folds[0])}", flush=True)
    return found


def read_train_and_test(args: Namespace) -> DataOfRun:
    """Reads --train and --test files, and holds out a tenth of the training sequences for validation.

    Raises ValueError for a label in the test files alone.
    """
    train, test = read_sequences(args.train), read_sequences(args.test)
    classes = classes_of(args.train[0], train)
    unknown = set(test.labels) - set(classes)
    if unknown:
        raise ValueError(f"--test has the label {min(unknown)}, --train only {', '.join(classes)}")
    sequences = train + test
    groups = group_sequences(sequences)
    rows = np.arange(len(train.texts))
    tested = np.arange(len(rows), len(sequences.texts))
    known = np.isin(groups[tested], groups[rows]).sum()
    if known:
        print(f"{known} of {len(tested)} test sequences overlap, or are in a group, with one to train on", flush=True)
    fold = Fold(*hold_out(np.array(sequences.labels), groups, rows), tested)
    return DataOfRun(sequences, classes, fold)


def describe(data: DataOfRun) -> str:
    """Formats the numbers of sequences and classes, and the sizes of a fold's parts."""
    parts = ", ".join(f"{len(rows)} {name}" for name, rows in zip(Fold._fields, data.fold, strict=True))
    return f"{len(data.sequences.texts)} sequences of {len(data.classes)} classes; in the first fold {parts}"


def finish(run: Run, data: DataOfRun, args: Namespace) -> dict[str, Any]:
    """Makes a run, unless it is finished, and returns its record."""
    config = config_of(run.model, data.classes, run.shape, run.settings)
    record = find_finished(read_records(args.output, "dna"), run, config)
    if record and args.save_models and run.model != "cnn" and not (args.output / run.name).is_dir():
        raise ValueError(f"{run.name} is finished without its model: --save_models needs another --output")
    if record:
        return record
    record = make_run(run, data, args.output, args.save_models)
    print(f"{run.name}: test accuracy {record['test']:.3f}, {record['minutes']} min", flush=True)
    return record


def make_runs(
    args: Namespace, settings: dict[str, Any], data: dict[tuple[str, str], list[DataOfRun]]
) -> list[tuple[Run, list[DataOfRun]]]:
    """Makes each model's run on the first fold at the first rate with the first seed, and all folds of its data.

    Raises ValueError for a model that cannot be built.
    """
    shared = {name: getattr(args, name) for name in (*TRAINING, "batch_size", "reverse_complement")}
    shared |= {"shape": {name: getattr(args, name) for name in SHAPE}, "folds": args.folds if args.data else 0}
    shared["seed"] = args.seeds[0]
    runs = []
    for (name, digest), folds in data.items():
        for model in args.models:
            titans = model.removesuffix(MEMORY_OFF) in VARIANTS
            row = f"{model}-{args.label}" if titans and args.label else model
            own = {"row": row, "model": model, "settings": settings if titans else {}}
            runs.append(
                (Run(data=name, digest=digest, fold=0, learning_rate=args.learning_rates[0], **own, **shared), folds)
            )
            length = max(map(len, folds[0].sequences.texts)) + 1
            build_model(model, config_of(model, folds[0].classes, shared["shape"], own["settings"]), length)
    return runs


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    settings = check_args(args)
    runs = make_runs(args, settings, read_folds(args))
    check_alike([*(x["run"] for x in read_records(args.output, "dna")), *(asdict(first) for first, _ in runs)], ALIKE)
    disable_progress_bar()  # of writing checkpoints; Trainer has its own
    best = []
    for first, folds in runs:
        tried = [replace(first, learning_rate=rate) for rate in args.learning_rates]
        best.append((max(tried, key=lambda run: finish(run, folds[0], args)["valid"]), folds))
    _, *others = product(args.seeds, range(args.folds if args.data else 1))
    for seed, fold in others:
        for run, folds in best:
            finish(replace(run, seed=seed, fold=fold), folds[fold], args)
    write_report(make_report(read_records(args.output, "dna"), [], args.output), args.output)


if __name__ == "__main__":
    run_command(main)
