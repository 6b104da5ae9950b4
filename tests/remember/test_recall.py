"""A row recalls the passage that its last tokens ask for, exactly, and nothing of it stays."""

import copy
import math

import families
import pytest
import torch
from remember_models import SETTINGS, TOKENS, close, small_fast_weights, small_model
from transformers import DynamicCache

from titans_hf.remember import MemoryCache, forget, reading, recall, remember
from titans_hf.remember.columns import CallColumns
from titans_hf.remember.passages import Passages

WINDOW = 12


def recalling(memory=("passages", "fast_weights"), family="llama"):
    model = small_model() if family == "llama" else families.small_model(family)
    fast = small_fast_weights(model) if family == "llama" else families.small_memory(model)[0]
    return remember(model, WINDOW, memory, passages=SETTINGS, fast_weights=fast)


@pytest.fixture(scope="module")
def model():
    return recalling()


@torch.no_grad()
def read(model, ids, cache, **arguments):
    return model(ids, cache=cache, **arguments).logits


def choose_slowly(ids: list[int], window: int, settings: Passages) -> int | None:
    """The choice by sets of terms, of a whole text."""
    terms = lambda i: {(ids[i],)} | ({(ids[i - 1], ids[i])} if i else set())  # noqa: E731
    number = (len(ids) - max(window - 1, settings.before + settings.after)) // settings.block - 1
    if number < 1:
        return None
    begins = [settings.block * i for i in range(number)]
    spans = [set().union(*(terms(i) for i in range(x, x + 2 * settings.block))) for x in begins]
    scores, asked = [0] * number, set()
    for age in range(settings.query):
        for term in sorted(terms(len(ids) - 1 - age) - asked):
            asked.add(term)
            having = [term in x for x in spans]
            idf = math.log1p((number - sum(having) + 0.5) / (sum(having) + 0.5))
            weight = round(1024 * settings.decay**age * idf)
            scores = [x + weight * y for x, y in zip(scores, having, strict=True)]
    fitting = [x for x, score in zip(begins, scores, strict=True) if 10 * score >= 9 * max(scores) > 0]
    return max(0, fitting[-1] - settings.before) if fitting else None


@pytest.mark.parametrize("settings", [SETTINGS, Passages()])
def test_the_choice(settings):
    """The passage is the one that sets of terms give, wherever the text was begun to be kept."""
    generator, found = torch.Generator().manual_seed(1), 0
    for length in range(30, 700, 29):
        ids = torch.randint(0, 40, (length,), generator=generator).square() // 40  # small ones are frequent
        begin = settings.choose(ids, length, WINDOW)
        assert begin == choose_slowly(ids.tolist(), WINDOW, settings)
        found += begin is not None
    assert found > 15
    later = settings.choose(ids[5:], length, WINDOW)
    assert (5 + later + settings.before) % settings.block == 0


def test_a_header_asks_for_nothing():
    """What a prompt ends with, from an end token on, is no part of the query if it followed an end token before."""
    settings, header = Passages(block=4, before=0, after=0, query=8, end_tokens=(2,)), [2, 5, 6]
    ids = [*range(10, 18), *range(20, 40), *header, *range(40, 48), 10, 11]
    for last, begin in ((header, 0), ([2, 5, 7], 28), ([], 0)):
        text = torch.tensor([*ids, *last])
        assert settings.choose(text, len(text), 9) == begin


@torch.no_grad()
def recall_slowly(original, ids, at: int):
    """Logits after each of the tokens from at - 1 on, of a row that recalls at the token at - 1: one call over sink,
    passage and text, which sees the passage from the query on, with the logarithm of `copies` added to near scores."""
    begin, size, query = choose_slowly(ids[:at].tolist(), WINDOW, SETTINGS), SETTINGS.size, SETTINGS.query
    first = max(1, begin, at - query - WINDOW - size + 1)
    passage = [1, *ids[begin : begin + size].tolist()]
    alone, sink, cache = DynamicCache(), DynamicCache(), DynamicCache()
    original(torch.tensor([passage]), position_ids=torch.arange(first - 1, first + size)[None], cache=alone)
    original(torch.tensor([[1]]), position_ids=torch.zeros(1, 1, dtype=torch.int64), cache=sink)
    for layer, (a, b) in enumerate(zip(sink.layers, alone.layers, strict=True)):
        cache.update(*(torch.cat([x, y[:, :, 1:]], 2) for x, y in ((a.keys, b.keys), (a.values, b.values))), layer)
    for low, high, sees in ((0, at - query, False), (at - query, len(ids), True)):
        position = torch.arange(low, high)[:, None]
        key = torch.arange(high)[None]
        text = (key <= position) & (position - key < WINDOW)
        front = torch.cat([position >= WINDOW, torch.full((high - low, size), sees)], 1)
        mask = torch.zeros(high - low, 1 + size + high, dtype=torch.float64)
        mask[:, 1 : 1 + size][:, SETTINGS.near] = math.log(SETTINGS.copies)
        mask = mask.masked_fill(~torch.cat([front, text], 1), -torch.inf)[None, None]
        logits = original(ids[None, low:high], attention_mask=mask, position_ids=position.T, cache=cache).logits
    return logits[0, query - 1 :]


@pytest.mark.parametrize("at", [40, 47, 60])
def test_the_slow_reference(at):
    """What a row reads after a recall is what one mask over sink, passage, window and the tokens read again gives."""
    model, ids = recalling(("passages",)), TOKENS[0]
    cache = MemoryCache(model)
    read(model, ids[None, :at], cache)
    again = model.generate(ids[None, :at], cache=MemoryCache(model), max_new_tokens=1, do_sample=False)[0, -1]
    logits = read(model, ids[None, at:], cache, recall=True)[0]
    expected = recall_slowly(forget(model), ids, at)
    close(logits, expected[1:])
    assert int(expected[0].argmax()) == again


def own(ids: torch.Tensor) -> CallColumns:
    """Columns of tokens that the model made: they are read, and not learned."""
    columns = CallColumns.of_text(ids)
    return columns._replace(learning=columns.real)


@torch.no_grad()
def generate_slowly(model, ids: torch.Tensor, number: int) -> list[int]:
    """Greedy tokens, with a reading of the whole text anew for each recall."""
    made = []
    for begin in range(0, number, SETTINGS.every):
        cache = MemoryCache(model)
        read(model, ids, cache)
        if made:
            reading.read(model, cache, own(torch.tensor([made])), 1, {})
        found, logits = recall.recall(model, cache, torch.arange(1))
        assert len(found)
        for _ in range(begin, min(number, begin + SETTINGS.every)):
            made.append(int(logits[0, -1].argmax()))
            logits = recall.read(model, cache, own(torch.tensor([made[-1:]])), 1, {})[0]
    return made


def test_generation(model, monkeypatch):
    """`generate()` recalls at the prompt's end and after every 6 own tokens, also padded, drafted and beside others."""
    settings, texts = {"max_new_tokens": 21, "do_sample": False}, [TOKENS[:1, :50], TOKENS[1:2, :38]]
    texts.append(TOKENS[2:3, :10].repeat(1, 5))  # drafts longer than two chunks are found in it
    expected = [generate_slowly(model, ids, 21) for ids in texts]
    padded, mask = torch.zeros(3, 50, dtype=torch.int64), torch.ones(3, 50, dtype=torch.int64)
    padded[0], padded[1, 12:], mask[1, :12], padded[2] = texts[0], texts[1], 0, texts[2]
    assert model.generate(padded, attention_mask=mask, **settings)[:, 50:].tolist() == expected
    for ids, tokens in zip(texts, expected, strict=True):
        for number in (3, 20):
            made = model.generate(ids, prompt_lookup_num_tokens=number, **settings)
            assert made[0, ids.shape[1] :].tolist() == tokens
    monkeypatch.setattr(model.memory, "passages", None)
    assert model.generate(texts[0], **settings)[0, 50:].tolist() != expected[0]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@families.as_double()
def test_no_trace(family):
    """After an answer the text goes on as if it had been read without a passage."""
    model, ids = recalling(family=family), TOKENS[:2, :50]
    cache, plain = MemoryCache(model), MemoryCache(model)
    made = model.generate(ids, cache=cache, max_new_tokens=20, do_sample=False)[:, 50:69]
    read(model, ids, plain)
    with torch.no_grad():
        reading.read(model, plain, own(made), 1, {})
    assert cache.recalled and cache.num_tokens_seen.tolist() == plain.num_tokens_seen.tolist()
    close(read(model, TOKENS[:2, 50:], cache), read(model, TOKENS[:2, 50:], plain), atol=1e-10)
    for name, x in plain.state.items():
        close(cache.state[name], x, atol=1e-10)


def test_a_recall_that_finds_nothing(model):
    """It is a plain reading, also of a row that saw a passage before."""
    cache, plain, text = MemoryCache(model), MemoryCache(model), TOKENS[:1, :50].clamp(max=51)
    asked = own(torch.full((1, 9), 52))
    recalls = asked._replace(recalls=torch.arange(9)[None] == 8)
    with torch.no_grad():
        read(model, text, cache)
        assert len(model(text[:, :4], cache=cache, recall=True).cache.recalled[0][0])
        logits = recall.read(model, cache, recalls, 1, {})[0]
        read(model, torch.cat([text, text[:, :4]], 1), plain)
        close(logits, reading.read(model, plain, asked, 1, {})[0])
    assert not len(cache.recalled[-1][0])


def test_a_gradient_after_a_recall(model):
    """It does not depend on another row's padding."""

    def gradient(rows: int) -> torch.Tensor:
        cache, mask = MemoryCache(model), torch.tensor([[1] * 12, [0] * 5 + [1] * 7])[:rows]
        read(model, TOKENS[:rows, :50], cache)
        logits = model(TOKENS[:rows, 50:62], attention_mask=mask, cache=cache, recall=True).logits[0]
        return torch.autograd.grad(logits.square().sum(), model.model.layers[0].self_attn.k_proj.weight)[0]

    close(gradient(2), gradient(1))


def test_a_call_that_fails(model):
    """After an error a cache is as it was, also in what it was going to read again."""
    cache, bad = MemoryCache(model), torch.full((1, 9), 53)
    read(model, TOKENS[:1, :50], cache)
    read(model, TOKENS[:1, 50:60], cache, recall=True)
    expected = read(model, TOKENS[:1, 60:80], copy.copy(cache))
    for recalls in (True, None, False):
        with pytest.raises(IndexError):
            read(model, bad, cache, recall=recalls)
        close(read(model, TOKENS[:1, 60:80], copy.copy(cache)), expected)


def test_texts_and_arguments_without_a_passage():
    """Up to the window a model that recalls is the original to the bit; `recall` without passages is an error."""
    model = recalling(("passages",))
    logits = read(model, TOKENS[:, :WINDOW], MemoryCache(model))
    cache = MemoryCache(model)
    read(model, TOKENS[:, :6], cache)
    close(read(model, TOKENS[:, 6:WINDOW], cache, recall=True), logits[:, 6:])
    assert read(forget(model), TOKENS[:, :WINDOW], None).equal(logits)
    model = remember(model, WINDOW, ("fast_weights",))
    with pytest.raises(ValueError, match="`recall` needs a memory with passages"):
        model(TOKENS, recall=True)
    model = recalling()
    cache = model(TOKENS[:, :50]).cache
    with pytest.raises(ValueError, match="A document that begins after a recall"):
        model(TOKENS[:, :9], cache=cache, recall=True, position_ids=torch.arange(9).expand(4, 9) % 5)


def test_a_prompt_without_what_was_read(model):
    """A second prompt without the first, or drafts that would read the first again, are errors that say what to do."""
    cache = MemoryCache(model)
    read(model, TOKENS[:1, :30], cache)
    for length, arguments in ((5, {}), (60, {"prompt_lookup_num_tokens": 3}), (60, {"use_cache": False})):
        with pytest.raises(ValueError, match=r"cache\.start_prompt\(\)|`use_cache` must be True"):
            model.generate(TOKENS[:1, :length], cache=cache, max_new_tokens=3, **arguments)
