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
