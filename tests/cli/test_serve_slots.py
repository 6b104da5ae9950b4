"""A served model without HTTP: each of the requests that it answers at once gets the answer that it gets alone."""

import functools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common import make_model
from remember_models import small_model
from transformers import GenerationConfig

from titans_hf.cli.serving.generation import ServedModel
from titans_hf.cli.serving.requests import ServedRequest
from titans_hf.recalling import Passages, remember

SIZES = {"vocab_size": 100, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}


def make_served(kind: str) -> tuple:
    """Returns a random model, of a variant or with `remember`, and a ServedModel of it."""
    if kind in ("mac", "mag", "mal", "lmm"):
        model = make_model(kind, dtype=torch.float32, **SIZES)
    else:
        passages = Passages(4, 1, 3, query=8, again=8, every=6, share=0.5) if kind == "passages" else None
        model = remember(small_model(**SIZES).float(), 32, passages=passages)
    model.generation_config.eos_token_id = None
    return model, ServedModel(model, snapshots=8)


def settings(number: int) -> GenerationConfig:
    """Returns other lengths, and every third time sampling, another penalty."""
    options = {"max_new_tokens": 5 + 9 * (number % 5), "do_sample": number % 3 == 1, "pad_token_id": 0}
    return GenerationConfig(**options, repetition_penalty=1.3 if number % 3 == 2 else None)


@pytest.mark.parametrize("kind", ["mac", "mag", "mal", "lmm", "passages", "window"])
def test_answers_side_by_side(kind):
    """Requests of any lengths and settings get their own answers; most tokens come from calls with several rows."""
    model, served = make_served(kind)
    choose, rows, forward = random.Random(0), [], model.forward
    lengths = [3, 40, 64, 90, 40, 64]
    prompts = [torch.tensor([[choose.randrange(2, 100) for _ in range(length)]]) for length in lengths]
    prompts += [torch.cat([prompts[i], prompts[0]], 1) for i in (1, 3)]
    expected = []
    for number, ids in enumerate(prompts):
        torch.manual_seed(number)
        expected.append(model.generate(ids, settings(number))[0].tolist())
    count = lambda **given: rows.append(len(given["input_ids"])) or forward(**given)  # noqa: E731
    model.forward = functools.wraps(forward)(count)

    def answer(number: int) -> list[int]:
        return served.generate(ServedRequest(seed=number), prompts[number], settings(number))[0].tolist()

    with ThreadPoolExecutor(5) as users:
        found = list(users.map(answer, range(8)))
    assert found == expected
    assert len({tuple(x[-5:]) for x in expected}) == 8
    assert max(rows) > 2 and sum(x for x in rows if x > 1) > sum(rows) / 2
    assert served.slots.cache is None and not served.slots.rows
    for _, ids, cache in served.snapshots.kept if kind == "passages" else ():
        for x in cache.recalled[0]:
            assert ids[x.begin : x.begin + len(x.ids)].equal(x.ids)  # of its own text


def test_a_failed_step():
    """An error while several requests are answered ends these, and later ones are answered."""
    model, served = make_served("mag")
    ids, forward, failing = torch.tensor([[5, 6, 7]]), model.forward, threading.Event()

    @functools.wraps(forward)
    def fail(**given):
        if failing.is_set() and len(given["input_ids"]) > 1:
            raise MemoryError("full")
        return forward(**given)

    expected = model.generate(ids, settings(9))
    model.forward = fail
    failing.set()
    with ThreadPoolExecutor(4) as users:
        answers = [users.submit(served.generate, ServedRequest(), ids, settings(9)) for _ in range(4)]
    assert any(isinstance(x.exception(), MemoryError) for x in answers)
    failing.clear()
    assert served.generate(ServedRequest(), ids, settings(9)).equal(expected)
