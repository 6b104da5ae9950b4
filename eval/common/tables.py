"""The tables that the benchmarks share."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pandas as pd
from scipy.stats import t as student

from eval.common.records import Record
from titans_hf.cli.shared.markdown_tables import markdown_table

NO_RESULTS = ["parameters", "minutes"]  # beside the results of early runs


def read_paper(benchmark: str) -> dict[str, Any]:
    """Returns the paper's figures of a benchmark, such as "dna"."""
    return json.loads(Path(__file__).with_name("paper_tables.json").read_text(encoding="utf-8"))[benchmark]


def frame_of(records: Sequence[Record], *index: str) -> pd.DataFrame:
    """Returns a line for each record, with the fields of its run and its results; `index` are those of its index."""
    return pd.DataFrame([{**record["run"], **record} for record in records]).set_index(list(index)).sort_index()


def with_spread(values: Sequence[float], form: str = ".3f", factor: float = 1) -> str:
    """Formats a mean, with the standard deviation of several values, both times a factor."""
    spread = f" ± {factor * stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{factor * mean(values):{form}}{spread}"


def half_width(values: Sequence[float]) -> float:
    """Returns half of the 95 % interval of a mean, by Student's t; 0 for a single value."""
    number = len(values)
    return student.ppf(0.975, number - 1) * stdev(values) / number**0.5 if number > 1 else 0.0


def with_interval(values: Sequence[float], form: str = ".3f") -> str:
    """Formats a mean with its 95 % interval; that of a single value has none."""
    if len(values) < 2:
        return f"{mean(values):{form}}" if len(values) else ""
    low, high = (mean(values) + side * half_width(values) for side in (-1, 1))
    return f"{mean(values):{form}} [{low:{form}}, {high:{form}}]"


def report_of_rows(records: list[Record], baselines: list[str], each_seed: bool) -> list[str]:
    """Makes the tables of any runs: for each row a line with the means of its results and their intervals over seeds,
    or with the result of each seed, and its differences from the baselines, by seed. The fields of a run that differ
    name its line.
    """

    def line_of(name: tuple[str, ...], row: pd.DataFrame, form: str) -> list[object]:
        columns = [row[column].dropna() for column in row]
        cells = [
            ", ".join(f"{x:{form}}" for x in values) if each_seed else with_interval(values, form) for values in columns
        ]
        return [*name, len(row), *cells]

    runs = pd.json_normalize([record["run"] for record in records]).convert_dtypes().astype(object).fillna("")
    names = ["row", *(name for name in runs if name not in ("row", "seed") and runs[name].nunique() > 1)]
    results = pd.json_normalize([record["result"] for record in records]).drop(columns=NO_RESULTS, errors="ignore")
    results.index = pd.MultiIndex.from_frame(runs[[*names, "seed"]].astype({name: str for name in names}))
    rows = {name: of_row.droplevel(names) for name, of_row in results.groupby(level=names, sort=False)}
    parts = [markdown_table([*names, "seeds", *results], [line_of(name, x, ".3f") for name, x in rows.items()])]
    for baseline in baselines:
        pairs = {name: (baseline, *name[1:]) for name in rows if name[0] != baseline}
        changes = {name: (rows[name] - rows[pair]).dropna(how="all") for name, pair in pairs.items() if pair in rows}
        lines = [line_of(name, change, "+.3f") for name, change in changes.items()]
        parts.append(markdown_table([*names, f"seeds, less {baseline}", *results], lines))
    return parts
