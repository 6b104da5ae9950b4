"""Prints the tables of finished runs: DNA and forecasts beside the paper's figures, other runs a line for each row.

python -m eval.tables runs/dna --baselines lmm-off cnn
"""

import argparse
from importlib import import_module
from pathlib import Path

from eval.common.records import read_records
from eval.common.tables import report_of_rows
from titans_hf.cli.shared.command_line import run_command
from titans_hf_console import HelpFormatter

OWN_TABLES = ("dna", "forecasting")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("runs", metavar="RUNS", type=Path, help="a JSON Lines file of runs, or its folder")
    parser.add_argument("--rows", nargs="+", default=[], help="the rows that are shown; all")
    parser.add_argument("--baselines", nargs="*", default=[], help="rows that all other rows are compared with")
    parser.add_argument(
        "--each_seed", action="store_true", help="each seed's result instead of their mean; not of DNA and forecasts"
    )
    args = parser.parse_args(argv)
    records = read_records(args.runs)
    benchmarks = {record.get("benchmark") for record in records}
    if any("row" not in record.get("run", {}) for record in records) or len(benchmarks) != 1:
        raise ValueError(f"RUNS {args.runs} has no runs of rows of one benchmark, such as those of eval.dna.run")
    (benchmark,) = benchmarks
    rows = {record["run"]["row"] for record in records}
    if unknown := {*args.rows, *args.baselines} - rows:
        raise ValueError(f"--rows and --baselines must be of {', '.join(sorted(rows))}, but have {min(unknown)}")
    shown = [record for record in records if not args.rows or record["run"]["row"] in args.rows]
    if benchmark in OWN_TABLES:
        report = import_module(f"eval.{benchmark}.tables").make_report(shown, args.baselines)
    else:
        report = report_of_rows(shown, args.baselines, args.each_seed)
    print("\n\n".join(report))


if __name__ == "__main__":
    run_command(main)
