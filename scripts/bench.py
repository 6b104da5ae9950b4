"""Speed and memory, measured: tables, JSON and plots.

    python scripts/bench.py memory --output runs/bench

Times are of the processor, on one thread, in float32; on a GPU they are of the clock. Each benchmark first checks that
what it times computes what it should. What is compared runs in turn in one process, so ratios hold on a busy machine.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from benchmarks import decode, memory, models, peer, prompt
from benchmarks.report import save_plot, table

BENCHMARKS = {
    "memory": memory,
    "titans-pytorch": peer,
    "models": models,
    "decode": decode,
    "prompt": prompt,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(name, help=benchmark.__doc__.splitlines()[0], description=benchmark.__doc__)
        command.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of tables and plots")
        command.add_argument("--device", type=torch.device, default=torch.device("cpu"))
        command.add_argument("--repeats", type=int, default=5, help="rounds, of which the median counts")
        benchmark.add_arguments(command)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for row in BENCHMARKS[args.benchmark].run(args):
        rows.append(row)
        save(args, rows)
    print(table(rows))


def save(args: argparse.Namespace, rows: list[dict]) -> None:
    """After every row: an interrupted run keeps what it has measured."""
    args.output.mkdir(parents=True, exist_ok=True)
    versions = {name: module.__version__ for name, module in (("torch", torch), ("transformers", transformers))}
    device = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else "CPU"
    record = {"command": sys.argv, "device": device, "versions": versions, "rows": rows}
    path = args.output / f"{args.benchmark}.json"
    path.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(table(rows) + "\n", encoding="utf-8")
    save_plot(rows, BENCHMARKS[args.benchmark].PLOT, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
