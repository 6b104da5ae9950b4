"""A memory saved and loaded equals the original, and no other file is ever loaded."""

import copy
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import VARIANTS, assert_same, left_pad, make_ids, make_model, read, shared_model
from transformers import PreTrainedModel

from titans_hf import TitansCache, cache_files

IDS = make_ids(2, 60)


def everything(cache: TitansCache) -> dict[str, torch.Tensor]:
    return {f"{i}.{name}": x for i, layer in enumerate(cache.layers) for name, x in layer.named_tensors().items()}


def assert_equal(actual: TitansCache, expected: TitansCache) -> None:
    """Asserts that tensors are equal bit by bit, and so is everything that is not a tensor."""
    ours, theirs = everything(actual), everything(expected)
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        assert ours[name].dtype == x.dtype and torch.equal(ours[name], x), name
    for ours, theirs in zip(actual.layers, expected.layers, strict=True):
        for name in ("num_columns", "record_past", "is_initialized"):
            assert getattr(ours, name) == getattr(theirs, name), name
    assert actual.about == expected.about


def names(folder: Path) -> set[str]:
    """The files of a memory folder, without the lock."""
    return {path.name for path in folder.iterdir()} - {cache_files.LOCK}


def saved(cache: TitansCache, model: PreTrainedModel, folder: Path) -> TitansCache:
    cache.save_pretrained(folder, model)
    return TitansCache.from_pretrained(folder, model)


@pytest.fixture
def memory(tmp_path) -> tuple[PreTrainedModel, Path]:
    model = shared_model("mag")
    read(model, IDS)[1].save_pretrained(tmp_path, model)
    return model, tmp_path


@pytest.mark.parametrize("num_read", [1, 13, 40, 55])
@pytest.mark.parametrize("variant", VARIANTS)
def test_going_on_from_a_file_equals_never_having_stopped(variant, num_read, tmp_path):
    """Reading on from a saved memory gives bit-identical logits, from any place of a chunk, segment and window:
    otherwise a part of the state is not saved.
    """
    model = shared_model(variant)
    whole = read(model, IDS, [num_read, 60 - num_read])[0]
    cache = read(model, IDS[:, :num_read])[1]
    loaded = saved(cache, model, tmp_path)
    assert_equal(loaded, cache)
    rest, after = read(model, IDS[:, num_read:], cache=loaded)
    assert torch.equal(rest, whole[:, num_read:])
    assert after.get_seq_length() == 60


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_goes_on_from_a_file(variant, tmp_path):
    """generate() from a saved memory of rows of different lengths gives the same tokens: otherwise a loaded memory
    would answer differently.
    """
    model = make_model(variant, dtype=torch.float32)
    ids, mask = left_pad([make_ids(30), make_ids(17, seed=1)])
    with torch.no_grad():
        cache = model(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True).past_key_values
    loaded = saved(cache, model, tmp_path)
    assert json.loads((tmp_path / "memory.json").read_text())["tokens_seen"] == [29, 16]
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    generated = [model.generate(ids, past_key_values=x, **options) for x in (cache, loaded)]
    assert torch.equal(*generated)


def empty(model):
    return TitansCache(model.config)


def recording(model):
    """Returns a cache of which six columns may still be removed by crop()."""
    cache = read(model, IDS[:, :13])[1]
    cache.activate_past_recording()
    return read(model, IDS[:, 13:19], cache=cache)[1]


def cropped(model):
    """Returns a cache that has to read four columns again."""
    cache = recording(model)
    cache.crop(-2)
    return cache


def cropped_to_the_beginning(model):
    cache = empty(model)
    cache.activate_past_recording()
    read(model, IDS[:, :9], cache=cache)
    cache.crop(-5)
    return cache


def restarting(model):
    """Returns a cache with one row that was reset."""
    cache = read(model, IDS[:, :13])[1]
    cache.reset(torch.tensor([True, False]))
    return cache


@pytest.mark.parametrize("make", [empty, recording, cropped, cropped_to_the_beginning, restarting])
def test_what_a_cache_can_be(make, tmp_path):
    """Empty, recording, cropped and partly reset caches are the same after loading: otherwise crop() or reset() would
    be lost by saving.
    """
    model = shared_model("mac")
    cache = make(model)
    cache.about = {"read": "some ids", "pages": [1, 2]}
    loaded = saved(cache, model, tmp_path)
    assert_equal(loaded, cache)
    if cache.layers[0].record_past:
        for x in (cache, loaded):
            x.crop(0)
    assert torch.equal(read(model, IDS[:, 19:], cache=loaded)[0], read(model, IDS[:, 19:], cache=cache)[0])


def test_a_file_is_of_one_size(tmp_path):
    """A memory's file has one size for texts of any length, and replaces the one before: otherwise long texts would
    need large files.
    """
    model, sizes = shared_model("mag"), []
    for length in (21, 421):
        read(model, make_ids(1, length))[1].save_pretrained(tmp_path, model)
        (file,) = tmp_path.glob("*.safetensors")  # and that before it is gone
        sizes.append(file.stat().st_size)
    assert sizes[0] == sizes[1]
    assert names(tmp_path) == {"memory.json", file.name}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells what is mapped on Linux alone")
def test_a_file_is_mapped(memory):
    """Loading maps the file instead of copying it: otherwise large memories would be copied, used or not."""
    model, folder = memory
    (file,) = folder.glob("*.safetensors")
    assert str(file) not in Path("/proc/self/maps").read_text()
    cache = TitansCache.from_pretrained(folder, model)
    assert str(file) in Path("/proc/self/maps").read_text()
    file.unlink()  # what is mapped stays
    assert torch.isfinite(read(model, IDS, cache=cache)[0]).all()


def test_what_was_loaded_is_not_written_to(memory):
    """Reading on from a loaded memory leaves its file unchanged: otherwise two readers of one file would affect each
    other.
    """
    model, folder = memory
    (file,) = folder.glob("*.safetensors")
    before = file.read_bytes()
    first = TitansCache.from_pretrained(folder, model)
    read(model, IDS, cache=first)
    read(model, IDS[:, :1], cache=first)
    assert file.read_bytes() == before
    assert_equal(TitansCache.from_pretrained(folder, model), read(model, IDS)[1])


def changed(model: PreTrainedModel, name: str) -> PreTrainedModel:
    other = copy.deepcopy(model)
    with torch.no_grad():
        parameter = other.get_parameter(name)
        parameter.view(-1)[-1] += 1e-6
    return other


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda _: make_model("mal"), "its variant is 'mag', not 'mal'"),
        (lambda _: make_model("mag", memory_max_lr=0.125), "its memory_max_lr is 0.25, not 0.125"),
        (lambda _: make_model("mag", rope_parameters={"rope_theta": 5.0}), "its rope_parameters is {'"),
        (lambda _: make_model("mag", sliding_window=8), "its sliding_window is 12, not 8"),
        (lambda model: copy.deepcopy(model).float(), "its dtype is 'float64', not 'float32'"),
        (lambda model: changed(model, "model.layers.1.mixer.memory.k_proj.weight"), "its weights is '"),
        (lambda model: changed(model, "model.embed_tokens.weight"), "its weights is '"),
    ],
)
def test_the_memory_of_another_model_is_refused(make, message, memory):
    """A memory of a model with other weights, dtype or settings raises an error that names the difference: otherwise it
    would answer wrongly without notice.
    """
    model, folder = memory
    with pytest.raises(ValueError, match="is the memory of another model") as error:
        TitansCache.from_pretrained(folder, make(model))
    assert message in str(error.value)


def test_what_does_not_shape_a_memory_may_differ(memory):
    """Another output layer, attention kernel or training setting may load a memory: otherwise it would be lost with
    them.
    """
    model, folder = memory
    TitansCache.from_pretrained(folder, changed(model, "lm_head.weight"))
    TitansCache.from_pretrained(folder, model.model)
    TitansCache.from_pretrained(folder, make_model("mag", initializer_range=0.5, attention="eager"))


def describe(folder: Path, *lost: str, **changes) -> None:
    path = folder / "memory.json"
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: x for name, x in found.items() if name not in lost}))


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


@pytest.mark.parametrize(
    "damage,message",
    [
        (cut, r"is damaged: it has \d+ bytes, not the \d+ that were saved"),
        (alter, "was altered: its sha256"),
        (remove, "names the file 'memory-.*', which is not there"),
        (half_a_description, "memory.json is damaged: it does not say what format it has"),
        (lambda folder: describe(folder, format_version=2), "has version 2 of its format, but .* up to 1: update it"),
        (lambda folder: describe(folder, format="other"), "has the format 'other', version 1, not 'titans-memory'"),
        (lambda folder: describe(folder, format_version=None), "has the format 'titans-memory', version None"),
        (lambda folder: describe(folder, file="../memory.json"), "names the file '../memory.json'"),
        (
            lambda folder: (folder / "memory.json").write_text('{"format": "titans-memory", "format_version": 1}'),
            "lacks",
        ),
    ],
)
def test_what_is_not_the_saved_file_is_refused(damage, message, memory):
    """A damaged, altered, missing or newer file raises an error: otherwise a damaged memory would answer as if it were
    whole.
    """
    model, folder = memory
    damage(folder)
    with pytest.raises(ValueError, match=message):
        TitansCache.from_pretrained(folder, model)


def test_a_folder_without_a_memory(tmp_path):
    """A folder without memory.json raises FileNotFoundError: otherwise the error would not name the folder."""
    with pytest.raises(FileNotFoundError, match=r"is not a memory folder: it holds no memory.json"):
        TitansCache.from_pretrained(tmp_path, shared_model("mag"))


def test_the_cache_of_another_model_is_not_saved(tmp_path):
    """Saving a cache for another model raises an error and writes nothing: otherwise the folder would name the wrong
    model.
    """
    cache = read(shared_model("mag"), IDS)[1]
    with pytest.raises(ValueError, match="its variant is mag, not mal"):
        cache.save_pretrained(tmp_path, shared_model("mal"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", ["save_file", "_checksum", "_replace", "_replace of the description"])
def test_an_interrupted_save_leaves_the_memory_before(step, memory, monkeypatch):
    """A save interrupted at any step leaves the earlier memory, and the next removes its files: otherwise stopping a
    long reading could lose everything.
    """
    model, folder = memory
    before = TitansCache.from_pretrained(folder, model)
    name, *later = step.split(" of ")
    works, calls = getattr(cache_files, name), []

    def interrupted(*args):
        calls.append(args)
        if later and len(calls) == 1:
            return works(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_files, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(model, IDS[:, ::2])[1].save_pretrained(folder, model)
    monkeypatch.undo()
    assert_equal(TitansCache.from_pretrained(folder, model), before)
    after = saved(read(model, IDS[:, ::2])[1], model, folder)
    assert after.get_seq_length() == 30
    assert len(names(folder)) == 2  # nothing is left of the interrupted one


def test_a_moved_folder_is_the_same_memory(memory, tmp_path_factory):
    """A copied folder loads as the same memory: otherwise memories could not be moved between machines."""
    model, folder = memory
    other = tmp_path_factory.mktemp("other") / "moved"
    shutil.copytree(folder, other)
    assert_equal(TitansCache.from_pretrained(other, model), TitansCache.from_pretrained(folder, model))


def test_push_to_hub(monkeypatch, memory):
    """push_to_hub() uploads a loadable memory to a private repository: otherwise a user's text could become public."""
    model, folder = memory
    calls = {}

    def create_repo(api, name, **kwargs):
        calls["create"] = kwargs
        return SimpleNamespace(repo_id=f"someone/{name}")

    def upload_folder(api, *, repo_id, folder_path, **kwargs):
        shutil.copytree(folder_path, folder / "pushed")
        calls["upload"] = (repo_id, kwargs)

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", create_repo)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload_folder)
    cache = read(model, IDS)[1]
    cache.push_to_hub("my-memory", model, commit_message="read")
    assert calls["create"]["private"] is True
    assert calls["upload"] == ("someone/my-memory", {"commit_message": "read"})
    assert_equal(TitansCache.from_pretrained(folder / "pushed", model), cache)


def test_a_sharded_model_is_refused():
    """A model whose weights are not all in this process raises an error: otherwise its hash would be that of a part."""
    with pytest.raises(ValueError, match="neither sharded nor offloaded"):
        cache_files.fingerprint(make_model("mag").to("meta"))


def test_about_may_not_be_anything(tmp_path):
    """An `about` that is not JSON raises TypeError and keeps the earlier memory: otherwise a failed save would
    lose it.
    """
    model = shared_model("mag")
    cache = read(model, IDS)[1]
    cache.save_pretrained(tmp_path, model)
    cache.about = {"when": object()}
    with pytest.raises(TypeError, match="not JSON serializable"):
        cache.save_pretrained(tmp_path, model)
    assert_same(TitansCache.from_pretrained(tmp_path, model).get_seq_length(), 60)
