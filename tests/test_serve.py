"""`python -m titans_hf serve` and `chat`, as a user runs them: over HTTP, on this machine."""

import json
import os
import shutil
import socket
import string
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from common import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from titans_hf_scripts.training.tokenizer import byte_tokenizer

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "titans_hf"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
MESSAGES = [{"role": "user", "content": "What did I say?"}]
PROMPT = "user: What did I say?\nassistant: "
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Random, but of letters, so that any piece of what it says is text."""
    folder = tmp_path_factory.mktemp("served") / "model"
    model = make_model("mac", dtype=torch.float32, vocab_size=320, eos_token_id=1, pad_token_id=0)
    tokenizer = byte_tokenizer()
    letters = set(tokenizer.convert_tokens_to_ids(list(string.ascii_letters)))
    model.generation_config.suppress_tokens = [token for token in range(320) if token not in letters]
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint):
    """What generate() says, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokens = model.generate(**prompt, max_new_tokens=NUM_TOKENS, do_sample=False)[0, prompt.input_ids.shape[1] :]
    text = tokenizer.decode(tokens)
    assert len(set(text)) > 3 and text.isalpha() and len(text) == NUM_TOKENS
    return text


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """The address of a running server, which has a repository in its cache as well."""
    home = tmp_path_factory.mktemp("home")
    cached = home / "hub" / "models--someone--titans"
    shutil.copytree(checkpoint, cached / "snapshots" / ("a" * 40))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [*COMMAND, "serve", str(checkpoint), "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
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
    """The response to a request for a greedy completion, open."""
    body = {"model": str(checkpoint), "temperature": 0, "max_tokens": NUM_TOKENS, **more}
    headers = {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60)


def test_a_completion_is_what_generate_says(server, checkpoint, expected):
    """Else the server does not know the model, or feeds it something else."""
    with complete(f"{server}/v1/chat/completions", checkpoint, messages=MESSAGES) as response:
        answer = json.load(response)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected}
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS


def test_a_streamed_completion_is_what_generate_says(server, checkpoint, expected):
    """Else a streamer and the cache do not get on: tokens come late, twice or never."""
    with complete(f"{server}/v1/chat/completions", checkpoint, messages=MESSAGES, stream=True) as response:
        lines = [line.decode() for line in response]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == expected
    assert sum(map(bool, pieces)) > NUM_TOKENS // 4


def test_text_is_continued_without_a_template(server, checkpoint, expected):
    """Else a model that never saw a chat cannot be served."""
    with complete(f"{server}/v1/completions", checkpoint, prompt=PROMPT) as response:
        assert json.load(response)["choices"][0]["text"] == expected


def test_openai_client(server, checkpoint, expected):
    """Else the commonest client of all cannot talk to it."""
    client = pytest.importorskip("openai").OpenAI(base_url=f"{server}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=str(checkpoint), messages=MESSAGES, temperature=0, max_tokens=NUM_TOKENS
    )
    assert answer.choices[0].message.content == expected


def test_downloaded_models_are_listed(server):
    """Else an interface that offers the models there are does not offer Titans."""
    with urllib.request.urlopen(f"{server}/v1/models", timeout=60) as response:
        listed = json.load(response)["data"]
    assert [model["id"] for model in listed] == ["someone/titans"]


def test_chat(server, checkpoint, expected):
    """Else the chat interface stops at what the server sends. The empty line: no, do not go on after the limit."""
    flags = [f"max_new_tokens={NUM_TOKENS}", "do_sample=False"]
    chat = subprocess.run(
        [*COMMAND, "chat", str(checkpoint), f"{server}/v1", *flags, "--user", "me"],
        input=f"{MESSAGES[0]['content']}\n\n!exit\n",
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert chat.returncode == 0, chat.stderr
    assert expected in chat.stdout.split()


def test_continuous_batching_is_refused(checkpoint):
    """Else a server starts of which every answer is an error."""
    command = [*COMMAND, "serve", str(checkpoint), "--continuous-batching"]
    served = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert served.returncode == 2
    assert "--continuous-batching: Continuous batching pages keys and values" in served.stderr
