"""Folders that are no memory of the model: every such description or tensor is a ValueError that names the folder."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from common import make_ids, read, shared_model
from covering import in_one_test
from memory_folders import copied, describe, names
from safetensors import safe_open
from safetensors.torch import save_file

from titans_hf import TitansCache, cache_files


def load(memory) -> TitansCache:
    model, folder = memory
    return TitansCache.from_pretrained(folder, model)


@in_one_test(
    "changes,message",
    [
        ({"model": None}, "AttributeError"),
        ({"model": [1]}, "AttributeError"),
        ({"about": None}, "TypeError"),
        ({"about": "text"}, "sequence"),
        ({"file": 5}, "TypeError"),
        ({"file": None}, "TypeError"),
        ({"sha256": None}, "its sha256 is not the one"),
        ({"format": ["titans-memory"]}, "has the format .'titans-memory'., version 3"),
        *(({"format_version": version}, f"version {version}") for version in (0, -1, "3")),
    ],
)
def test_a_description_of_other_types(changes, message, memory, tmp_path_factory):
    """A field of memory.json with a wrong type or value raises an error that names the folder."""
    memory = copied(memory, tmp_path_factory.mktemp("memory"))
    describe(memory[1], **changes)
    with pytest.raises(ValueError, match=f"the memory in {memory[1]} cannot be loaded: .*{message}"):
        load(memory)


@in_one_test(
    "content",
    ["[" * 100_000, '{"a":' * 100_000, "[]", "null", "5", '"titans-memory"', "{}", "", b"\xff\xfe", "9" * 10_000],
)
def test_a_description_that_is_none(content, memory):
    """A memory.json that is no description, even one nested too deeply for the parser, raises ValueError."""
    (memory[1] / "memory.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"the memory in {memory[1]} cannot be loaded: "):
        load(memory)


@in_one_test("how", ["..", "absolute", "below"])
def test_a_file_elsewhere_is_not_loaded(how, memory, tmp_path_factory):
    """A file named outside of the folder raises an error, even a valid one."""
    memory = _, folder = copied(memory, tmp_path_factory.mktemp("memory"))
    (file,) = folder.glob("*.safetensors")
    elsewhere = folder / "below" if how == "below" else tmp_path_factory.mktemp("elsewhere")
    elsewhere.mkdir(exist_ok=True)
    shutil.move(file, elsewhere)
    moved = elsewhere / file.name
    name = str(moved) if how == "absolute" else os.path.relpath(moved, folder)
    assert (folder / name).is_file()
    describe(folder, file=name)
    with pytest.raises(ValueError, match="names the file"):
        load(memory)


def rewrite(folder: Path, change) -> None:
    """Saves the folder's tensors again after `change(tensors, metadata)`, with the right size and checksum."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        tensors, metadata = {name: opened.get_tensor(name).clone() for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    changed = change(tensors, metadata)
    metadata = metadata if changed is None else changed
    file.unlink()
    save_file(tensors, file, metadata)
    describe(folder, bytes=file.stat().st_size, sha256=cache_files._checksum(file))


def without(prefix):
    def change(tensors, metadata):
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


def filled(name, value):
    def change(tensors, metadata):
        tensors[name].view(-1)[-1] = value

    return change


def replaced(name, make):
    def change(tensors, metadata):
        tensors[name] = make(tensors.get(name))

    return change


def restarts(x):
    def change(tensors, metadata):
        tensors |= {"0.restart": x, "1.restart": x.clone()}

    return change


CONV = "1.state.conv_state"


@in_one_test(
    "change,message",
    [
        (without("1."), "lacks the tensor 1.state.conv_state"),
        (without("0.state.memory.momentum.1"), "lacks the tensor 0.state.memory.momentum.1"),
        (without("0.state.kv_cache.window.keys"), "lacks the tensor 0.state.kv_cache.window.keys"),
        (
            replaced("0.state.kv_cache.window.keys", lambda x: torch.cat([x, x], dim=1)),
            r"window.keys has the shape \(2, 22, .*, not \(2, 11, ",
        ),
        (replaced("2.state.conv_state", lambda _: torch.zeros(1)), "has the tensor 2.state.conv_state"),
        (replaced("0.restart", lambda _: torch.zeros(2, dtype=torch.bool)), "lacks the tensor 1.restart"),
        (replaced("1.restart", lambda _: torch.zeros(2, dtype=torch.bool)), "1.restart, which another layer lacks"),
        (restarts(torch.zeros(3, dtype=torch.bool)), "has the shape"),
        (replaced("0.recorded.inputs", lambda _: torch.zeros(2, 3, 32)), "lacks the tensor 0.recorded.document_starts"),
        (replaced(CONV, lambda x: x[:, 1:].clone()), r"1.state.conv_state has the shape \(2, 2, 96\), not \(2, 3"),
        (replaced(CONV, lambda x: x[:1].clone()), r"1.state.conv_state has the shape"),
        (replaced(CONV, lambda x: x[None].clone()), r"1.state.conv_state has the shape"),
        (replaced(CONV, lambda x: torch.zeros(())), r"1.state.conv_state has the shape"),
        (filled(CONV, float("nan")), "1.state.conv_state holds numbers that are not finite"),
        (filled("0.state.memory.weights.0", float("inf")), "weights.0 holds numbers that are not finite"),
        (
            replaced("0.state.memory.weights.0", torch.Tensor.float),
            "weights.0 has the dtype torch.float32, not torch.f",
        ),
        (filled("0.state.memory.num_seen", -1), "num_seen holds numbers from -1 to 60, not from 0"),
        (lambda tensors, metadata: {}, "it lacks 'cache'"),
        (lambda tensors, metadata: {"cache": "{}"}, "it lacks 'num_columns'"),
        (lambda tensors, metadata: {"cache": '{"num_columns": -1, "record_past": false}'}, "has num_columns -1"),
        (lambda tensors, metadata: {"cache": '{"num_columns": 60, "record_past": 0}'}, "and record_past 0"),
    ],
)
def test_tensors_that_no_cache_has(change, message, memory, tmp_path_factory):
    """Missing, surplus or wrong tensors, and wrong metadata, raise an error despite right checksums."""
    memory = copied(memory, tmp_path_factory.mktemp("memory"))
    rewrite(memory[1], change)
    with pytest.raises(ValueError, match=f"the memory in {memory[1]} cannot be loaded: .*{message}"):
        load(memory)


def test_a_file_that_is_none(memory, tmp_path_factory):
    """A file with the right checksum that is no safetensors file is an error that names the folder."""
    memory = copied(memory, tmp_path_factory.mktemp("memory"))
    (file,) = memory[1].glob("*.safetensors")
    file.write_bytes(b"hello")
    describe(memory[1], sha256=cache_files._checksum(file))
    with pytest.raises(ValueError, match=f"the memory in {memory[1]} cannot be loaded: "):
        load(memory)


def test_a_rewritten_file_loads(memory):
    """An unchanged rewritten file loads."""
    rewrite(memory[1], lambda tensors, metadata: None)
    assert load(memory).get_seq_length() == 60


def test_a_memory_that_is_not_finite_is_not_saved(memory):
    """Saving a memory with nan raises an error and keeps the earlier one."""
    model, folder = memory
    cache = read(model, make_ids(2, 9))[1]
    cache.layers[1].apply(lambda x: x.clone().fill_(float("nan")) if x.is_floating_point() else x)
    with pytest.raises(ValueError, match="not finite"):
        cache.save_pretrained(folder, model)
    assert load(memory).get_seq_length() == 60


def circular() -> dict:
    about: dict = {}
    about["about"] = about
    return about


def nested() -> dict:
    about: dict = {}
    for _ in range(100_000):
        about = {"about": about}
    return about


@in_one_test("make", [lambda: {"when": object()}, circular, nested, lambda: None, lambda: "text"])
def test_an_about_that_is_not_json_leaves_nothing(make, tmp_path):
    """An `about` that is not JSON raises an error before anything is written."""
    cache = read(shared_model("mag"), make_ids(2, 9))[1]
    cache.about = make()
    with pytest.raises(ValueError, match=f"the memory in {tmp_path / 'new'} cannot be saved: "):
        cache.save_pretrained(tmp_path / "new", shared_model("mag"))
    assert not (tmp_path / "new").exists() or not names(tmp_path / "new")
