"""Folders that are no memory of the model: each is a ValueError that names the folder."""

import copy
import os
import shutil
from pathlib import Path

import pytest
import torch
from common import make_ids, make_model, read, shared_model
from covering import in_one_test
from memory_folders import IDS, describe, names
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from titans_hf import TitansCache, cache_files


def changed(model: PreTrainedModel, name: str) -> PreTrainedModel:
    other = copy.deepcopy(model)
    with torch.no_grad():
        parameter = other.get_parameter(name)
        parameter.view(-1)[-1] += 1e-6
    return other


@in_one_test(
    "make,message",
    [
        (lambda _: make_model("mal"), "its variant is 'mag', not 'mal'"),
        (lambda _: make_model("mag", rope_parameters={"rope_theta": 5.0}), "its rope_parameters is {'"),
        (lambda model: copy.deepcopy(model).float(), "its dtype is 'float64', not 'float32'"),
        (lambda model: changed(model, "model.layers.1.mixer.memory.k_proj.weight"), "its weights is '"),
        (lambda model: changed(model, "model.embed_tokens.weight"), "its weights is '"),
    ],
)
def test_the_memory_of_another_model_is_refused(make, message, memory):
    """A memory of a model with other weights, dtype or settings raises an error that names the difference."""
    model, folder = memory
    with pytest.raises(ValueError, match="it is the memory of another model") as error:
        TitansCache.from_pretrained(folder, make(model))
    assert message in str(error.value)


def test_what_does_not_shape_a_memory_may_differ(memory):
    """Another output layer, attention kernel or training setting may load a memory, and its file be written anew."""
    model, folder = memory
    rewritten()(folder)
    TitansCache.from_pretrained(folder, changed(model, "lm_head.weight"))
    TitansCache.from_pretrained(folder, model.model)
    TitansCache.from_pretrained(folder, make_model("mag", initializer_range=0.5, attention="eager"))


def tensor_file(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def alter(folder: Path) -> None:
    data = bytearray(tensor_file(folder).read_bytes())
    data[-5] ^= 1
    tensor_file(folder).write_bytes(data)


def move_above(folder: Path) -> None:
    describe(folder, file=os.path.relpath(shutil.move(tensor_file(folder), folder.parent), folder))


def rewritten(change=lambda tensors: None, metadata: dict | None = None):
    """Returns a function that saves a folder's tensors again after `change`, with the right size and checksum."""

    def damage(folder: Path) -> None:
        file = tensor_file(folder)
        with safe_open(file, framework="pt") as opened:
            tensors, kept = {x: opened.get_tensor(x).clone() for x in opened.keys()}, opened.metadata()  # noqa: SIM118
        change(tensors)
        file.unlink()
        save_file(tensors, file, metadata or kept)
        describe(folder, bytes=file.stat().st_size, sha256=cache_files._checksum(file))

    return damage


def replaced(name: str, make):
    return rewritten(lambda tensors: tensors.update({name: make(tensors.get(name))}))


CONV, KEYS, WEIGHTS = "1.state.conv_state", "0.state.kv_cache.window.keys", "0.state.memory.weights.0"
NO_ROWS, COUNTS = torch.zeros(2, dtype=torch.bool), "0.state.memory.num_seen"
COLUMNS = {"cache": '{"num_columns": -1, "record_past": false}'}
DAMAGES = {
    "one bit": (alter, "is damaged or was altered: its sha256"),
    "no file": (lambda folder: tensor_file(folder).unlink(), "names the file 'memory-.*', which is not there"),
    "above": (move_above, "names the file"),
    "lost": (lambda folder: describe(folder, "file"), "it lacks 'file'"),
    "version": (lambda x: describe(x, format_version="3"), "version '3', not 'titans-memory', version 3"),
    "half": (lambda x: os.truncate(x / "memory.json", 100), "Unterminated string"),
    "bytes": (lambda folder: (folder / "memory.json").write_bytes(b"\xff\xfe"), ""),
    "lacks a tensor": (rewritten(lambda tensors: tensors.pop(CONV)), f"lacks the tensor {CONV}"),
    "long window": (replaced(KEYS, lambda x: torch.cat([x, x], 1)), r"keys has the shape \(2, 22, .*, not \(2, 11, "),
    "third layer": (replaced("2.state.conv_state", lambda _: torch.zeros(1)), "has the tensor 2.state.conv_state"),
    "one restart": (replaced("0.restart", lambda _: NO_ROWS), "lacks the tensor 1.restart"),
    "part of a record": (replaced("0.recorded.inputs", lambda _: torch.zeros(2, 3, 32)), "lacks the tensor 0.recorded"),
    "nan": (replaced(CONV, lambda x: x * torch.nan), "conv_state holds numbers that are not finite"),
    "float32": (replaced(WEIGHTS, torch.Tensor.float), "weights.0 has the dtype torch.float32, not torch.f"),
    "count": (replaced(COUNTS, lambda _: torch.tensor([60, -1])), "num_seen holds numbers from -1 to 60, not from 0"),
    "no scalars": (rewritten(metadata={"others": ""}), "it lacks 'cache'"),
    "columns": (rewritten(metadata=COLUMNS), "has num_columns -1"),
}


@in_one_test("name", DAMAGES)
def test_what_is_not_the_saved_memory_is_refused(name, memory, tmp_path_factory):
    """What is not the saved memory raises an error that names the folder, despite right checksums."""
    damage, message = DAMAGES[name]
    model, folder = memory[0], tmp_path_factory.mktemp("memory")
    shutil.copytree(memory[1], folder, dirs_exist_ok=True)
    damage(folder)
    with pytest.raises(ValueError, match=f"the memory in {folder} cannot be loaded: .*{message}"):
        TitansCache.from_pretrained(folder, model)


def test_an_about_that_is_not_json_leaves_nothing(tmp_path):
    """An `about` that is not a JSON object raises an error before anything is written."""
    cache = read(shared_model("mag"), make_ids(2, 9))[1]
    for about in ({"when": object()}, "text"):
        cache.about = about
        with pytest.raises(ValueError, match=f"the memory in {tmp_path / 'new'} cannot be saved: "):
            cache.save_pretrained(tmp_path / "new", shared_model("mag"))
    assert not (tmp_path / "new").exists() or not names(tmp_path / "new")


def test_what_cannot_be_saved_leaves_the_memory_before(memory):
    """A memory with nan, of another model, or of a model that is not all in this process is not saved."""
    model, folder = memory
    cache = read(model, make_ids(2, 9))[1]
    cache.layers[1].apply(lambda x: x.clone().fill_(float("nan")) if x.is_floating_point() else x)
    for other, target, message in (
        (cache, model, "not finite"),
        (read(model, IDS)[1], shared_model("mal"), "its variant is mag, not mal"),
        (read(model, IDS)[1], make_model("mag").to("meta"), "is not completely in this process"),
    ):
        with pytest.raises(ValueError, match=message):
            other.save_pretrained(folder, target)
    assert TitansCache.from_pretrained(folder, model).get_seq_length() == 60
