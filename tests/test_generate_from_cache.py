"""generate() with a cache that has read tokens: prompts that would be read twice, or in part, raise an error."""

import copy

import pytest
import torch
from common import VARIANTS, make_ids, make_model, read, shared_model, tensors

GREEDY = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("drafts", [dict(prompt_lookup_num_tokens=3), "assistant"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_assisted_generation_reads_what_was_read_once(variant, drafts):
    """Drafting on a used cache raises an error that names start_prompt(), after which tokens are the greedy ones:
    otherwise the memory would read the earlier tokens twice.
    """
    model, ids, prompt = shared_model(variant), make_ids(1, 21), make_ids(1, 7, seed=1)
    drafts = dict(assistant_model=make_model("lmm", seed=5)) if drafts == "assistant" else drafts
    whole = torch.cat([ids, prompt], dim=1)
    expected = model.generate(whole, **GREEDY)
    cache = read(model, ids)[1]
    kept = copy.deepcopy(tensors(cache))
    with pytest.raises(ValueError, match=r"has read 21 columns .*start_prompt\(\)"):
        model.generate(whole, past_key_values=cache, **drafts, **GREEDY)
    assert all(map(torch.equal, kept, tensors(cache))) and not cache.layers[0].record_past
    cache.start_prompt()
    assert torch.equal(model.generate(prompt, past_key_values=cache, **drafts, **GREEDY), expected[:, 21:])


@pytest.mark.parametrize("length", [0, 7, 15, 21])
def test_a_prompt_that_lacks_what_was_read_is_refused(length):
    """A prompt no longer than the columns read raises an error that names start_prompt(): otherwise Transformers would
    cut it, or read all of it again.
    """
    model = shared_model("mag")
    cache = read(model, make_ids(2, 21))[1]
    kept = copy.deepcopy(tensors(cache))
    with pytest.raises(ValueError, match=r"start_prompt\(\)"):
        model.generate(make_ids(2, 21)[:, :length], past_key_values=cache, **GREEDY)
    assert all(map(torch.equal, kept, tensors(cache)))


def test_an_early_exit_is_refused():
    """`assistant_early_exit` raises an error and leaves the config: otherwise the model would keep one layer
    for good.
    """
    model = make_model("mag")
    with pytest.raises(ValueError, match="`assistant_early_exit` is not possible"):
        model.generate(make_ids(1, 9), assistant_early_exit=1, **GREEDY)
    assert model.config.num_hidden_layers == 2
    model.generate(make_ids(1, 9), **GREEDY)


def test_what_would_read_twice_or_not_at_all_is_refused():
    """A cache with `use_cache=False`, embeddings of new tokens with the mask of all, embeddings in pieces, and a cache
    of fewer rows raise an error that says what to do: otherwise tokens would be read again or be skipped.
    """
    model, ids = shared_model("mag"), make_ids(2, 29)
    cache = read(model, ids[:, :9])[1]
    embeds, mask = model.get_input_embeddings()(ids[:, 9:]).detach(), torch.ones_like(ids)
    for settings, message in (
        (dict(inputs=ids, use_cache=False), "`use_cache` must be True with `past_key_values`"),
        (dict(inputs_embeds=embeds, attention_mask=mask), r"`inputs_embeds` has 20 columns and `attention_mask` 29"),
        (dict(inputs=ids, num_beams=2), r"its batch size is 2, not 4"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(past_key_values=cache, **settings, **GREEDY)
    with pytest.raises(ValueError, match="`prefill_chunk_size` must be None with `inputs_embeds`"):
        model.generate(inputs_embeds=embeds, prefill_chunk_size=4, **GREEDY)
    one = read(model, ids[:1, :9])[1]
    with pytest.raises(ValueError, match=r"batch size is 1, not 2; `batch_repeat_interleave\(2\)` gives"):
        model(ids[:, 9:], past_key_values=one)
    assert cache.num_tokens_seen().tolist() == [9, 9]
