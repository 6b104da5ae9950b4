"""Memory folders: `memory.json`, which describes a memory, and the safetensors file that it names.

`memory.json` is replaced last, atomically: after an interrupted save, the folder still holds the previous memory.
Processes that save into one folder wait for each other (a lock); a process that loads during a save gets either the
previous memory or the new one. If another process has saved meanwhile, its memory stays, and the save goes into a
folder beside it. Whatever fails while a folder is read or written is one ValueError or OSError that names the folder.
"""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import WeakFileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from .configuration_titans import TitansConfig, field_facts
from .memory_state import named_tensors, with_tensors

FORMAT, VERSION = "titans-memory", 3
DESCRIPTION = "memory.json"
LOCK = ".memory.lock"
TENSOR_FILE = re.compile(r"memory-[0-9a-f]{16}\.safetensors")
TEMPORARY_FOLDER = re.compile(r"memory-[0-9a-f]{32}\.tmp")
# Attributes of PEFT's layers that say which of a model's adapters are applied, and by which factor.
ADAPTER_ATTRIBUTES = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
AUTOCAST = (torch.bfloat16, torch.float16)  # dtypes of a call under autocast


def model_fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Returns everything that the states of a Titans depend on: the config's fields, and `weight_facts` of all weights
    of the base model.
    """
    facts = field_facts(TitansConfig).items()
    fields = {name: getattr(model.config, name) for name, fact in facts if fact["state"] != "none"}
    return json.loads(json.dumps(fields)) | weight_facts(model.base_model)


def weight_facts(model: PreTrainedModel, most: int | None = None) -> dict[str, str]:
    """Returns the dtypes of a model's weights, and a hash of them and of how PEFT's adapters are applied. With `most`,
    only the first `most` numbers of each weight count. Weights that accelerate has offloaded are read.

    Raises ValueError for weights that are not completely in this process, such as sharded ones.
    """
    total, dtypes = hashlib.sha256(), set()
    tied = tuple(getattr(model, "all_tied_weights_keys", ()))  # accelerate keeps them once
    for name, x in sorted(_weights(model)):
        if name.endswith(tied):
            continue
        x = _offloaded(model, name, x) if x.is_meta else x
        if hasattr(x, "full_tensor") or x.is_meta:
            raise ValueError(
                f"A memory folder records a hash of the model's weights, but {name} is not completely in this process: "
                "save and load memories with a model that is not sharded."
            )
        dtypes.add(str(x.dtype).removeprefix("torch."))
        for y in _parts(x):  # without the name: a wrapper such as torch.compile's adds to it
            total.update(f"{y.dtype} {tuple(y.shape)}\n".encode())
            total.update(y.detach().flatten()[:most].cpu().contiguous().view(torch.uint8).numpy().data)
    for module in model.modules():
        if hasattr(module, "base_layer") or hasattr(module, "original_module"):  # of PEFT, around a module
            used = {key: getattr(module, key, None) for key in ADAPTER_ATTRIBUTES}
            total.update(f"{used}\n".encode())
    return {"dtype": " ".join(sorted(dtypes)), "weights": total.hexdigest()}


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and tensors of a model's parameters and of the buffers that it saves. `state_dict()`, which has
    the same, changes a model that bitsandbytes has quantised.
    """
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules():
        for name, x in module._buffers.items():
            if x is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, x


def _offloaded(model: PreTrainedModel, name: str, x: Tensor) -> Tensor:
    """Returns the weight that accelerate's hook keeps in place of x, on the meta device; x itself if there is none."""
    module, _, own = name.rpartition(".")
    hook = getattr(model.get_submodule(module), "_hf_hook", None)
    return next((y.weights_map[own] for y in (hook, *getattr(hook, "hooks", ())) if getattr(y, "weights_map", None)), x)


def _parts(x: Tensor) -> Iterator[Tensor]:
    """Yields the tensors that a quantised tensor consists of; any other tensor itself."""
    if not hasattr(x, "__tensor_flatten__"):
        yield x
        return
    for name in x.__tensor_flatten__()[0]:
        yield from _parts(getattr(x, name))


@contextmanager
def naming_folder(folder: str | os.PathLike, doing: str, others: type[Exception] = ValueError) -> Iterator[None]:
    """Turns any exception of the block into one ValueError or OSError that names the folder. `others`: the class for
    exceptions that are neither.
    """
    try:
        yield
    except Exception as error:
        kind = next((kind for kind in (OSError, ValueError) if isinstance(error, kind)), others)
        name = "" if isinstance(error, OSError | ValueError | SafetensorError) else f"{type(error).__name__} "
        reason = f"it lacks {error}" if isinstance(error, KeyError) else f"{name}{error}"
        raise kind(f"the memory in {folder} cannot be {doing}: {reason}") from error


def write_memory(
    folder: str | os.PathLike,
    description: dict[str, Any],
    tensors: dict[str, Tensor],
    seen: dict[Path, dict[str, Any] | None],
    **counts: int | bool,
) -> None:
    """Replaces the memory of a folder, atomically; waits while another process saves there.

    description: the content of memory.json, to which format, file name, size and checksum are added. tensors: by name;
    "0.state.conv_state" is a tensor of layer 0. counts: num_columns, record_past, attributes of all the cache's layers.
    seen: by folder, the description that the caller last read or wrote there, None for a folder without one; updated.
    If another process has saved since, this memory goes into a new folder beside, and ValueError is raised. Other
    errors, as in `naming_folder`, leave the folder's memory as it was.
    """
    folder = Path(folder)
    with naming_folder(folder, "saved"):
        for name, x in tensors.items():
            _check_finite(name, x)
        about = description["about"]
        if type(about) is not dict:
            raise ValueError(f"`about` must be a dict, but is {about!r:.80}")
        json.dumps(about)
    with naming_folder(folder, "saved", others=OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(folder / LOCK):
            place = folder.resolve()
            if place in seen and _current(folder) not in (None, seen[place]):
                beside = folder.with_name(f"{folder.name}-{uuid.uuid4().hex[:8]}")
                write_memory(beside, description, tensors, seen, **counts)
                raise ValueError(f"another process has changed it since it was loaded; this memory is kept in {beside}")
            seen[place] = _write(folder, description, tensors, counts)
            _remove_leftovers(folder)


def _write(folder: Path, description: dict[str, Any], tensors: dict[str, Tensor], counts: dict) -> dict[str, Any]:
    """Writes the file of a memory, then its description, and returns the description as JSON reads it."""
    # A folder, because safetensors creates a temporary file beside the file that it writes.
    new = folder / f"memory-{uuid.uuid4().hex}.tmp"
    new.mkdir()
    try:
        # Copies, because safetensors refuses tensors that share their storage.
        tensors = {name: x.detach().to("cpu", copy=True).contiguous() for name, x in tensors.items()}
        # One metadata entry, because safetensors writes several in random order: equal memories have equal checksums.
        # Padded, so that the file's size does not depend on the number of tokens read.
        save_file(tensors, new / "tensors", {"cache": json.dumps(counts).ljust(64)})
        checksum, size = _checksum(new / "tensors"), (new / "tensors").stat().st_size
        file = folder / f"memory-{checksum[:16]}.safetensors"
        _replace(new / "tensors", file)
        content = {"format": FORMAT, "format_version": VERSION, **description}
        content |= {"file": file.name, "bytes": size, "sha256": checksum}
        text = json.dumps(content, indent=2)
        (new / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
        _replace(new / DESCRIPTION, folder / DESCRIPTION)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return json.loads(text)


def read_memory(
    folder: str | os.PathLike, expected: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor], int, bool]:
    """Reads the memory of a folder and checks that the model with the fingerprint `expected` wrote it. Returns
    description, tensors, num_columns and record_past, as `write_memory` got them.

    Tensors are memory-mapped: they are read from the file when they are used. Raises FileNotFoundError for a folder
    without a memory; other errors as in `naming_folder`.
    """
    failed = None
    while True:
        description = read_description(folder)
        try:
            with naming_folder(folder, "loaded"):
                _check_model(description["model"], expected)
                return description, *_read_tensors(Path(folder), description)
        except (ValueError, OSError):
            if description == failed:
                raise
            failed = description  # another process may have replaced the file: read memory.json again


def read_description(folder: str | os.PathLike) -> dict[str, Any]:
    """Reads memory.json. Raises FileNotFoundError if the folder has none, ValueError if it has another format."""
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a memory folder: it holds no {DESCRIPTION}")
    with naming_folder(folder, "loaded"):
        description = json.loads(path.read_text(encoding="utf-8"))
        found, wanted = (description["format"], description["format_version"]), (FORMAT, VERSION)
        if found != wanted:
            raise ValueError(f"it has the format {found[0]!r}, version {found[1]!r}, not {FORMAT!r}, version {VERSION}")
    return description


def _check_model(saved: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raises ValueError, naming the first difference, if the memory's model has another fingerprint than `expected`."""
    for name, value in expected.items():
        # A memory that is older than a field was made with the field's default.
        if (other := saved.get(name, getattr(TitansConfig, name, None))) != value:
            raise ValueError(f"it is the memory of another model: its {name} is {other!r:.200}, not {value!r}")


def _read_tensors(folder: Path, description: dict[str, Any]) -> tuple[dict[str, Tensor], int, bool]:
    """Reads the file that memory.json names. Raises ValueError if the file is not as it was saved."""
    name = description["file"]
    file = folder / name
    if not TENSOR_FILE.fullmatch(name) or not file.is_file():
        raise ValueError(f"{DESCRIPTION} names the file {name!r:.80}, which is not there")
    if _checksum(file) != description["sha256"]:
        raise ValueError(f"{name} is damaged or was altered: its sha256 is not the one that {DESCRIPTION} names")
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        scalars = json.loads((opened.metadata() or {})["cache"])
    num_columns, record_past = scalars["num_columns"], scalars["record_past"]
    if type(num_columns) is not int or num_columns < 0 or type(record_past) is not bool:
        raise ValueError(f"{name} has num_columns {num_columns!r:.80} and record_past {record_past!r:.80}")
    return tensors, num_columns, record_past


class TensorReader:
    """Hands out the tensors of a file, each once, as parts of the layers of a cache, and checks them against a form:
    names, dtypes, shapes, finiteness and range. All layers must have the same parts, rows and columns.
    """

    def __init__(self, tensors: dict[str, Tensor], config: TitansConfig):
        self.remaining, self.config = dict(tensors), config
        self.sizes: dict[str, int] = {}  # sizes that forms leave open, set by the first tensor

    def take(self, layer: int, part: str, form: Any) -> Any:
        """Returns a tree like `form` with the tensors of a layer's part, such as "state"; None if there are none.

        Raises ValueError, naming the tensor, if one is missing or cannot be in a cache.
        """
        forms = {f"{layer}.{part}.{path}".removesuffix("."): x for path, x in named_tensors(form)}
        missing = forms.keys() - self.remaining.keys()
        present = self.sizes.setdefault(part, len(missing) < len(forms))
        if not present and missing == forms.keys():
            return None
        if missing:
            raise ValueError(f"it lacks the tensor {min(missing)}")
        if not present:
            raise ValueError(f"it has the tensor {min(forms)}, which another layer lacks")
        return with_tensors(form, [self._checked(name, self.remaining.pop(name), x) for name, x in forms.items()])

    def finish(self) -> None:
        """Raises ValueError for a tensor that was not taken."""
        if self.remaining:
            raise ValueError(f"it has the tensor {min(self.remaining)}, which no layer has")

    def _checked(self, name: str, x: Tensor, form: Tensor) -> Tensor:
        """Returns x, as `check_tensor` does: with the form's dtype, except for rows and columns its shape, and integers
        that are possible counts of tokens.
        """
        wanted = [self.sizes.setdefault("rows", len(x) if x.dim() else 0), *form.shape[1:]]
        group, part = name.split(".", 1)[1].rpartition(".")[::2]
        if x.dim() > 1 and form.shape[1:2] == (0,) and part != "conv_state":  # tokens of a window, or columns
            most = self.config.kv_cache_length if group.endswith("window") else x.shape[1]
            wanted[1] = self.sizes.setdefault(f"{group} columns", min(x.shape[1], most))
        autocast = "kv_cache" in name or part in ("conv_state", "inputs")  # written in a call's dtype
        dtypes = (form.dtype, *AUTOCAST) if autocast else (form.dtype,)
        return check_tensor(name, x, wanted, dtypes, end=self.config.n_positions if x.dtype == torch.int64 else None)


def check_tensor(
    name: str,
    x: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    least: int = 0,
    end: int | None = None,
) -> Tensor:
    """Returns x. Raises ValueError that names it, unless x has the shape (None: any size), one of the dtypes, finite
    numbers and, with `end`, numbers from `least` to below `end`.
    """
    if x.dim() != len(shape) or any(n not in (None, size) for n, size in zip(shape, x.shape, strict=True)):
        wanted = str(tuple("any" if n is None else n for n in shape)).replace("'", "")
        raise ValueError(f"{name} has the shape {tuple(x.shape)}, not {wanted}")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} has the dtype {x.dtype}, not {dtypes[0]}")
    _check_finite(name, x)
    if end is not None and x.numel() and not least <= x.min() <= x.max() < end:
        raise ValueError(f"{name} holds numbers from {x.min()} to {x.max()}, not from {least} to below {end}")
    return x


def _check_finite(name: str, x: Tensor) -> None:
    if x.is_floating_point() and not x.isfinite().all():
        raise ValueError(f"{name} holds numbers that are not finite")


def _current(folder: Path) -> dict[str, Any] | None:
    """Returns the description that a folder has now, {} for a damaged one, None for a folder without one."""
    try:
        return json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return {}


def _remove_leftovers(folder: Path) -> None:
    """Removes the file of the previous memory and the leftovers of interrupted saves. The caller holds the lock."""
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
