"""Lists the files of a folder by their suffix, and reads them."""

import sys
from collections.abc import Sequence
from pathlib import Path

from titans_hf_console import TEXT_SUFFIXES

NAMED = 5  # files left out that are named; further files are only counted


def find_files(path: str | Path, argument: str, suffixes: Sequence[str] = TEXT_SUFFIXES) -> list[Path]:
    """Lists a file, or the files of a folder and its subfolders that end in one of `suffixes`, sorted by path.

    Hidden files and folders are left out; so is a README.md, unless the folder has no other such file. `argument` names
    the path in errors, as in "--text". Raises ValueError if the path is empty or does not exist, or the folder contains
    no such file.
    """
    if not str(path):  # for example an unset variable of a shell; Path("") is the current folder
        raise ValueError(f"{argument} is empty")
    path = Path(path)
    if path.exists() and not path.is_dir():  # a file, or a pipe
        return [path]
    if not path.is_dir():
        raise ValueError(f"{argument} {path} does not exist")
    files = [file for file in _visible_files(path) if file.suffix.lower() in suffixes]
    if not files:
        raise ValueError(f"{argument} {path} holds no {' or '.join(suffixes)} files")
    return [file for file in files if file.name.lower() != "readme.md"] or files


def describe_files(path: str | Path, taken: Sequence[Path], option: str | None = None) -> str | None:
    """Describes which files of a folder `find_files` took and which it left; returns None for a path of one file.
    `option`: the option that sets the suffixes.
    """
    path = Path(path)
    if not path.is_dir():
        return None
    left = [str(file.relative_to(path)) for file in _visible_files(path) if file not in {*taken}]
    kinds = ", ".join(sorted({file.suffix.lower() for file in taken}))
    more = [f"and {len(left) - NAMED} others"] if len(left) > NAMED else []
    hint = f" ({option} sets which endings are read)" if option else ""
    without = f"; left out: {', '.join([*left[:NAMED], *more])}{hint}" if left else ""
    return f"{path}: {len(taken)} {'file' if len(taken) == 1 else 'files'} ({kinds}){without}"


def _visible_files(folder: Path) -> list[Path]:
    """Lists the files of a folder and its subfolders, sorted by path, without hidden files and folders."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def read_text(file: Path, argument: str) -> str:
    r"""Reads a file, or standard input for "-", in UTF-8, without its byte order mark and with line ends \n.

    Raises ValueError, naming the file, for another encoding.
    """
    data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    try:
        return normalize_newlines(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{argument} {file} is not UTF-8: {error}") from error


def normalize_newlines(text: str) -> str:
    r"""Replaces the line ends \r\n and \r by \n, as Python's text mode does."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
