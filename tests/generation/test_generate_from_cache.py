"""generate() with a cache that has read tokens: prompts that would be read twice, or in part, raise an error."""

import copy
from unittest.mock import MagicMock

import pytest
import torch
from common import TWO_VARIANTS, assert_same, make_ids, make_model, read, shared_model, tensors
from covering import covering
from transformers.generation.utils import DeferredStopCheck

from titans_hf import TitansCache

GREEDY = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)


@covering(1, {"variant": TWO_VARIANTS, "drafts": [dict(prompt_lookup_num_tokens=3), "assistant"]})
def test_assisted_generation_reads_what_was_read_once(variant, drafts):
    """Drafting on a used cache raises an error that names start_prompt(), after which tokens are the greedy ones."""
    model, ids, prompt = shared_model(variant), make_ids(1, 21), make_ids(1, 7, seed=1)
    drafts = dict(assistant_model=make_model("lmm", seed=5)) if drafts == "assistant" else drafts
    whole = torch.cat([ids, prompt], dim=1)
    expected = model.generate(whole, **GREEDY)
    cache = read(model, ids)[1]
    kept = copy.deepcopy(tensors(cache))
    with pytest.raises(ValueError, match=r"has read 21 columns .*start_prompt\(\)"):
        model.generate(whole, cache=cache, **drafts, **GREEDY)
    assert all(map(torch.equal, kept, tensors(cache))) and not cache.layers[0].record_past
    cache.start_prompt()
    assert torch.equal(model.generate(prompt, cache=cache, **drafts, **GREEDY), expected[:, 21:])


def test_what_would_read_twice_or_not_at_all_is_refused():
    """Prompts and inputs that would be read twice or in part raise an error that says what to do."""
    model, ids = shared_model("mag"), make_ids(2, 29)
    cache = read(model, ids[:, :9])[1]
    embeds, mask = model.get_input_embeddings()(ids[:, 9:]).detach(), torch.ones_like(ids)
    for settings, message in (
        (dict(inputs=ids, use_cache=False), "`use_cache` must be True with `cache`"),
        (dict(inputs_embeds=embeds, attention_mask=mask), "`inputs_embeds` must have all 29 columns of `att"),
        (dict(inputs=ids, num_beams=2), r"its batch size is 2, not 4"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(cache=cache, **settings, **GREEDY)
    with pytest.raises(ValueError, match="`prefill_chunk_size` must be None with `inputs_embeds`"):
        model.generate(inputs_embeds=embeds, prefill_chunk_size=4, **GREEDY)
    for length in (0, 8, 9):
        with pytest.raises(ValueError, match=r"start_prompt\(\)"):
            model.generate(ids[:, :length], cache=cache, **GREEDY)
    one = read(model, ids[:1, :9])[1]
    with pytest.raises(ValueError, match=r"batch size is 1, not 2; `batch_repeat_interleave\(2\)` repeats"):
        model(ids[:, 9:], cache=one)
    assert cache.num_tokens_seen.tolist() == [9, 9]


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_a_cache_records_only_while_drafts_are_tried(variant):
    """After drafts, or a call that fails, a cache records no more, unless the user lets it record."""
    model, turns = shared_model(variant), [make_ids(1, 6, seed=seed).repeat(1, 3) for seed in (1, 2)]
    cache, plain = TitansCache(model.config), TitansCache(model.config)
    with pytest.raises(ValueError, match="batch_size = 1"):
        model.generate(make_ids(2, 9), cache=cache, prompt_lookup_num_tokens=3, **GREEDY)
    assert not cache.layers[0].record_past
    for prompt in turns:
        drafted = model.generate(prompt, cache=cache, prompt_lookup_num_tokens=3, **GREEDY)
        assert torch.equal(drafted, model.generate(prompt, cache=plain, **GREEDY))
        cache.start_prompt()
        plain.start_prompt()
    assert not any(layer.record_past or layer.recorded for layer in cache.layers)
    assert_same(read(model, turns[0], None, cache)[0], read(model, turns[0], None, plain)[0])
    assert cache.num_bytes == plain.num_bytes
    recording = TitansCache(model.config)
    recording.activate_past_recording()
    model.generate(turns[0], cache=recording, prompt_lookup_num_tokens=3, **GREEDY)
    assert all(layer.record_past for layer in recording.layers)


def test_a_token_that_generate_undoes_is_not_read(monkeypatch):
    """Where Transformers decodes a token more and undoes it, as on MPS, the user's cache has not read it."""
    model, ids = shared_model("mag"), make_ids(1, 21)
    options = dict(GREEDY, max_new_tokens=9)
    options["eos_token_id"] = int(model.generate(ids, **{**GREEDY, "max_new_tokens": 9})[0, 21 + 4])
    expected, cache = TitansCache(model.config), TitansCache(model.config)
    plain = model.generate(ids, cache=expected, **options)
    monkeypatch.setattr(DeferredStopCheck, "is_supported", lambda *args, **kwargs: args[2])
    monkeypatch.setattr(torch, "Event", MagicMock())
    result = model.generate(ids, cache=cache, **options)
    assert torch.equal(result, plain)
    assert cache.get_seq_length() == expected.get_seq_length() == result.shape[1] - 1 < 21 + 8
    more = make_ids(1, 5, seed=2)
    assert_same(read(model, more, None, cache)[0], read(model, more, None, expected)[0])


def test_a_prompt_that_has_started_cannot_be_cropped():
    """crop() beyond the beginning of a prompt raises an error."""
    model = shared_model("mag")
    cache = TitansCache(model.config)
    cache.activate_past_recording()
    read(model, make_ids(1, 9), None, cache)
    cache.crop(-3)
    for layer in cache.layers:  # as assisted decoding leaves it
        layer.record_past = False
    cache.start_prompt()
    with pytest.raises(RuntimeError, match="goes back beyond"):
        cache.crop(-2)
    together = torch.cat([make_ids(1, 9)[:, :6], make_ids(1, 5, seed=2)], dim=1)
    assert_same(read(model, make_ids(1, 5, seed=2), None, cache)[0], read(model, together)[0][:, 6:])
    assert cache.get_seq_length() == 5


def test_options_that_would_be_misread_are_refused():
    """An early exit, documents by index and documents in pieces raise an error before anything is read."""
    model, ids = shared_model("mag"), make_ids(1, 12)
    cache = TitansCache(model.config)
    starts = torch.cat([torch.arange(7), torch.arange(5)])[None]
    refused = {
        "`assistant_early_exit` is not possible": dict(assistant_early_exit=1),
        "`seq_idx` must be None in generate": dict(seq_idx=(starts.cumsum(1) > 21).int()),
        "`cu_seq_lens_q` must be None in generate": dict(cu_seq_lens_q=torch.tensor([0, 7, 12])),
        "`prefill_chunk_size` must be None with several documents": dict(position_ids=starts, prefill_chunk_size=7),
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            model.generate(ids, cache=cache, **options, **GREEDY)
        assert cache.get_seq_length() == 0
    model.generate(ids, position_ids=torch.arange(12)[None], prefill_chunk_size=7, **GREEDY)
    mask = torch.tensor([[0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]])  # Transformers' positions at padding are no documents
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(model.generate(ids, attention_mask=mask, prefill_chunk_size=3, **GREEDY), expected)
    whole = model.generate(ids, position_ids=starts, **GREEDY)
    assert torch.equal(whole[:, 12:], model.generate(ids[:, 7:], **GREEDY)[:, 5:])
