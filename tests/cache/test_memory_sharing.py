"""Several processes save to and load from one memory folder, which holds one complete memory at any time."""

import multiprocessing
from pathlib import Path

import torch
from common import make_ids, read, shared_model
from memory_folders import assert_equal, names

from titans_hf import TitansCache, cache_files

PROCESSES = multiprocessing.get_context("forkserver")


def memory_of(number: int) -> TitansCache:
    """The memory that process `number` saves."""
    return read(shared_model("mag"), make_ids(1, 20, seed=number))[1]


def save_in_turn(number: int, folders: list[Path], barrier, errors) -> None:
    """Process: saves its memory into each folder at the same moment as the other processes."""
    torch.set_num_threads(1)
    for folder in folders:
        cache = memory_of(number)  # a new one replaces what is there, whoever has saved it
        barrier.wait(60)
        try:
            cache.save_pretrained(folder, shared_model("mag"))
        except Exception as error:
            errors.put(repr(error))


def test_concurrent_saves(tmp_path):
    """Of two simultaneous saves one complete memory remains."""
    folders = [tmp_path / str(i) for i in range(10)]
    barrier, errors = PROCESSES.Barrier(2), PROCESSES.Queue()
    savers = [PROCESSES.Process(target=save_in_turn, args=(i, folders, barrier, errors)) for i in range(2)]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join(240)
        assert saver.exitcode == 0
    assert errors.empty(), errors.get()
    memories = [memory_of(i) for i in range(2)]
    for folder in folders:
        cache = TitansCache.from_pretrained(folder, shared_model("mag"))
        same = [torch.equal(cache.layers[0].state.conv_state, x.layers[0].state.conv_state) for x in memories]
        assert_equal(cache, memories[same.index(True)])
        assert len(names(folder)) == 2


def test_a_save_between_description_and_tensors(tmp_path, monkeypatch):
    """Loading reads memory.json again if the file it names was replaced meanwhile."""
    model, works, saves = shared_model("mag"), cache_files.read_description, []
    memory_of(0).save_pretrained(tmp_path, model)

    def slow(folder):
        description = works(folder)
        if not saves:
            saves.append(1)
            memory_of(1).save_pretrained(folder, model)
        return description

    monkeypatch.setattr(cache_files, "read_description", slow)
    assert_equal(TitansCache.from_pretrained(tmp_path, model), memory_of(1))


def test_what_killed_saves_left_is_removed(tmp_path):
    """A save removes the files of killed saves and leaves the user's own."""
    strangers = {"notes.txt", "memory-1.safetensors", "model.safetensors"}
    (tmp_path / f"memory-{'0' * 32}.tmp").mkdir()
    leftovers = (f"memory-{'0' * 32}.tmp/.tmp0", f"memory-{'0' * 16}.safetensors")
    for name in (*strangers, *leftovers):
        (tmp_path / name).write_text("text")
    memory_of(0).save_pretrained(tmp_path, shared_model("mag"))
    (file,) = tmp_path.glob("memory-" + "[0-9a-f]" * 16 + ".safetensors")
    assert names(tmp_path) == {"memory.json", file.name} | strangers
