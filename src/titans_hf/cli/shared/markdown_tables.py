"""Markdown tables."""

from collections.abc import Iterable, Sequence


def markdown_table(heading: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Formats rows as a Markdown table without a final newline.

    A cell is `str` of its value, on one line, with `|` escaped. Raises ValueError for a row of another length than the
    heading.
    """
    lines = [[_cell(value) for value in heading], ["---"] * len(heading)]
    for row in rows:
        if len(row) != len(heading):
            raise ValueError(f"a row has {len(row)} cells, but the heading has {len(heading)}: {row}")
        lines.append([_cell(value) for value in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", r"\|")
