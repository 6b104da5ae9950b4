"""The texts of the model cards that commands write, with places for the facts of a model."""

from pathlib import Path

CARDS = Path(__file__).resolve().parents[1] / "cards"


def fill_template(template: str, /, **fields: object) -> str:
    """Returns the card of a command, `cards/TEMPLATE.md`, with its places filled as by `str.format`."""
    return (CARDS / f"{template}.md").read_text(encoding="utf-8").format(**fields)
