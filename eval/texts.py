"""The files of `--text`."""

from pathlib import Path


def text_files(folder: Path) -> list[Path]:
    """The folder's .txt files by name. Raises ValueError if there are none, or there is no such folder."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ValueError(f"--text {folder} holds no .txt files")
    return files
