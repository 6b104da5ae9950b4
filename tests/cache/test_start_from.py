"""model.start_from(cache): every generate() starts from the memory and leaves it unchanged."""

import copy

import pytest
import torch
from common import ATTENTIONS, assert_same_cache, left_pad, make_ids, make_model, read, tensors

from titans_hf import TitansCache

GREEDY = dict(max_new_tokens=9, do_sample=False)
TEXT = make_ids(1, 30)


def expected(model, prompt, **options):
    """Returns the continuation of `prompt` (1, T) by a model without a memory that is given the whole text."""
    plain = copy.deepcopy(model)
    plain.start_from(None)
    return plain.generate(torch.cat([TEXT, prompt], dim=1), **GREEDY, **options)[:, TEXT.shape[1] :]


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_prompts_follow_the_text_of_the_memory(variant):
    """Each prompt, alone, padded, with beams or drafts, is continued as after the memory's text, repeatedly."""
    model = make_model(variant)
    cache, before = (read(model, TEXT)[1] for _ in range(2))
    model.start_from(cache)
    prompts = [make_ids(1, 12, seed=1), make_ids(1, 5, seed=2)]
    wanted = [expected(model, prompt) for prompt in prompts]
    for _ in range(2):
        for prompt, tokens in zip(prompts, wanted, strict=True):
            assert torch.equal(model.generate(prompt, **GREEDY), tokens)
    ids, mask = left_pad([prompt[0] for prompt in prompts])
    batch = model.generate(ids, attention_mask=mask, **GREEDY)
    for row, prompt, tokens in zip(batch, prompts, wanted, strict=True):
        assert torch.equal(row[-9:], tokens[0, prompt.shape[1] :])
    beams = model.generate(prompts[0], num_beams=3, num_return_sequences=2, **GREEDY)
    assert torch.equal(beams, expected(model, prompts[0], num_beams=3, num_return_sequences=2))
    repeated = prompts[1].repeat(1, 3)
    drafted = model.generate(repeated, prompt_lookup_num_tokens=3, **GREEDY)
    assert torch.equal(drafted, expected(model, repeated))
    own = model.generate(prompts[0], cache=TitansCache(model.config), **GREEDY)  # a given cache replaces the memory
    model.start_from(None)
    assert torch.equal(model.generate(prompts[0], **GREEDY), own) and not torch.equal(own, wanted[0])
    assert_same_cache(cache, before, tolerance=0)


def test_the_graph_of_what_was_read_is_not_kept():
    """A model holds no autograd graph of the cache that it starts from, which keeps its own."""
    model = make_model("mag")
    cache = model(TEXT, use_cache=True).cache
    model.start_from(cache)
    assert not any(x.requires_grad for x in tensors(model._starting_cache))
    assert any(x.requires_grad for x in tensors(cache))


def test_what_cannot_be_started_from_is_refused():
    """An unusable cache or option raises an error that names it before a request."""
    model = make_model("mag")
    recording = read(model, TEXT)[1]
    recording.activate_past_recording()
    with pytest.raises(RuntimeError, match="stop_past_recording"):
        model.start_from(recording)
    with pytest.raises(ValueError, match="`cache` must have one row, but has 2"):
        model.start_from(read(model, make_ids(2, 9))[1])
    model.start_from(read(model, TEXT)[1])
    with pytest.raises(ValueError, match="`use_cache` must be None or True after start_from"):
        model.generate(make_ids(1, 5), use_cache=False, **GREEDY)
