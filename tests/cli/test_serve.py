"""`python -m titans_hf serve` and `chat` as users run them: over HTTP, on this machine."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from served import NUM_TOKENS, complete, load_letters, save_letters, serving

from titans_hf import MemoryCache, TitansCache

pytestmark = pytest.mark.slow
SYSTEM = {"role": "system", "content": "Be brief."}
MESSAGES = [{"role": "user", "content": "What did I say?"}]
PROMPT = "user: What did I say?\nassistant: "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "model"
    save_letters(folder, "mac")
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint):
    """The greedy answer of generate()."""
    model, tokenizer = load_letters(checkpoint)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=NUM_TOKENS, do_sample=False)[0, prompt.input_ids.shape[1] :]
    text = tokenizer.decode(tokens)
    assert len(set(text)) > 3 and text.isalpha() and len(text) == NUM_TOKENS
    return text


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """The address of a running server."""
    with serving(checkpoint, tmp_path_factory.mktemp("home")) as (url, _):
        yield url


def test_a_completion_is_what_generate_says(server, checkpoint, expected):
    """A completion, whole or streamed, equals generate(); one model is listed."""
    with complete(f"{server}/v1/{CHAT}", checkpoint, messages=MESSAGES) as response:
        answer = json.load(response)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected}
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    pieces = streamed(f"{server}/v1/{CHAT}", checkpoint)
    assert "".join(pieces) == expected and sum(map(bool, pieces)) > NUM_TOKENS // 4
    with urllib.request.urlopen(f"{server}/v1/models", timeout=60) as response:
        listed = json.load(response)["data"]
    assert [(model["id"], model["object"]) for model in listed] == [(str(checkpoint), "model")]


CHAT = "chat/completions"


def settings_refused(*cases: tuple[str, str]) -> list[tuple]:
    return [("completions", {"prompt": "a", "generation_config": x}, 422, f"`generation_config.{y}") for x, y in cases]


BAD_REQUESTS = [
    ("completions", {"prompt": ""}, 400, "the prompt has no token"),
    (CHAT, {"messages": []}, 422, "`messages` is []"),
    *settings_refused(
        ('{"num_return_sequences": 2}', "num_return_sequences` is 2"),
        ('{"forced_eos_token_id": 320}', "forced_eos_token_id.0` is 320: the model has 320 tokens"),
        ('{"exponential_decay_length_penalty": [1, "a"]}', 'exponential_decay_length_penalty.1` is "a"'),
        ('{"is_assistant": true}', "is_assistant` is true: it is not served"),
        ('{"guidance_scale": 2.0}', "guidance_scale` is 2.0: it is not served"),
        ('{"top_k": "5"}', 'top_k` is "5"'),
    ),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"320": 1}}, 422, "`logit_bias.320"),
    ("completions", {"prompt": "a", "stream": "false"}, 422, '`stream` is "false"'),
    ("completions", {"prompt": "a", "suffix": "b"}, 422, '`suffix` is "b"'),
    (CHAT, {"messages": [{"content": "a"}]}, 422, "`messages.0.role` is missing"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "`messages.0.content` is missing"),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "`tools` is not pr",
    ),
    (CHAT, {}, 400, "the request lacks 'messages'"),
    ("completions", {"prompt": "a", "max_tokens": 10**9}, 400, "`max_tokens` is 1000000000, but may be from 1 to 4096"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 422, "`max_tokens` is 0"),
    ("completions", {"prompt": "a", "max_tokens": "few"}, 422, '`max_tokens` is "few"'),
    ("completions", {"prompt": "\ud800"}, 422, "the request is not JSON"),
    ("completions", {"prompt": "a", "temperature": -1}, 422, "`temperature` is -1"),
    ("completions", {"prompt": "a", "n": 2}, 422, "`n` is 2"),
    (CHAT, {"messages": MESSAGES, "logprobs": True}, 422, "`logprobs` is true"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}, 422, "`response_format` is"),
    ("completions", {"prompt": "a", "temperature": 1e-300}, 400, "`temperature` is 1e-300, but may be from 0.001"),
    ("completions", {"prompt": "a", "stop": "b" * 20_000}, 400, "letters of all stop strings` is 20000"),
    (CHAT, {"messages": MESSAGES, "stop": ["b"] * 300}, 400, "number of stop strings` is 300"),
    ("completions", {"prompt": "a", "generation_config": '{"num_beams": 17}'}, 400, "`num_beams` is 17, but"),
    ("completions", {"prompt": "a", "generation_config": '{"num_beams": 0}'}, 400, "`num_beams` is 0, but"),
    ("responses", {"input": "a", "previous_response_id": "x"}, 422, "`previous_response_id` is"),
    (
        "responses",
        {"input": [SYSTEM], "instructions": "Be kind.", "max_tokens": None},
        400,
        "`input.0.content` is not printed",
    ),
]


def test_bad_requests(server, checkpoint, subtests):
    """What cannot be answered, or is not served, gets status 400 or 422 and a line that names what is wrong."""
    for endpoint, body, status, line in BAD_REQUESTS:
        with subtests.test(line), pytest.raises(urllib.error.HTTPError) as error:
            complete(f"{server}/v1/{endpoint}", checkpoint, **body)
        answer = json.load(error.value)
        assert error.value.code == status and line in answer["detail"] and "\n" not in answer["detail"]
        assert answer["error"]["message"] == answer["detail"]  # which OpenAI's client shows
    neutral = {"n": 1, "logprobs": False, "response_format": {"type": "text"}, "presence_penalty": 0}
    complete(f"{server}/v1/{CHAT}", checkpoint, messages=MESSAGES, **neutral).close()


def test_the_stop_string_is_left_out(server, checkpoint, expected):
    """An answer ends before the stop string, streamed or not, also where the string is of several tokens."""
    stop, url = expected[5:8], f"{server}/v1/{CHAT}"
    before = expected[: expected.find(stop)]
    with complete(url, checkpoint, messages=MESSAGES, stop=["never", stop]) as response:
        choice = json.load(response)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (before, "stop")
    assert "".join(streamed(url, checkpoint, stop=stop)) == before
    assert "".join(streamed(url, checkpoint, stop=expected[-1] + "never")) == expected


def streamed(url, checkpoint, **more) -> list[str]:
    with complete(url, checkpoint, messages=MESSAGES, stream=True, **more) as response:
        lines = [line.decode() for line in response]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [event["choices"][0]["delta"].get("content") or "" for event in events]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_endless_requests_end(end, checkpoint, tmp_path):
    """A request whose client has gone ends, so that others are answered; a signal ends the server while one runs."""
    body = {"max_tokens": 10**9, "prompt": PROMPT}
    with serving(checkpoint, tmp_path, "--max_tokens", str(10**9)) as (url, process):
        with pytest.raises(TimeoutError):
            complete(f"{url}/v1/completions", checkpoint, timeout=1, **body)
        complete(f"{url}/v1/completions", checkpoint, prompt=PROMPT).close()
        with pytest.raises(TimeoutError):
            complete(f"{url}/v1/completions", checkpoint, timeout=1, **body)
        started = complete(f"{url}/v1/completions", checkpoint, stream=True, **body)
        process.send_signal(end)
        assert process.wait(30) == -end
        started.close()


def test_a_chat_without_a_template(checkpoint, tmp_path):
    """A chat with a model that has no chat template gets error 400 that names the template."""
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with serving(tmp_path / "model", tmp_path) as (url, _):
        for endpoint, body in ((CHAT, {"messages": MESSAGES}), ("responses", {"input": PROMPT})):
            with pytest.raises(urllib.error.HTTPError) as error:
                complete(f"{url}/v1/{endpoint}", tmp_path / "model", max_tokens=None, **body)
            assert error.value.code == 400 and "chat_template is not set" in json.load(error.value)["detail"]


def test_chat(server, checkpoint, expected):
    """The chat of transformers prints the answer of generate()."""
    flags = [f"max_new_tokens={NUM_TOKENS}", "do_sample=False", "--user", "me"]
    command = [sys.executable, "-m", "transformers.cli.transformers", "chat", checkpoint, f"{server}/v1", *flags]
    options = dict(input=f"{MESSAGES[0]['content']}\n\n!exit\n", capture_output=True, text=True, timeout=120)
    chat = subprocess.run(command, env=os.environ | {"COLUMNS": "200"}, **options)
    assert expected in chat.stdout.split(), chat.stderr


@pytest.mark.parametrize("kind,number", [("mac", 20), ("remember", 4)])
def test_parallel_requests_start_from_a_memory(kind, number, tmp_path):
    """Each of many parallel requests, streamed or not, is answered from the saved memory."""
    checkpoint, memory = tmp_path / "model", tmp_path / "memory"
    save_letters(checkpoint, kind)
    model, tokenizer = load_letters(checkpoint)
    cache = MemoryCache(model) if kind == "remember" else TitansCache(model.config)
    with torch.no_grad():
        model(**tokenizer("The captain's name was Ahab. " * 9, return_tensors="pt"), cache=cache)
    cache.save_pretrained(memory, model)
    cache.start_prompt()
    saved = {path.name: path.read_bytes() for path in memory.iterdir()}

    def generated(prompt: str, **start) -> str:
        ids = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**ids, max_new_tokens=NUM_TOKENS, do_sample=False, **start)
        return tokenizer.decode(tokens[0, ids.input_ids.shape[1] :])

    prompts = [f"{i} times I asked, and" for i in range(number)]
    without = [generated(prompt) for prompt in prompts]
    expected = [generated(prompt, cache=copy.copy(cache)) for prompt in prompts]
    assert sum(a != b for a, b in zip(expected, without, strict=True)) > number / 2
    assert len(set(expected)) > number / 2

    def answer(prompt: str) -> str:
        with complete(f"{url}/v1/completions", checkpoint, prompt=prompt) as response:
            return json.load(response)["choices"][0]["text"]

    with serving(checkpoint, tmp_path, "--memory", str(memory)) as (url, _), ThreadPoolExecutor(number) as users:
        for _ in range(2):
            assert list(users.map(answer, prompts)) == expected
    assert {path.name: path.read_bytes() for path in memory.iterdir()} == saved
