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
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from titans_hf import remember
from titans_hf.cli.training.tokenizer import byte_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
COMMAND = [sys.executable, "-m", "titans_hf"]
NUM_TOKENS = 24


def save_letters(folder, kind: str, template: str = TEMPLATE) -> None:
    """Saves a random model that generates letters alone, so that any part of its answer is text: a Titans of the
    variant `kind`, or for "remember" a Llama.
    """
    tokenizer = byte_tokenizer()
    sizes = {"vocab_size": 320, "eos_token_id": 1, "pad_token_id": 0}
    if kind == "remember":
        torch.manual_seed(0)
        shapes = {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.6}
        config = LlamaConfig(hidden_size=32, intermediate_size=48, bos_token_id=None, **shapes, **sizes)
        model = LlamaForCausalLM(config)
    else:
        model = make_model(kind, dtype=torch.float32, **sizes)
    letters = set(tokenizer.convert_tokens_to_ids(list(string.ascii_letters)))
    model.generation_config.suppress_tokens = [token for token in range(320) if token not in letters]
    tokenizer.chat_template = template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_letters(folder):
    """Returns the model and the tokenizer of `save_letters`, a Llama with the memory that `--window 32` gives it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    if model.config.model_type == "llama":
        remember(model, window=32)
    return model, AutoTokenizer.from_pretrained(folder)


@contextmanager
def serving(checkpoint, home, *options):
    """Runs `titans-hf serve` in `home` with caches below it; yields its address and the process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "serve", checkpoint, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--window", "32", *options]
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
