"""Markdown tables."""

from collections.abc import Iterable, Sequence


def markdown_table(heading: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Formats rows as a Markdown table without a final newline. A cell is `str` of its value, on one line, with `|`
    escaped.
    """
    cells = [[" ".join(str(value).split()).replace("|", r"\|") for value in row] for row in (heading, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (cells[0], ["---"] * len(heading), *cells[1:]))
