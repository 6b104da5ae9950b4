"""Measures speed and memory: tables, JSON and plots.

    python -m scripts.bench memory --output runs/bench

Times are processor time of one thread in float32, and wall-clock time on a GPU. Each benchmark first checks the result
of what it times. `memory` and `decode` time what they compare in turn, so that their ratios hold on a
busy machine; `models` takes the least of several times. `gpu` runs all that is asked of a GPU.
"""

import argparse
import json
import sys
import traceback
from pathlib import Path

import torch
import transformers

from scripts.benchmarks import decode, long_prompt, memory_alone, on_a_gpu, whole_models
from scripts.benchmarks.table_and_plot import save_plot, table
from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf.cli.shared.command_line import HelpFormatter, run_command
from titans_hf.cli.shared.devices import choose_device

BENCHMARKS = {
    "memory": memory_alone,
    "models": whole_models,
    "decode": decode,
    "prompt": long_prompt,
}
COMMANDS = BENCHMARKS | {"gpu": on_a_gpu}
REPEATED = ("memory", "models", "gpu")  # the other benchmarks have --steps and --every
COUNTS = (
    "repeats",
    "lengths",
    "chunks",
    "depths",
    "contexts",
    "steps",
    "tokens",
    "piece",
    "every",
    "heads",
    "batch_size",
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in COMMANDS.items():
        command = commands.add_parser(name, help=benchmark.__doc__.splitlines()[0], description=benchmark.__doc__)
        command.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of tables and plots")
        command.add_argument("--device", default="cpu")
        if name in REPEATED:
            command.add_argument("--repeats", type=int, default=5, help="times that each is measured")
        benchmark.add_arguments(command)
    args = parser.parse_args(argv)
    check_minimums(args, **{name: 1 for name in COUNTS if name in args})
    check_folder(args.output, "--output")
    args.device = choose_device(args.device)
    torch.set_num_threads(1)
    if args.benchmark == "gpu":
        return run_parts(args)
    rows = []
    for row in BENCHMARKS[args.benchmark].run(args):
        rows.append(row)
        save(args, rows)
    print(table(rows))


def run_parts(args: argparse.Namespace) -> None:
    """Runs each part of `gpu` by a command of its own. A part that fails says why, and the exit status is 1."""
    failed = []
    for name, command in on_a_gpu.parts(args):
        print(f"\n{name}: {' '.join(command)}", flush=True)
        try:
            main([*command, "--device", str(args.device), "--output", str(args.output / name)])
        except Exception:  # a kernel that does not fit a GPU raises anything, and the GPU may be lent for an hour
            traceback.print_exc()
            failed.append(name)
    if failed:
        raise SystemExit(f"These parts failed: {', '.join(failed)}.")


def save(args: argparse.Namespace, rows: list[dict]) -> None:
    """Writes JSON, table and plot; called after every row, so that an interrupted run keeps its rows."""
    args.output.mkdir(parents=True, exist_ok=True)
    versions = {name: module.__version__ for name, module in (("torch", torch), ("transformers", transformers))}
    device = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else "CPU"
    record = {"command": sys.argv, "device": device, "versions": versions, "rows": rows}
    path = args.output / f"{args.benchmark}.json"
    path.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(table(rows) + "\n", encoding="utf-8")
    plot = BENCHMARKS[args.benchmark].PLOT
    save_plot(rows, plot._replace(title=f"{plot.title} ({device})"), path.with_suffix(".png"))


if __name__ == "__main__":
    run_command(main)
