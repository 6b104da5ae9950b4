"""Tokenizing training data: the memory needed does not depend on the number of documents."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[1] / "helpers" / "tokenizing_worker.py"
BOUND = 20  # megabytes; 0 were measured, and 246 of 30 more where batches were of so many documents


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells a process's memory")
def test_memory_does_not_grow_with_the_text(tmp_path):
    """16 MB of text are tokenized in as much memory as 4 MB, and once."""
    own = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def tokenize(megabytes: int) -> tuple[dict[str, int], set[Path]]:
        command = [sys.executable, str(WORKER), str(megabytes), str(tmp_path / f"{megabytes}")]
        done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=True, timeout=120)
        return json.loads(done.stdout.splitlines()[-1]), set((tmp_path / "cache").rglob("*.arrow"))

    (small, _), (large, files), (again, files_again) = tokenize(4), tokenize(16), tokenize(16)
    assert large["blocks"] == again["blocks"] > 3.9 * small["blocks"]
    assert large["peak"] < small["peak"] + BOUND
    assert files == files_again
