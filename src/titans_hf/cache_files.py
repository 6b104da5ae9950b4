"""A memory as a folder: `memory.json`, which says what it is, and the safetensors file that it names.

`memory.json` is replaced last, at once: whenever a save is interrupted, the folder holds the memory before it.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from .configuration_titans import TitansConfig

FORMAT, VERSION = "titans-memory", 1
DESCRIPTION = "memory.json"
TENSORS = re.compile(r"memory-[0-9a-f]{16}\.safetensors")
# fields of a config that a state does not depend on
STATE_INDEPENDENT_FIELDS = {"attention_dropout", "initializer_range", "tie_word_embeddings", "use_cache"}
STATE_INDEPENDENT_FIELDS |= {"pad_token_id", "bos_token_id", "eos_token_id"}


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """What the states of a model depend on: the config's fields, the parameters' dtypes, and a hash of the weights
    without those of a head. Takes as long as it takes to read all weights.

    Raises ValueError for a model whose weights are shared among processes or not in memory.
    """
    names = [name for name in TitansConfig.__annotations__ if name not in STATE_INDEPENDENT_FIELDS]
    fields = {name: getattr(model.config, name) for name in names}
    total, dtypes = hashlib.sha256(), set()
    for name, x in sorted(model.base_model.state_dict().items()):
        if hasattr(x, "full_tensor") or x.is_meta:
            raise ValueError(
                f"A memory file names the weights that it belongs to, but {name} is not all in this process: save and "
                "load memories with a model that is neither sharded nor offloaded."
            )
        dtypes.add(str(x.dtype).removeprefix("torch."))
        total.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        total.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return json.loads(json.dumps(fields)) | {"dtype": " ".join(sorted(dtypes)), "weights": total.hexdigest()}


def write_memory(
    folder: str | os.PathLike, tensors: dict[str, Tensor], description: dict[str, Any], metadata: dict[str, str]
) -> None:
    """Replaces the memory of a folder, at once. `description` is for people and for checks, `metadata` (which is in the
    file with the tensors) for loading."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / "memory.tmp"
    # copies: two tensors may share their storage, which safetensors refuses
    save_file({name: x.detach().to("cpu", copy=True).contiguous() for name, x in tensors.items()}, new, metadata)
    checksum = _checksum(new)
    file = folder / f"memory-{checksum[:16]}.safetensors"
    size = new.stat().st_size
    _replace(new, file)
    about = {"format": FORMAT, "format_version": VERSION, **description}
    about |= {"file": file.name, "bytes": size, "sha256": checksum}
    new.write_text(json.dumps(about, indent=2) + "\n")
    _replace(new, folder / DESCRIPTION)
    for old in folder.iterdir():
        if TENSORS.fullmatch(old.name) and old != file:
            old.unlink()


def read_description(folder: str | os.PathLike) -> dict[str, Any]:
    """What `memory.json` says. Raises FileNotFoundError where there is none, ValueError for one that is damaged or of
    another format.
    """
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a memory folder: it holds no {DESCRIPTION}")
    try:
        found = json.loads(path.read_text())
        what = found["format"], found["format_version"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged: it does not say what format it has") from error
    if what[0] != FORMAT or not isinstance(what[1], int):
        raise ValueError(f"{path} has the format {what[0]!r}, version {what[1]!r}, not {FORMAT!r}")
    if what[1] > VERSION:
        raise ValueError(
            f"{path} has version {what[1]} of its format, but this titans_hf reads versions up to {VERSION}: update it"
        )
    if missing := {"model", "tokens_seen", "about", "file", "bytes", "sha256"} - found.keys():
        raise ValueError(f"{path} is damaged: it lacks {', '.join(sorted(missing))}")
    return found


def check_model(folder: str | os.PathLike, description: dict[str, Any], model: PreTrainedModel) -> None:
    """Raises ValueError, saying what differs, unless it is the memory of this model with these weights."""
    theirs, ours = description["model"], fingerprint(model)
    for name in ours:
        if ours[name] != theirs.get(name):
            raise ValueError(
                f"{folder} is the memory of another model: its {name} is {theirs.get(name)!r}, not {ours[name]!r}"
            )


def read_tensors(folder: str | os.PathLike, description: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a memory, mapped from its file: what is not looked at takes no memory.

    Raises ValueError for a file that is not the one that was saved.
    """
    file = Path(folder) / str(description["file"])
    if not TENSORS.fullmatch(file.name) or not file.is_file():
        raise ValueError(
            f"{folder} is damaged: {DESCRIPTION} names the file {description['file']!r}, which is not there"
        )
    if (size := file.stat().st_size) != description["bytes"]:
        raise ValueError(f"{file} is damaged: it has {size} bytes, not the {description['bytes']} that were saved")
    if _checksum(file) != description["sha256"]:
        raise ValueError(f"{file} was altered: its sha256 is not the one that {DESCRIPTION} names")
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118


def _checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _replace(new: Path, old: Path) -> None:
    """Puts a file in the place of another when it is on the disk."""
    with new.open("rb") as stream:
        os.fsync(stream.fileno())
    new.replace(old)
