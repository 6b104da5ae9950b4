"""Prints the tables of finished runs, and writes them with their plots.

python -m eval.tables runs/dna --baselines lmm-off cnn --output runs/tables
"""

import argparse
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from eval.common.records import FILE, read_lines, read_records
from eval.common.tables import check_alike, write_report
from titans_hf.cli.shared.command_line import HelpFormatter, run_command

BENCHMARKS = ("dna", "forecasting")


def check_names(option: str, given: Iterable[str], known: set[str]) -> None:
    """Raises ValueError for a name that is not known."""
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{option} must be of {', '.join(sorted(known))}, but has {unknown[0]}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("runs", metavar="RUNS", type=Path, help="a JSON Lines file of runs, or its folder")
    parser.add_argument("--rows", nargs="+", default=[], help="the rows that are shown; all")
    parser.add_argument("--baselines", nargs="*", default=[], help="rows that all other rows are compared with")
    parser.add_argument("--output", type=Path, help="a folder for table.md and the plots")
    args = parser.parse_args(argv)
    file = args.runs if args.runs.suffix == ".jsonl" else args.runs / FILE
    benchmark = next((run.get("benchmark") for run in (read_lines(file) if file.exists() else [])), None)
    if benchmark not in BENCHMARKS:
        raise ValueError(f"RUNS {args.runs} has no runs of {', '.join(f'eval.{name}.run' for name in BENCHMARKS)}")
    tables, records = import_module(f"eval.{benchmark}.tables"), read_records(file, benchmark)
    check_alike((record["run"] for record in records), tables.ALIKE)
    rows = {record["run"]["row"] for record in records}
    check_names("--rows", args.rows, rows)
    check_names("--baselines", args.baselines, rows & set(args.rows or rows))
    report = tables.make_report([x for x in records if not args.rows or x["run"]["row"] in args.rows], args.baselines)
    print("\n\n".join(report[0]))
    if args.output:
        write_report(report, args.output)


if __name__ == "__main__":
    run_command(main)
