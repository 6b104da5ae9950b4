"""`titans-hf serve` continues a chat from a snapshot: it answers as if it had read everything from the beginning."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import NUM_TOKENS, complete, load_letters, save_letters, serving

pytestmark = pytest.mark.slow
FIRST = "A story: " + "the captain sailed on and on over the sea. " * 3


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    for kind in ("mag", "remember"):
        save_letters(folder / kind, kind)
    return folder


@pytest.fixture
def checkpoint(checkpoints):
    return checkpoints / "mag"


def generated(checkpoint, messages) -> str:
    """Returns what generate() answers to messages, read from the beginning."""
    model, tokenizer = load_letters(checkpoint)
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompt = tokenizer.apply_chat_template(messages, **options)
    tokens = model.generate(**prompt, max_new_tokens=NUM_TOKENS, do_sample=False)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])


def answer(url, checkpoint, messages, **more) -> str:
    with complete(f"{url}/v1/chat/completions", checkpoint, messages=messages, **more) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def read_before(home) -> list[tuple[int, int]]:
    """Returns, for each request, how many tokens of its prompt a snapshot had read, and how many there are."""
    found = re.findall(r"\[Snapshot\] (\d+) of (\d+) tokens", (home / "log").read_text())
    return [(int(a), int(b)) for a, b in found]


def user(text) -> dict:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("kind,number,turns", [("mag", 8, 3), ("remember", 2, 2)])
def test_chats_side_by_side(kind, number, turns, checkpoints, tmp_path):
    """Chats asked at once get the answers of generate(), and a later turn reads only what is new in it."""
    checkpoint = checkpoints / kind
    chats = [[user(letter * 40 + FIRST + letter * 9)] for letter in "abcdefgh"[:number]]
    with serving(checkpoint, tmp_path, "--snapshots", "32") as (url, _), ThreadPoolExecutor(number) as users:
        for turn in range(turns):
            answers = list(users.map(lambda messages: answer(url, checkpoint, messages), chats))
            assert answers == [generated(checkpoint, messages) for messages in chats]
            assert len(set(answers)) == number
            for messages, text in zip(chats, answers, strict=True):
                messages += [{"role": "assistant", "content": text}, user(f"And then? {turn}")]
        before = read_before(tmp_path)
    assert len(before) == turns * number and all(0 < total - known < 100 for known, total in before[number:])


def test_other_histories_and_other_users(checkpoint, tmp_path):
    """A changed history is read from where it parts from a known one; nothing is shared between users with keys."""
    start = [user(FIRST), {"role": "assistant", "content": "Ay."}]
    with serving(checkpoint, tmp_path) as (url, _):
        for last in ("And then?", "Who was he?", "What did he see?"):
            messages = [*start, user(last * 9)]
            assert answer(url, checkpoint, messages) == generated(checkpoint, messages)
        shared = len(FIRST) + len("user: \nassistant: Ay.\nuser: ")
        # The second request finds no snapshot where it parts from the first, and leaves one for the third.
        assert [known for known, _ in read_before(tmp_path)] == [0, 0, shared]
        for name in ("ann", "bob", "ann"):
            assert answer(url, checkpoint, [user(FIRST)], user=name) == generated(checkpoint, [user(FIRST)])
        assert [known > 0 for known, _ in read_before(tmp_path)[3:]] == [False, False, True]
