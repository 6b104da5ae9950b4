"""Runs a server of the command `titans-hf serve`, and asks it."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

from clean_environment import as_installed

COMMAND = [sys.executable, "-m", "titans_hf"]
NUM_TOKENS = 24


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(checkpoint, home, *options, command=None):
    """Runs `command` serve, by default that of this checkout, in `home` with caches below it; yields its address."""
    port, start = free_port(), COMMAND if command is None else [command]
    own = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [*start, "serve", checkpoint, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port), *options],
            env=(os.environ if command is None else as_installed()) | own,
            cwd=home,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(url, process, home / "log")
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str, process: subprocess.Popen, log) -> None:
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(log.read_text()[-4000:])


def complete(url: str, checkpoint, **more):
    """Returns the open response to a request for a greedy completion."""
    body = {"model": str(checkpoint), "temperature": 0, "max_tokens": NUM_TOKENS, **more}
    headers = {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60)
