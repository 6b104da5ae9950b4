"""The documents of a run: files, folders and data sets, loaded by the builders of `datasets`."""

import glob
import json
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from titans_hf.cli.shared.text_files import describe_files, find_files

KINDS = {
    ".txt": "text",
    ".md": "text",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
UNREADABLE = (DatasetGenerationError, ValueError, OSError)  # the errors of `datasets` for damaged data
HEAD_BYTES = 8192  # bytes at the start of a file that are checked before it is loaded
CHECKED_BYTES = 1 << 20  # decoded at a time


def is_saved_data_set(path: Path) -> bool:
    """Returns True for a folder that `save_to_disk` wrote."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def load_splits(
    source: str, argument: str, split: str, dataset_config: str | None = None, streaming: bool = False
) -> Mapping[str, Dataset | IterableDataset]:
    """Loads the splits of a data set; files, and data sets without splits, become the split of the given name.

    Args:
        source: a file, a folder of files, a data set saved by `save_to_disk`, or the name of one on the Hub.
        argument: the name of the option in errors, as in "--train_data".

    Raises ValueError, which names the file, for data that cannot be read; FileNotFoundError where there is none.
    """
    path = Path(source)
    if is_saved_data_set(path):
        data = load_from_disk(source)
        splits = data if isinstance(data, DatasetDict) else {split: data}
        return {name: data.to_iterable_dataset() for name, data in splits.items()} if streaming else splits
    if path.exists():
        return {split: _load_files(path, argument, streaming)}
    missing = FileNotFoundError(f"{argument} {source} is neither a file, nor a folder, nor a data set on the Hub")
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source):
        raise missing
    try:
        return load_dataset(source, dataset_config, streaming=streaming)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise missing from error


def _load_files(path: Path, argument: str, streaming: bool) -> Dataset | IterableDataset:
    kind, files = choose_files(path, argument)
    if not any(file.stat().st_size for file in files):
        raise ValueError(f"{argument} {path} holds no text: {files[0]} is empty")
    for file in files:
        _check_before_loading(file, kind, argument, streaming)
    # Escaped, because load_dataset silently skips files with [ or * in their names otherwise.
    names, form = [glob.escape(str(file)) for file in files], FORMATS[kind]
    try:
        return load_dataset(form.builder, data_files=names, split="train", streaming=streaming, **form.options)
    except UNREADABLE as error:  # whose message names no file
        check_files(path, argument)
        raise ValueError(f"{argument} {path}: {error.__cause__ or error}") from error


def check_files(path: Path, argument: str) -> None:
    """Reads all data files of a path; raises ValueError, which names the file, for a damaged one. Does nothing for what
    is no path of files.
    """
    if not path.exists() or is_saved_data_set(path):
        return
    kind, files = choose_files(path, argument)
    for file in files:
        with _naming(file, kind, argument):
            FORMATS[kind].check(file)


def describe_source(source: str, argument: str) -> str | None:
    """Describes which files of a folder are read and which are left out; None for any other source of documents."""
    path = Path(source)
    if not path.is_dir() or is_saved_data_set(path):
        return None
    return describe_files(path, choose_files(path, argument)[1])


@contextmanager
def _naming(file: Path, kind: str, argument: str) -> Iterator[None]:
    """Turns the error of a check into one that names the file."""
    try:
        yield
    except (ValueError, OSError) as reason:
        raise ValueError(f"{argument}: {file} is no valid {kind} file: {reason}") from reason


def choose_files(path: Path, argument: str) -> tuple[str, list[Path]]:
    """Lists the data files of a path, and their kind.

    A single file with an unknown suffix is text. Raises ValueError for a folder without data files, or with files of
    several kinds.
    """
    files = find_files(path, argument, tuple(KINDS))
    if path.is_file():
        return KINDS.get(path.suffix.lower(), "text"), files
    kinds = sorted({KINDS[file.suffix.lower()] for file in files})
    if len(kinds) > 1:
        raise ValueError(f"{argument} {path} holds files of several kinds ({', '.join(kinds)}): give one kind")
    return kinds[0], files


def _check_before_loading(file: Path, kind: str, argument: str, streaming: bool) -> None:
    """Checks the beginning of a file, and what loading would not find."""
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    if kind != "parquet" and b"\0" in head:
        raise ValueError(f"{argument}: {file} is a binary file, not text")
    if kind != "text" and not head:
        raise ValueError(f"{argument}: {file} is empty")
    with _naming(file, kind, argument):
        if kind == "parquet":
            _check_parquet(file)
        elif kind == "json" and not streaming:
            _check_utf8(file)
        else:
            getincrementaldecoder("utf-8")().decode(head, len(head) < HEAD_BYTES)


def _check_utf8(file: Path) -> None:
    decoder = getincrementaldecoder("utf-8")()
    with file.open("rb") as stream:
        while data := stream.read(CHECKED_BYTES):
            decoder.decode(data)
    decoder.decode(b"", final=True)


def _check_json(file: Path) -> None:
    """Raises ValueError unless a file is a JSON value or one per line, whose texts can be encoded in UTF-8."""
    text = file.read_bytes().decode()
    try:
        _parse_json(text)
    except json.JSONDecodeError:
        for number, line in enumerate(text.splitlines(), 1):
            try:
                _parse_json(line or "null")
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error


def _parse_json(text: str) -> None:
    json.dumps(json.loads(text), ensure_ascii=False).encode()  # half of a surrogate pair (as \\ud800) is no character


def _check_parquet(file: Path) -> None:
    try:
        pa.parquet.read_metadata(file)
    except pa.ArrowInvalid as error:  # also a ValueError
        raise ValueError(str(error)) from error


class Format(NamedTuple):
    """How the files of a kind are loaded, by a builder of `datasets`; `check` raises ValueError for a damaged one."""

    builder: str
    options: dict[str, str | int]
    check: Callable[[Path], object]


FORMATS = {
    # a document at a time: `datasets` would otherwise hold a thousand of them before it writes any
    "text": Format("text", {"sample_by": "document", "writer_batch_size": 1}, _check_utf8),
    "csv": Format("csv", {}, _check_utf8),
    "tsv": Format("csv", {"sep": "\t"}, _check_utf8),
    "json": Format("json", {}, _check_json),
    "parquet": Format("parquet", {}, _check_parquet),
}


def text_columns(
    documents: Dataset | IterableDataset, column: str, packing: bool, find_damage: Callable[[], None] = lambda: None
) -> list[str]:
    """Chooses the columns of text: the given one, or a prompt and its completion.

    find_damage: called where a stream cannot be read; raises ValueError if it finds out why.

    Raises ValueError where there are none of these, or where they hold something else than text.
    """
    try:
        features = documents.features or documents._resolve_features().features
    except UNREADABLE as error:  # whose message names nothing
        find_damage()
        raise ValueError(f"the first documents of the stream cannot be read: {error}") from error
    names = [column] if column in features else ["prompt", "completion"]
    present = ", ".join(features)
    if not set(names) <= set(features):
        raise ValueError(f"the data has no --text_column {column}, nor a prompt and a completion, only {present}")
    if len(names) > 1 and packing:
        raise ValueError(f"the data has no --text_column {column}, only {present}: these need --packing false")
    for name in names:
        kind = getattr(features[name], "dtype", type(features[name]).__name__)
        if kind not in ("string", "large_string"):
            raise ValueError(f"the column {name} of the data holds {kind}, not text: choose a --text_column")
    return names
