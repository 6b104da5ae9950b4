"""The documents of a run: files, folders and data sets, loaded by the builders of `datasets`."""

import glob
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from titans_hf_scripts.shared.text_files import find_files

BUILDERS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
HEAD = 8192  # bytes at the start of a file that are searched for a zero byte


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
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
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
    builder, files = choose_files(path, argument)
    for file in files:
        _check_head(file, builder, argument)
    options = {"sample_by": "document"} if builder == "text" else {}
    # Escaped, because load_dataset silently skips files with [ or * in their names otherwise.
    names = [glob.escape(str(file)) for file in files]
    try:
        return load_dataset(builder, data_files=names, split="train", streaming=streaming, **options)
    except DatasetGenerationError as error:  # whose message names no file
        for file in files:
            try:
                CHECKS[builder](file)
            except (ValueError, OSError) as reason:
                raise ValueError(f"{argument}: {file} is no valid {builder} file: {reason}") from error
        raise ValueError(f"{argument} {path}: {error.__cause__ or error}") from error


def choose_files(path: Path, argument: str) -> tuple[str, list[Path]]:
    """Lists the data files of a path and the builder that reads them.

    A single file with an unknown suffix is text. Of a folder, Markdown files count only where there are no others: a
    README.md is no data. Raises ValueError for a folder without data files, or with files of several builders.
    """
    files = find_files(path, argument, tuple(BUILDERS))
    if path.is_file():
        return BUILDERS.get(path.suffix.lower(), "text"), files
    files = [file for file in files if file.suffix.lower() != ".md"] or files
    builders = sorted({BUILDERS[file.suffix.lower()] for file in files})
    if len(builders) > 1:
        raise ValueError(f"{argument} {path} holds files of several kinds ({', '.join(builders)}): give one kind")
    return builders[0], files


def _check_head(file: Path, builder: str, argument: str) -> None:
    with file.open("rb") as stream:
        head = stream.read(HEAD)
    if builder != "parquet" and b"\0" in head:
        raise ValueError(f"{argument}: {file} is a binary file, not text")
    if builder != "text" and not head:
        raise ValueError(f"{argument}: {file} is empty")


def _check_json(file: Path) -> None:
    """Raises ValueError unless a file is a JSON value or one per line."""
    text = file.read_bytes().decode()
    try:
        json.loads(text)
    except json.JSONDecodeError:
        for number, line in enumerate(text.splitlines(), 1):
            try:
                json.loads(line or "null")
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: {error}") from error


def _check_parquet(file: Path) -> None:
    try:
        pa.parquet.read_metadata(file)
    except pa.ArrowInvalid as error:  # also a ValueError
        raise ValueError(str(error)) from error


CHECKS: dict[str, Callable[[Path], object]] = {
    "text": lambda file: file.read_bytes().decode(),
    "json": _check_json,
    "parquet": _check_parquet,
}


def text_columns(documents: Dataset | IterableDataset, column: str, packing: bool) -> list[str]:
    """Chooses the columns of text: the given one, or a prompt and its completion.

    Raises ValueError where there are none of these, or where they hold something else than text.
    """
    features = documents.features or documents._resolve_features().features
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
