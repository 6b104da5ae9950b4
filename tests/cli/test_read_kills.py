"""titans-hf read, killed at any moment and repeated, reads every text once, in order."""

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from byte_model import save_byte_model
from memory_folders import assert_equal, names

from titans_hf import TitansCache
from titans_hf.cache_files import read_description

NUM_KILLS, MAX_SECONDS = 30, 240


@pytest.fixture
def run():
    """A function that runs titans-hf read to its end (True), or kills it after so many seconds (False)."""
    worker = subprocess.Popen(
        [sys.executable, Path(__file__).parents[1] / "helpers" / "read_worker.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )

    def run(command: list[str], seconds: float | None = None) -> bool:
        worker.stdin.write(f"{json.dumps(command)}\n".encode())
        process = int(worker.stdout.readline())
        (ended, _, _) = select.select([worker.stdout], [], [], 100 if seconds is None else seconds)
        if not ended:
            os.kill(process, signal.SIGKILL)
        code = int(worker.stdout.readline())
        assert code == 0 or (code == -signal.SIGKILL and seconds is not None), code
        return code == 0

    yield run
    worker.kill()
    worker.wait()


def num_seen(memory: Path) -> int:
    """Number of tokens that the memory has read; 0 before the first save."""
    return read_description(memory)["tokens_seen"][0] if (memory / "memory.json").exists() else 0


TEXTS = {"first": " ".join(map(str, range(100))), "second": " ".join(map(str, range(900, 1500)))}


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("append", [False, True])
def test_thirty_kills(append, run, tmp_path):
    """A reading killed at random moments and repeated gives bit for bit the memory of an uninterrupted one, and no
    other files.
    """
    start = time.monotonic()
    model = save_byte_model(tmp_path / "model", "mag")
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text)

    def command(text: str, memory: str, *more: str) -> list[str]:
        paths = [str(tmp_path / x) for x in ("model", f"{text}.txt", memory)]
        return [*paths[:2], "--memory", paths[2], "--save_seconds=0", "--piece=32", *more]

    def prepare(memory: str) -> list[str]:
        """Returns the command that is killed, and copies the memory that it continues."""
        if not append:
            return command("second", memory)
        shutil.copytree(tmp_path / "before", tmp_path / memory)
        return command("second", memory, "--append")

    assert run(command("first", "before"))
    began = time.monotonic()
    assert run(prepare("whole"))
    duration, chance = time.monotonic() - began, random.Random(0)
    num_kills, num_rounds, places = 0, 0, set()
    while num_kills < NUM_KILLS:
        num_rounds += 1
        folder, again = tmp_path / f"{num_rounds}", prepare(f"{num_rounds}")
        while not run(again, chance.uniform(0.05, 0.6) * duration if num_kills < NUM_KILLS else None):
            num_kills += 1
            if num_seen(folder) in places:  # nothing was saved: the machine is busier than at the measurement
                duration *= 1.2
            places.add(num_seen(folder))
            assert time.monotonic() < start + MAX_SECONDS, f"{num_kills} kills"
        caches = [TitansCache.from_pretrained(x, model) for x in (folder, tmp_path / "whole")]
        assert_equal(*caches)
        assert len(names(folder)) == 2
    assert len(places) > NUM_KILLS // 4, "the kills hit something else than the reading"
    print(f"{num_kills} kills, {num_rounds} rounds, {len(places)} places, {time.monotonic() - start:.0f} s")
