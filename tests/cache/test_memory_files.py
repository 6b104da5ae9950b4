"""A memory saved and loaded equals the original, and an interrupted save leaves the one before."""

import json
import signal
from pathlib import Path

import pytest
import torch
from common import VARIANTS, make_model, read, shared_model
from covering import covering
from memory_folders import IDS, assert_equal, names, saved

from titans_hf import TitansCache, cache_files


@covering(1, {"variant": VARIANTS, "num_read": [1, 13, 40, 55]})
def test_going_on_from_a_file_equals_never_having_stopped(variant, num_read, tmp_path):
    """Reading on from a saved memory gives bit-identical logits, from any place of a chunk, segment and window."""
    model = shared_model(variant)
    whole = read(model, IDS, [num_read, 60 - num_read])[0]
    cache = read(model, IDS[:, :num_read])[1]
    cache.about = {"read": "some ids", "pages": [1, 2]}
    loaded = saved(cache, model, tmp_path)
    assert_equal(loaded, cache)
    assert json.loads((tmp_path / "memory.json").read_text())["tokens_seen"] == [num_read] * 2
    rest, after = read(model, IDS[:, num_read:], cache=loaded)
    assert torch.equal(rest, whole[:, num_read:])
    assert after.get_seq_length() == 60


def test_what_a_cache_can_be(tmp_path):
    """A cache that is empty, has a reset row, recorded columns or columns to read again is the same after loading."""
    model = make_model("mac")
    cache = TitansCache(model.config)
    assert_equal(saved(cache, model, tmp_path), cache)
    read(model, IDS[:, :13], cache=cache)
    cache.reset(torch.tensor([True, False]))
    assert_equal(saved(cache, model, tmp_path), cache)
    cache.activate_past_recording()
    for piece, learns in zip(IDS[:, 13:19].split(3, 1), (True, False), strict=True):
        model.set_memory_learning(learns)
        read(model, piece, cache=cache)
    assert_equal(saved(cache, model, tmp_path), cache)
    cache.crop(-2)
    loaded = saved(cache, model, tmp_path)
    assert_equal(loaded, cache)
    for x in (cache, loaded):
        x.crop(0)
    assert torch.equal(read(model, IDS[:, 17:], cache=loaded)[0], read(model, IDS[:, 17:], cache=cache)[0])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells what is mapped on Linux alone")
def test_a_file_is_mapped(memory):
    """Loading maps the file instead of copying it."""
    model, folder = memory
    (file,) = folder.glob("*.safetensors")
    assert str(file) not in Path("/proc/self/maps").read_text()
    cache = TitansCache.from_pretrained(folder, model)
    assert str(file) in Path("/proc/self/maps").read_text()
    file.unlink()  # what is mapped stays
    assert torch.isfinite(read(model, IDS, cache=cache)[0]).all()


@pytest.mark.parametrize("step", ["save_file", "_checksum", "_replace", "_replace of the description"])
def test_an_interrupted_save_leaves_the_memory_before(step, memory, monkeypatch):
    """A save interrupted at any step leaves the earlier memory, and the next removes its files."""
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


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="limits the size of files on Unix alone")
def test_a_full_disk_leaves_the_memory_before(memory):
    """A save that the disk has no room for raises OSError, which names the folder, and keeps the earlier memory."""
    import resource

    model, folder = memory
    before, limits = names(folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        with pytest.raises(OSError, match=f"the memory in {folder} cannot be saved: .*File too large"):
            read(model, IDS[:, ::2])[1].save_pretrained(folder, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert names(folder) == before
    assert TitansCache.from_pretrained(folder, model).get_seq_length() == 60


def test_what_another_has_saved_is_not_lost(memory):
    """A save over what another process has saved since is kept beside it, and an error names the place."""
    model, folder = memory
    ours, theirs = (TitansCache.from_pretrained(folder, model) for _ in range(2))
    for cache, ids in ((ours, IDS[:, :7]), (theirs, IDS[:, 7:20])):
        read(model, ids, cache=cache)
    theirs.save_pretrained(folder, model)
    with pytest.raises(ValueError, match=f"cannot be saved: another process .* kept in {folder}-") as error:
        ours.save_pretrained(folder, model)
    assert_equal(TitansCache.from_pretrained(folder, model), theirs)
    assert_equal(TitansCache.from_pretrained(str(error.value).rpartition(" ")[2], model), ours)
    read(model, IDS[:, :5], cache=theirs)
    theirs.save_pretrained(folder, model)  # its own save is no other process's
    assert TitansCache.from_pretrained(folder, model).get_seq_length() == 78
