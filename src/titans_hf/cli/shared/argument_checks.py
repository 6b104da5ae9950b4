"""Options that commands share, and checks of options before any work is done."""

import argparse
from pathlib import Path
from typing import Any


def check_minimums(args: argparse.Namespace | Any, **minimums: float) -> None:
    """Raises ValueError for an option that has a value below its minimum, or nan. An option that was not given (None)
    is not checked.
    """
    for name, least in minimums.items():
        given = getattr(args, name)
        for value in given if isinstance(given, list | tuple) else [given]:
            if value is not None and not value >= least:
                raise ValueError(f"--{name} must be at least {least}, but is {value}")


def check_folder(path: str | Path, argument: str) -> None:
    """Raises ValueError for an output path that is a file or lies in a file. It need not exist."""
    path = Path(path)
    for part in (path, *path.parents):
        if part.exists():
            if not part.is_dir():
                raise ValueError(f"{argument} {path} cannot be a folder: {part} is a file")
            return
