"""Lists the files of a folder by their suffix, and reads them."""

from collections.abc import Sequence
from pathlib import Path


def find_files(path: str | Path, argument: str, suffixes: Sequence[str] = (".txt",)) -> list[Path]:
    """Lists a file, or the files of a folder and its subfolders that end in one of `suffixes`, sorted by path.

    Hidden files and folders are left out. `argument` names the path in errors, as in "--text". Raises ValueError if the
    path does not exist or the folder contains no such file.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{argument} {path} does not exist")
    files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in suffixes and file.is_file()]
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise ValueError(f"{argument} {path} holds no {' or '.join(suffixes)} files")
    return files


def read_text(file: Path, argument: str) -> str:
    """Reads a file in UTF-8. Raises ValueError, with the file's name, for one that is not."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{argument} {file} is not UTF-8: {error}") from error
