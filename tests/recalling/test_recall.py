"""A row recalls the passages that its prompt asks for, exactly, and nothing of them stays."""

import copy
import math
import sys
from dataclasses import replace

import families
import pytest
import torch
from remember_models import SETTINGS, TOKENS, close, remembering
from transformers import DynamicCache

from titans_hf import MemoryCache, Passages, forget, remember
from titans_hf.recalling.columns import Columns
from titans_hf.recalling.recall import read_call
from titans_hf.recalling.recall import recall as recall_rows

WINDOW = 12
SEVERAL = replace(SETTINGS, share=0.4, most=3)


@pytest.fixture(scope="module")
def model():
    return remembering()


@torch.no_grad()
def read(model, ids, cache, **arguments):
    return model(ids, cache=cache, **arguments).logits


def choose_slowly(ids: list[int], window: int, settings: Passages, asked: int) -> list[int]:
    """The first tokens of the spans, by sets of terms, of a whole text whose last `asked` tokens are the prompt."""
    terms = lambda i, first=0: {(ids[i],)} | ({(ids[i - 1], ids[i])} if i > first else set())  # noqa: E731
    number = (len(ids) - max(window - 1, settings.before + settings.after)) // settings.block - 1
    if number < 1:
        return []
    begins = [settings.block * i for i in range(number)]
    spans = [set().union(*(terms(i) for i in range(x, x + 2 * settings.block))) for x in begins]
    scores, known, first = [0] * number, set(), len(ids) - min(asked, settings.query)
    for age in range(len(ids) - first):
        for term in sorted(terms(len(ids) - 1 - age, first) - known):
            known.add(term)
            having = [term in x for x in spans]
            idf = math.log1p((number - sum(having) + 0.5) / (sum(having) + 0.5))
            weight = round(1024 * settings.decay**age * idf)
            scores = [x + weight * y for x, y in zip(scores, having, strict=True)]
    fitting = [i for i, x in enumerate(scores) if 100 * x >= round(100 * settings.share) * max(scores) > 0]
    last = [i for i in fitting if i + 1 not in fitting and i + 2 not in fitting]
    best = sorted(last, key=lambda i: (scores[i], i))[-settings.most :]
    return [begins[i] for i in sorted(best)]


@pytest.mark.parametrize("settings", [SETTINGS, SEVERAL, Passages()])
def test_the_choice(settings):
    """The spans are those that sets of terms give, wherever the text was begun to be kept and the prompt begins."""
    generator, number = torch.Generator().manual_seed(1), []
    for length in range(30, 700, 29):
        ids = torch.randint(0, 40, (length,), generator=generator).square() // 40  # small ones are frequent
        asked = length % 11 + 1
        spans = settings.spans(ids, length, WINDOW, min(asked, settings.query))
        assert spans == choose_slowly(ids.tolist(), WINDOW, settings, asked)
        number.append(len(spans))
    assert sum(x > 0 for x in number) > 15 and max(number) > 1
    later = settings.spans(ids[5:], length, WINDOW, asked)
    assert later and all((5 + x) % settings.block == 0 for x in later)


def test_the_near_tokens_at_a_texts_begin():
    """A span at the first tokens of a text stands in sight as often as any other."""
    settings, ids = Passages(), torch.arange(100, 1100)
    for place in (2, 402):
        text = ids.clone()
        text[place : place + 4] = text[-4:] = torch.tensor([7, 8, 9, 10])
        choice = settings.choose(text, len(text), 256, 4)
        ((begin, end),) = choice.pieces
        near = torch.arange(begin, end)[choice.near]
        assert {*range(place, place + 4)} <= {*near.tolist()} and choice.more == 2


def test_a_question_before_an_instruction():
    """What is asked for decides, not what follows it in the prompt; the text before the prompt asks for nothing."""
    ids = torch.randint(200, 900, (1200,), generator=torch.Generator().manual_seed(1))
    asked, instruction, before = torch.arange(6), torch.arange(10, 50), torch.arange(60, 80)
    ids[300:306], ids[500:504], ids[700:720] = asked, instruction[:4], before
    ids[1134:] = torch.cat([before, asked, instruction])
    for number, begin in ((46, 300), (40, 500), (66, 700)):
        (first,) = Passages().choose(ids, len(ids), 256, number).pieces
        assert first[0] <= begin < first[1]
    header = torch.arange(100, 103)  # of a chat's messages: its text has it too
    ids[:3], ids[1148:] = header, torch.cat([header, asked, instruction, header])
    (first,) = Passages().choose(ids, len(ids), 256, 52).pieces
    assert first[0] <= 300 < first[1]


@torch.no_grad()
def recall_slowly(original, ids, at: int, settings: Passages):
    """Logits after each of the tokens from at - 1 on, of a row that recalls at the token at - 1: one call over sink,
    passages and text, which sees them from the tokens read again on, with the logarithm of how often a near column
    stands in sight added to its scores."""
    spans, again = choose_slowly(ids[:at].tolist(), WINDOW, settings, at), settings.again
    ends = [x + 2 * settings.block + settings.after for x in spans]
    places = sorted({y for x, end in zip(spans, ends, strict=True) for y in range(max(0, x - settings.before), end)})
    size, more = len(places), settings.copies - (1 if len(spans) == 1 else 2)
    near = range(max(0, spans[-1] - settings.block), spans[-1] + 7 * settings.block)
    first = max(1, max(places[-1] + 1, at - again - WINDOW + 1) - size)
    alone, sink, cache = DynamicCache(), DynamicCache(), DynamicCache()
    text = torch.cat([torch.tensor([1]), ids[places]])[None]
    original(text, position_ids=torch.arange(first - 1, first + size)[None], cache=alone)
    original(torch.tensor([[1]]), position_ids=torch.zeros(1, 1, dtype=torch.int64), cache=sink)
    for layer, (a, b) in enumerate(zip(sink.layers, alone.layers, strict=True)):
        cache.update(*(torch.cat([x, y[:, :, 1:]], 2) for x, y in ((a.keys, b.keys), (a.values, b.values))), layer)
    for low, high, sees in ((0, at - again, False), (at - again, len(ids), True)):
        position = torch.arange(low, high)[:, None]
        key = torch.arange(high)[None]
        in_window = (key <= position) & (position - key < WINDOW)
        front = torch.cat([position >= WINDOW, torch.full((high - low, size), sees)], 1)
        mask = torch.zeros(high - low, 1 + size + high, dtype=torch.float64)
        mask[:, 1 : 1 + size] = torch.tensor([1.0 + more * (x in near) for x in places]).double().log()
        mask = mask.masked_fill(~torch.cat([front, in_window], 1), -torch.inf)[None, None]
        logits = original(ids[None, low:high], attention_mask=mask, position_ids=position.T, cache=cache).logits
    return logits[0, again - 1 :], len(spans)


@pytest.mark.parametrize("settings", [SETTINGS, SEVERAL])
@pytest.mark.parametrize("at", [40, 47, 60])
def test_the_slow_reference(at, settings):
    """What a row reads after a recall is what one mask over sink, passages, window and the tokens read again gives."""
    model, ids = remembering(passages=settings), TOKENS[0]
    cache = MemoryCache(model)
    read(model, ids[None, :at], cache)
    again = model.generate(ids[None, :at], cache=MemoryCache(model), max_new_tokens=1, do_sample=False)[0, -1]
    logits = read(model, ids[None, at:], cache, recall=True)[0]
    expected, number = recall_slowly(forget(model), ids, at, settings)
    close(logits, expected[1:])
    assert int(expected[0].argmax()) == again and number == 1 + (settings is SEVERAL) * (number - 1)


@torch.no_grad()
def generate_slowly(model, ids: torch.Tensor, number: int) -> list[int]:
    """Greedy tokens, with a reading of the whole text anew for each recall."""
    made = []
    for begin in range(0, number, SETTINGS.every):
        cache = MemoryCache(model)
        plain = read(model, torch.cat([ids, torch.tensor([made], dtype=torch.int64)], 1), cache)[:, -1:]
        found, logits = recall_rows(model, cache, torch.arange(1))
        assert made or len(found)
        logits = logits if len(found) else plain
        for _ in range(begin, min(number, begin + SETTINGS.every)):
            made.append(int(logits[0, -1].argmax()))
            logits = read_call(model, cache, Columns.of_text(torch.tensor([made[-1:]])), 1, {})[0]
    return made


def test_generation():
    """`generate()` recalls at the prompt's end and after every 6 own tokens, also padded, drafted and beside others."""
    model = remembering(passages=SEVERAL)
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
    plain = remembering(passages=None)
    assert plain.generate(texts[0], **settings)[0, 50:].tolist() != expected[0]


def test_the_prompt_is_the_query(model):
    """After `start_prompt`, and after an answer, passages are chosen by what follows, whatever the text before."""
    cache, whole, settings = MemoryCache(model), TOKENS[:2].repeat(1, 2), {"max_new_tokens": 3, "do_sample": False}
    read(model, whole[:, :90], cache)
    for _ in range(2):
        cache.start_prompt()
        assert cache.recalled == [[], []]
        model.generate(whole[:, 4:7], cache=cache, **settings)
        for row, passages in enumerate(cache.recalled):
            seen = cache.num_tokens_seen[row] - 2
            expected = model.memory.passages.spans(text := _text(model, cache, row)[:seen], int(seen), WINDOW, 3)
            begins = [max(0, x - SETTINGS.before) for x in expected]
            assert passages and {x.begin for x in passages} <= {*begins}
            assert all(x.ids.equal(text[x.begin : x.begin + len(x.ids)]) for x in passages)


def _text(model, cache: MemoryCache, row: int) -> torch.Tensor:
    plain = copy.copy(cache)
    plain.read_unread(model)
    return plain.rows.text[row].long()


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@families.as_double()
def test_no_trace(family):
    """After an answer the text goes on as if it had been read without a passage."""
    model = remembering() if family == "llama" else remember(families.small_model(family), WINDOW, passages=SETTINGS)
    ids, cache, plain = TOKENS[:2, :50], MemoryCache(model), MemoryCache(model)
    made = model.generate(ids, cache=cache, max_new_tokens=20, do_sample=False)[:, 50:69]
    read(model, torch.cat([ids, made], 1), plain)
    assert all(cache.recalled) and cache.num_tokens_seen.tolist() == plain.num_tokens_seen.tolist()
    close(read(model, TOKENS[:2, 50:], cache), read(model, TOKENS[:2, 50:], plain), atol=1e-10)
    assert cache.rows.text.equal(plain.rows.text)


def test_a_recall_that_finds_nothing(model):
    """It is a plain reading, also of a row that saw a passage before."""
    cache, plain, text = MemoryCache(model), MemoryCache(model), TOKENS[:1, :50].clamp(max=51)
    asked = Columns.of_text(torch.full((1, 9), 52))
    recalls = asked._replace(recalls=torch.arange(9)[None] == 8)
    with torch.no_grad():
        read(model, text, cache)
        assert model(text[:, :4], cache=cache, recall=True).cache.recalled[0]
        cache.start_prompt()
        logits = read_call(model, cache, recalls, 1, {})[0]
        read(model, torch.cat([text, text[:, :4]], 1), plain)
        close(logits, read_call(model, plain, asked, 1, {})[0])
    assert cache.recalled == [[]]


def test_recalled_passages_are_of_their_rows(model):
    """`recalled` has each row's passages, through selections and appended rows, and none of a text that was reset."""
    cache, other = MemoryCache(model), MemoryCache(model)
    for x, ids in ((cache, TOKENS[:2, :50]), (other, TOKENS[2:3, :50])):
        read(model, ids, x)
        read(model, ids[:, :1], x, recall=True)
    a, b = cache.recalled
    c = other.recalled[0]
    cache.append_rows(other)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert cache.recalled == [c, a, b]
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    assert cache.recalled == [b, b, c, c]
    cache.reset_rows(model, torch.tensor([1]))
    assert cache.recalled == [b, [], c, c]


def test_tokens_of_a_document_that_begins_in_a_recall(model):
    """They are counted from its first token, before and after they are read plainly."""
    cache = MemoryCache(model)
    read(model, TOKENS[:2, :50], cache)
    read(model, TOKENS[:2, :5], cache, recall=True)
    read(model, TOKENS[:2, :6], cache, position_ids=torch.tensor([[4, 5, 0, 1, 2, 3]] * 2))
    assert cache.num_tokens_seen.tolist() == [4, 4]
    cache.read_unread(model)
    assert cache.num_tokens_seen.tolist() == [4, 4]


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
    expected, recalled = read(model, TOKENS[:1, 60:80], copy.copy(cache)), cache.recalled
    for recalls in (True, None, False):
        with pytest.raises(IndexError):
            read(model, bad, cache, recall=recalls)
        assert cache.recalled == recalled
        close(read(model, TOKENS[:1, 60:80], copy.copy(cache)), expected)


def test_texts_without_a_passage():
    """Up to the window a model that recalls is the original to the bit; `recall` by a window alone is an error."""
    model = remembering()
    logits, cache = read(model, TOKENS[:, :WINDOW], MemoryCache(model)), MemoryCache(model)
    read(model, TOKENS[:, :6], cache)
    close(read(model, TOKENS[:, 6:WINDOW], cache, recall=True), logits[:, 6:])
    assert read(forget(model), TOKENS[:, :WINDOW], None).equal(logits)
    with pytest.raises(ValueError, match="`recall` needs passages"):
        remembering(passages=None)(TOKENS, recall=True)


def test_a_prompt_without_what_was_read(model):
    """A second prompt without the first, or drafts that would read the first again, are errors that say what to do."""
    cache = MemoryCache(model)
    read(model, TOKENS[:1, :30], cache)
    for length, arguments in ((5, {}), (60, {"prompt_lookup_num_tokens": 3}), (60, {"use_cache": False})):
        with pytest.raises(ValueError, match=r"cache\.start_prompt\(\)|`use_cache` must be True"):
            model.generate(TOKENS[:1, :length], cache=cache, max_new_tokens=3, **arguments)


def test_the_way_to_the_model_is_short():
    """Between a call and the model's own forward there are at most eight functions of this package."""
    model, depths = remembering(), []
    own = model.memory.forward

    def noted(*args, **kwargs):
        frame, depth = sys._getframe(1), 0
        while not frame.f_code.co_filename.endswith((__file__, "generation/utils.py")):
            depth += "titans_hf" in frame.f_code.co_filename
            frame = frame.f_back
        depths.append(depth)
        return own(*args, **kwargs)

    model.memory.forward = noted
    cache = MemoryCache(model)
    cache.activate_past_recording()
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :7] = 0
    model(TOKENS[:2, :40], attention_mask=mask, cache=cache)
    read(model, TOKENS[:2, 40:45], cache, recall=True)
    cache.crop(-2)
    read(model, TOKENS[:2, 43:46], cache)
    model.generate(TOKENS[:2, :50], max_new_tokens=8, do_sample=False)
    assert max(depths) <= 8
