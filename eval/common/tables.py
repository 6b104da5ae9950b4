"""The tables and plots that the benchmarks share."""

import json
from pathlib import Path
from typing import Any


def read_paper(benchmark: str) -> dict[str, Any]:
    """Returns the paper's figures of a benchmark, such as "mad"."""
    return json.loads(Path(__file__).with_name("paper_tables.json").read_text(encoding="utf-8"))[benchmark]
