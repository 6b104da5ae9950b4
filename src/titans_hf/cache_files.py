"""Memory folders: `memory.json`, which describes a memory, and the safetensors file that it names.

`memory.json` is replaced last, atomically: after an interrupted save, the folder still holds the previous memory.
Processes that save into one folder wait for each other (a lock); a process that loads during a save gets either the
previous memory or the new one.
"""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.utils import WeakFileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from .configuration_titans import TitansConfig, field_facts
from .memory_state import named_tensors

# 2: the keys of a window are rotated, and are as many as the tokens that it holds.
FORMAT, VERSION = "titans-memory", 3
DESCRIPTION = "memory.json"
LOCK = ".memory.lock"
TENSOR_FILE = re.compile(r"memory-[0-9a-f]{16}\.safetensors")
TEMPORARY_FOLDER = re.compile(r"memory-[0-9a-f]{32}\.tmp")
WINDOW = "kv_cache.window"  # its length is the number of tokens that it holds
# The keys of memory.json and their types, besides the keys of the format itself.
DESCRIPTION_TYPES = {"model": dict, "tokens_seen": list, "about": dict, "file": str, "bytes": int, "sha256": str}

# Attributes of PEFT's layers that say which of a model's adapters are applied, and by which factor.
ADAPTER_ATTRIBUTES = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


class SavedMemory(NamedTuple):
    """The content of a memory folder.

    description: the content of memory.json. tensors: by name; "0.state.conv_state" is a tensor of layer 0. num_columns,
    record_past: attributes of the cache's layers (`TitansCacheLayer`), the same in all of them.
    """

    description: dict[str, Any]
    tensors: dict[str, Tensor]
    num_columns: int
    record_past: bool


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Returns everything that the states of a model depend on: the config's fields, the parameters' dtypes, and a hash
    of the base model's weights and of how PEFT's adapters are applied. All weights are read.

    Raises ValueError for a model whose weights are sharded or offloaded.
    """
    facts = field_facts(TitansConfig).items()
    fields = {name: getattr(model.config, name) for name, fact in facts if fact["state"] != "none"}
    total, dtypes = hashlib.sha256(), set()
    for name, x in sorted(model.base_model.state_dict().items()):
        if hasattr(x, "full_tensor") or x.is_meta:
            raise ValueError(
                f"A memory folder records a hash of the model's weights, but {name} is not completely in this process: "
                "save and load memories with a model that is neither sharded nor offloaded."
            )
        dtypes.add(str(x.dtype).removeprefix("torch."))
        for part, y in _parts(name, x):
            total.update(f"{part} {y.dtype} {tuple(y.shape)}\n".encode())
            total.update(y.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    for name, module in model.base_model.named_modules():
        if hasattr(module, "base_layer") or hasattr(module, "original_module"):  # of PEFT, around a module
            used = {key: getattr(module, key, None) for key in ADAPTER_ATTRIBUTES}
            total.update(f"{name} {used}\n".encode())
    return json.loads(json.dumps(fields)) | {"dtype": " ".join(sorted(dtypes)), "weights": total.hexdigest()}


def _parts(name: str, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields a tensor and its name; a quantised tensor is split into its parts."""
    if not hasattr(x, "__tensor_flatten__"):
        yield name, x
        return
    parts, _ = x.__tensor_flatten__()
    for part in parts:
        yield from _parts(f"{name}.{part}", getattr(x, part))


def write_memory(folder: str | os.PathLike, memory: SavedMemory) -> None:
    """Replaces the memory of a folder, atomically; waits while another process saves there. Format, file name, size
    and checksum are added to the description.

    Raises TypeError, before anything is written, if `about` in the description is not a dict of JSON values.
    """
    about = memory.description["about"]
    if type(about) is not dict:  # `read_memory` would refuse such a folder
        raise TypeError(f"`about` must be a dict, but is {about!r:.80}")
    json.dumps(about)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(folder / LOCK):
        # A folder, because safetensors creates a temporary file beside the file that it writes.
        new = folder / f"memory-{uuid.uuid4().hex}.tmp"
        new.mkdir()
        try:
            # Copies, because safetensors refuses tensors that share their storage.
            tensors = {name: x.detach().to("cpu", copy=True).contiguous() for name, x in memory.tensors.items()}
            # One entry, because safetensors writes several in random order: equal memories have equal checksums.
            # Of one length, so that the file's size does not depend on how much was read.
            scalars = json.dumps({"num_columns": memory.num_columns, "record_past": memory.record_past}).ljust(64)
            save_file(tensors, new / "tensors", {"cache": scalars})
            checksum, size = _checksum(new / "tensors"), (new / "tensors").stat().st_size
            file = folder / f"memory-{checksum[:16]}.safetensors"
            _replace(new / "tensors", file)
            content = {"format": FORMAT, "format_version": VERSION, **memory.description}
            content |= {"file": file.name, "bytes": size, "sha256": checksum}
            (new / DESCRIPTION).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            _replace(new / DESCRIPTION, folder / DESCRIPTION)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        _remove_leftovers(folder)


def read_memory(folder: str | os.PathLike, model: PreTrainedModel) -> SavedMemory:
    """Reads the memory of a folder and checks that `model` wrote it and that a cache of `model` can have its tensors.

    Tensors are memory-mapped: they are read from the file when they are used. Raises FileNotFoundError for a folder
    without a memory, ValueError for a memory that is damaged, altered, of another model or of another format.
    """
    expected, failed = fingerprint(model), None
    while True:
        description = read_description(folder)
        check_model(folder, description, expected)
        try:
            saved = _read_tensors(folder, description)
            break
        except (ValueError, OSError, RuntimeError, SafetensorError):
            if description == failed:
                raise
            failed = description  # another process may have replaced the file: read memory.json again
    try:
        check_tensors(saved.tensors, model)
    except ValueError as error:
        raise ValueError(f"{Path(folder) / description['file']} is damaged: {error}") from error
    return saved


def read_description(folder: str | os.PathLike) -> dict[str, Any]:
    """Reads and checks memory.json. Raises FileNotFoundError if the folder has none, ValueError if it is damaged or of
    another format.
    """
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a memory folder: it holds no {DESCRIPTION}")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        name, version = description["format"], description["format_version"]
        if (name, version) == (FORMAT, VERSION):
            wrong = [name for name, kind in DESCRIPTION_TYPES.items() if type(description[name]) is not kind]
            wrong += ["tokens_seen"] * (not all(type(n) is int and n >= 0 for n in description["tokens_seen"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error}") from error
    if (name, version) != (FORMAT, VERSION):
        raise ValueError(f"{path} has the format {name!r}, version {version!r}, not {FORMAT!r}, version {VERSION}")
    if wrong:
        raise ValueError(f"{path} is damaged: its {wrong[0]} is {description[wrong[0]]!r:.80}")
    return description


def check_model(folder: str | os.PathLike, description: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises ValueError, naming the first difference, if the memory's model has another fingerprint than `expected`."""
    saved = description["model"]
    for name, value in expected.items():
        # A field that is newer than the memory had its default.
        if (other := saved.get(name, getattr(TitansConfig, name, None))) != value:
            raise ValueError(f"{folder} is the memory of another model: its {name} is {other!r:.200}, not {value!r}")


def check_tensors(tensors: dict[str, Tensor], model: PreTrainedModel) -> None:
    """Raises ValueError, naming the tensor, unless a cache of `model` can have these tensors: every layer is complete,
    shapes fit the config, all layers have the same rows, and values are finite.
    """
    layers = [_expected_tensors(model, i) for i in range(model.config.num_layers_with_state)]
    present = {part for layer in layers for part, group in layer.items() if group.keys() & tensors.keys()}
    present |= {part.split(".")[0] for part in present if part != "state"}  # "recorded.state" only with "recorded"
    expected = {name: x for layer in layers for part in present for name, x in layer[part].items()}
    if others := expected.keys() ^ tensors.keys():
        raise ValueError(f"it {'lacks' if min(others) in expected else 'has'} the tensor {min(others)}")
    sizes: dict[str, int] = {}  # of the dimensions whose size is not in the config, by their name
    most = model.config.kv_cache_length

    def size_at(x: Tensor, at: int, size: int | str) -> int:
        if isinstance(size, int):
            return size
        if at >= x.dim():
            return -1
        return sizes.setdefault(size, min(x.shape[at], most) if WINDOW in size else x.shape[at])

    for name, shape in expected.items():
        x = tensors[name]
        wanted = [size_at(x, at, size) for at, size in enumerate(shape)]
        if list(x.shape) != wanted:
            raise ValueError(f"{name} has the shape {tuple(x.shape)}, not {tuple(wanted)}")
        if x.is_floating_point() and not x.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite")


def _expected_tensors(model: PreTrainedModel, index: int) -> dict[str, dict[str, list[int | str]]]:
    """Returns the shape of every tensor that layer `index` of a cache may have, by part and name. A size that is not in
    the config has a name: "rows", "columns of recorded", or "state.kv_cache.window".
    """
    mixer = model.base_model.modules_with_state[index]
    with torch.no_grad():
        state = dict(named_tensors(mixer.initial_state(1, next(mixer.parameters()).dtype)))

    def shapes(part: str) -> dict[str, list[int | str]]:
        windows = {name: [f"{part}.{WINDOW}"] for name in state if name.startswith(WINDOW)}
        return {name: ["rows", *(windows.get(name) or x.shape[1:2]), *x.shape[2:]] for name, x in state.items()}

    parts = {"state": shapes("state"), "restart": {"": ["rows"]}}
    for record in ("recorded", "to_reread"):
        size = ["rows", f"columns of {record}"]
        columns = {"inputs": [*size, mixer.input_size], "mask": size, "document_starts": size}
        parts |= {record: columns, f"{record}.state": shapes(f"{record}.state")}
        parts[f"{record}.restart"] = parts["restart"]
        parts[f"{record}.learned"] = {"": size}
    return {
        part: {f"{index}.{part}.{name}".removesuffix("."): x for name, x in group.items()}
        for part, group in parts.items()
    }


def _read_tensors(folder: str | os.PathLike, description: dict[str, Any]) -> SavedMemory:
    """Reads the file that memory.json names. Raises ValueError if it is not as it was saved, FileNotFoundError if
    another process removes it during the call.
    """
    name = description["file"]
    file = Path(folder) / name
    if not TENSOR_FILE.fullmatch(name) or not file.is_file():
        raise ValueError(f"{folder} is damaged: {DESCRIPTION} names the file {name!r:.80}, which is not there")
    if _checksum(file) != description["sha256"]:
        raise ValueError(f"{file} is damaged or was altered: its sha256 is not the one that {DESCRIPTION} names")
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        metadata = json.loads(opened.metadata()["cache"])
    return SavedMemory(description, tensors, metadata["num_columns"], metadata["record_past"])


def _remove_leftovers(folder: Path) -> None:
    """Removes the file of the previous memory and what interrupted saves have left. The caller holds the lock."""
    try:
        named = read_description(folder)["file"]
    except FileNotFoundError:
        named = None
    except ValueError:  # damaged or of a newer format: its file may still be needed
        return
    for file in folder.iterdir():
        if TEMPORARY_FOLDER.fullmatch(file.name):
            shutil.rmtree(file, ignore_errors=True)
        elif TENSOR_FILE.fullmatch(file.name) and file.name != named:
            file.unlink(missing_ok=True)


def _checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _replace(new: Path, old: Path) -> None:
    """Writes `new` through to the disk, then renames it to `old`."""
    with new.open("rb") as stream:
        os.fsync(stream.fileno())
    new.replace(old)
