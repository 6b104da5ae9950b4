"""Memories of another model, and folders that are damaged or altered: loading them raises an error."""

import copy
import os

import pytest
import torch
from common import make_model, read, shared_model
from covering import in_one_test
from memory_folders import IDS, copied, describe
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
        (lambda _: make_model("mag", memory_max_lr=0.125), "its memory_max_lr is 0.5, not 0.125"),
        (lambda _: make_model("mag", rope_parameters={"rope_theta": 5.0}), "its rope_parameters is {'"),
        (lambda _: make_model("mag", sliding_window=8), "its sliding_window is 12, not 8"),
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
    """Another output layer, attention kernel or training setting may load a memory."""
    model, folder = memory
    TitansCache.from_pretrained(folder, changed(model, "lm_head.weight"))
    TitansCache.from_pretrained(folder, model.model)
    TitansCache.from_pretrained(folder, make_model("mag", initializer_range=0.5, attention="eager"))


def cut(folder):
    (file,) = folder.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 8)


def alter(folder):
    (file,) = folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def remove(folder):
    next(folder.glob("*.safetensors")).unlink()


def half_a_description(folder):
    path = folder / "memory.json"
    path.write_text(path.read_text()[:100])


@in_one_test(
    "damage,message",
    [
        (cut, "is damaged or was altered: its sha256"),
        (alter, "is damaged or was altered: its sha256"),
        (remove, "names the file 'memory-.*', which is not there"),
        (half_a_description, "cannot be loaded: Unterminated string"),
        (
            lambda folder: describe(folder, format_version=4),
            "has the format 'titans-memory', version 4, not 'titans-memory', version 3",
        ),
        (lambda folder: describe(folder, format="other"), "has the format 'other', version 3, not 'titans-memory'"),
        (lambda folder: describe(folder, format_version=None), "has the format 'titans-memory', version None"),
        (lambda folder: describe(folder, file="../memory.json"), "names the file '../memory.json'"),
        (
            lambda folder: describe(folder, "file"),
            "cannot be loaded: it lacks 'file'",
        ),
    ],
)
def test_what_is_not_the_saved_file_is_refused(damage, message, memory, tmp_path_factory):
    """A damaged, altered, missing or newer file raises an error."""
    model, folder = copied(memory, tmp_path_factory.mktemp("memory"))
    damage(folder)
    with pytest.raises(ValueError, match=message):
        TitansCache.from_pretrained(folder, model)


def test_a_folder_without_a_memory(tmp_path):
    """A folder without memory.json raises FileNotFoundError."""
    with pytest.raises(FileNotFoundError, match=r"is not a memory folder: it holds no memory.json"):
        TitansCache.from_pretrained(tmp_path, shared_model("mag"))


def test_the_cache_of_another_model_is_not_saved(tmp_path):
    """Saving a cache for another model raises an error and writes nothing."""
    cache = read(shared_model("mag"), IDS)[1]
    with pytest.raises(ValueError, match="its variant is mag, not mal"):
        cache.save_pretrained(tmp_path, shared_model("mal"))
    assert not list(tmp_path.iterdir())


def test_a_sharded_model_is_refused():
    """A model whose weights are not all in this process raises an error."""
    with pytest.raises(ValueError, match="neither sharded nor offloaded"):
        cache_files.fingerprint(make_model("mag").to("meta"))
