"""Lists the files of a folder by their suffix, and reads them."""

import sys
from collections.abc import Sequence
from pathlib import Path

from titans_hf_console import TEXT_SUFFIXES


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
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.suffix.lower() in suffixes]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise ValueError(f"{argument} {path} holds no {' or '.join(suffixes)} files")
    return [file for file in files if file.name.lower() != "readme.md"] or files


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
