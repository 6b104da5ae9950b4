"""Runs a server of the command `titans-hf serve`, and asks it."""

import json
import os
import socket
import string
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import torch
from common import make_model

from titans_hf.cli.training.tokenizer import byte_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
COMMAND = [sys.executable, "-m", "titans_hf"]
NUM_TOKENS = 24


def save_letters(folder, kind: str, template: str = TEMPLATE) -> None:
    """Saves a random Titans of a variant that generates letters alone, so that any part of its answer is text."""
    tokenizer = byte_tokenizer()
    model = make_model(kind, dtype=torch.float32, vocab_size=320, eos_token_id=1, pad_token_id=0)
    letters = set(tokenizer.convert_tokens_to_ids(list(string.ascii_letters)))
    model.generation_config.suppress_tokens = [token for token in range(320) if token not in letters]
    tokenizer.chat_template = template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def serving(checkpoint, home, *options):
    """Runs `titans-hf serve` in `home` with caches below it; yields its address and the process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "serve", checkpoint, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port), *options]
    url = f"http://127.0.0.1:{port}"
    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | own, cwd=home, stdout=log, stderr=subprocess.STDOUT)
    try:
        while not is_answering(url):
            assert process.poll() is None, (home / "log").read_text()[-4000:]
            time.sleep(0.1)
        yield url, process
    finally:
        process.terminate()
        process.wait()


def is_answering(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health").status == 200
    except OSError:
        return False


def complete(url: str, checkpoint, timeout: float = 60, **more):
    """Returns the open response to a request for a greedy completion."""
    body = {"model": str(checkpoint), "temperature": 0, "max_tokens": NUM_TOKENS, **more}
    data = json.dumps({name: x for name, x in body.items() if x is not None}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=timeout)
