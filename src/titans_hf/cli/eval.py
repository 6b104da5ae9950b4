"""Evaluates checkpoints with lm-eval and writes tables in the form of the Titans paper, with its figures, and plots.

    titans-hf eval runs/tiny-mag runs/tiny-mistral --suite lm niah --data DATA --output results/tiny

Every finished task is saved; the same command again goes on with the next one.
"""

import argparse
import json
import logging
import time
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from titans_hf.cli.evaluation.babilong import check_facts, read_stories
from titans_hf.cli.evaluation.checkpoints import (
    Checkpoint,
    CountingHFLM,
    digest,
    load_lm,
    read_checkpoints,
    trained_length,
)
from titans_hf.cli.evaluation.model_card_results import card_of, update_card
from titans_hf.cli.evaluation.needles import GENERATED_TOKENS, make_samples, token_counter
from titans_hf.cli.evaluation.result_tables import write_report
from titans_hf.cli.evaluation.suites import BABILONG_LENGTHS, SUITES, TASKS, Unit, choose, plan
from titans_hf.cli.evaluation.titans_lm import TitansLM
from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.devices import choose_device
from titans_hf.cli.shared.finished_runs import write_record

EVAL = Path(__file__).parent / "evaluation"
# A result is kept only while the code that made its prompts and read its answers is the same.
CODE = (EVAL / "tasks", EVAL / "needles.py", EVAL / "babilong.py")
BOOTSTRAP = 1000  # lm-eval's 100,000 draws take minutes for the standard error of a perplexity


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder of a checkpoint, or its name on the Hub")
    parser.add_argument(
        "--suite",
        nargs="+",
        required=True,
        metavar="NAME",
        help=f"all, {', '.join(SUITES)}, or a task: {', '.join(TASKS)}",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for results, tables and plots")
    parser.add_argument("--data", type=Path, help="folder with the data; without it the official tasks of the Hub")
    parser.add_argument("--limit", type=int, help="only so many documents of a task, to try it out")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        help="context lengths in tokens, for needles and BABILong (default: the paper's)",
    )
    parser.add_argument("--batch_size", type=int, default=8, help="documents that a model reads at once")
    parser.add_argument(
        "--max_length",
        type=int,
        help="longest prompt, in tokens, of models other than Titans (default: their own limit); attention to "
        "a long prompt needs much memory",
    )
    parser.add_argument(
        "--update_cards", action="store_true", help="write the results into the model cards (README.md) of the MODELs"
    )
    parser.add_argument("--device", help="cpu, cuda, ... (default: the GPU if there is one)")
    parser.add_argument("--dtype", default="auto", help="dtype of the weights: auto (as saved), float32, bfloat16, ...")
    args = parser.parse_args(argv)
    check_minimums(args, limit=1, batch_size=1, max_length=1, lengths=0)
    check_folder(args.output, "--output")
    if args.dtype != "auto" and not isinstance(getattr(torch, args.dtype, None), torch.dtype):
        raise ValueError(f"--dtype {args.dtype} must be auto or a dtype of PyTorch, as in float32")
    choose_device(args.device)  # refused before anything is loaded
    if args.update_cards and args.limit:
        raise ValueError("--update_cards: results with --limit are a trial and do not belong in a model card")
    return args


def check_lengths(units: list[Unit], checkpoints: list[Checkpoint], data: Path | None, max_length: int | None) -> None:
    """Raises, before anything is run, for a length that a needle or bAbI's facts do not fit in some model's tokens, and
    for a limit of another model's prompts that leaves no room for an answer.
    """
    for checkpoint, unit in product(checkpoints, units):
        limited = unit.task.suite == "niah" and checkpoint.model_type != "titans" and max_length is not None
        if limited and max_length <= GENERATED_TOKENS:
            raise ValueError(
                f"--max_length {max_length} leaves no room for a prompt beside the {GENERATED_TOKENS} tokens of an "
                f"answer ({checkpoint.label}, {unit.task.name})"
            )
        try:
            if unit.task.suite == "niah":
                next(make_samples("niah_single_1", checkpoint.tokenizer, unit.length, 1))
            elif unit.task.suite == "babilong" and unit.length and data is not None:
                count = token_counter(checkpoint.tokenizer)
                check_facts(read_stories(data, unit.task.name.removeprefix("babilong_")), count, unit.length)
        except ValueError as error:
            raise ValueError(f"--lengths {unit.length}: {error} ({checkpoint.label}, {unit.task.name})") from error
        if unit.task.suite == "babilong" and data is None and unit.length not in BABILONG_LENGTHS:
            raise ValueError(f"--lengths {unit.length}: the Hub has BABILong at {BABILONG_LENGTHS}; others need --data")


def settings_of(unit: Unit, checkpoint: Checkpoint, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that a saved result must share to be used again; batch size and device change no score."""
    data = "hub" if args.data is None else digest(tuple(args.data / need for need in unit.task.needs))
    return {
        "task": str(unit),
        "model": checkpoint.fingerprint,
        "data": data,
        "limit": args.limit,
        "dtype": args.dtype,
        "max_length": None if checkpoint.model_type == "titans" else args.max_length,
        "code": digest(CODE),
        "lm_eval": version("lm_eval"),
    }


def finished(path: Path, settings: dict[str, Any]) -> bool:
    """Returns True if a saved result has these settings; prints the differences if it has not."""
    if not path.exists():
        return False
    saved = json.loads(path.read_text()).get("settings", {})
    changed = [
        f"{name} was {saved.get(name)}, is {value}" for name, value in settings.items() if saved.get(name) != value
    ]
    if changed:
        print(f"{path.parent.name}: {path.stem} is evaluated anew: {'; '.join(changed)}")
    return not changed


def evaluate(
    lm: TitansLM | CountingHFLM, unit: Unit, checkpoint: Checkpoint, args: argparse.Namespace
) -> dict[str, Any]:
    """Runs one unit; returns lm-eval's results with the facts that the tables need."""
    metadata = unit.metadata(args.data, checkpoint.path, args.limit)
    # lm-eval's thousands of tasks take long to index. They are needed for data from the Hub alone.
    manager = TaskManager(include_path=str(EVAL / "tasks"), include_defaults=args.data is None, metadata=metadata)
    start, cut = time.monotonic(), lm.cut_tokens
    results = simple_evaluate(
        lm,
        tasks=[unit.lm_eval_name],
        task_manager=manager,
        limit=args.limit,
        batch_size=args.batch_size,
        bootstrap_iters=BOOTSTRAP,
        log_samples=False,
    )
    return {
        "model": checkpoint.label,
        "model_type": checkpoint.model_type,
        "parameters": lm.model.num_parameters(),
        "task": unit.task.name,
        "source": "hub" if args.data is None else "local",
        "length": unit.length,
        "limit": args.limit,
        "documents": results["n-samples"][unit.lm_eval_name]["effective"],
        "cut_tokens": lm.cut_tokens - cut,
        "metrics": {k.removesuffix(",none"): v for k, v in results["results"][unit.lm_eval_name].items() if "," in k},
        "seconds": round(time.monotonic() - start, 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "batch_size": args.batch_size,
    }


def run(units: list[Unit], checkpoint: Checkpoint, args: argparse.Namespace) -> None:
    """Evaluates the units that have no result yet."""
    folder = args.output / checkpoint.label
    paths = {unit: folder / f"{unit}.json" for unit in units}
    settings = {unit: settings_of(unit, checkpoint, args) for unit in units}
    left = [unit for unit in units if not finished(paths[unit], settings[unit])]
    if len(left) < len(units):
        print(f"{checkpoint.label}: {len(units) - len(left)} of {len(units)} tasks are done already and skipped")
    if not left:
        return
    lm = load_lm(checkpoint, args.batch_size, args.device, args.dtype, args.max_length)
    for number, unit in enumerate(left, 1):
        print(f"{checkpoint.label}: {unit} ({number} of {len(left)})", flush=True)
        try:
            result = evaluate(lm, unit, checkpoint, args)
        except ConnectionError as error:
            raise ConnectionError(f"{unit}: {error}; --data takes the data from a folder") from error
        write_record({"settings": settings[unit], **result}, paths[unit])


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    units, skipped = plan(choose(args.suite), args.data, args.lengths)
    checkpoints = read_checkpoints(args.models)
    check_lengths(units, checkpoints, args.data, args.max_length)
    for checkpoint in checkpoints:
        if (args.output / checkpoint.label).resolve() == Path(checkpoint.path).resolve():
            raise ValueError(
                f"--output {args.output} would write the results into MODEL {checkpoint.path}: give another"
            )
    cards = {checkpoint.label: card_of(checkpoint.path) for checkpoint in checkpoints if args.update_cards}
    for reason in skipped:
        print(f"skipped {reason}")
    # lm-eval repeats advice for every task.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        for checkpoint in checkpoints:
            run(units, checkpoint, args)
    except KeyboardInterrupt:
        raise SystemExit(
            "interrupted: finished results are saved, and the same command goes on with the others"
        ) from None
    finally:
        kept = {checkpoint.label: checkpoint.fingerprint for checkpoint in checkpoints}
        source, trained = "hub" if args.data is None else "local", trained_length(args.models)
        results = write_report(args.output, kept, args.limit, source, skipped, trained)
        for label in cards.keys() & results.keys():
            update_card(cards[label], results, label)


if __name__ == "__main__":
    run_command(main)
