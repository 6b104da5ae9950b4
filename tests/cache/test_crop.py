"""Recording and crop: a cropped cache equals one that never read the columns; assisted decoding depends on it."""

import copy

import pytest
import torch
from common import ATTENTIONS, VARIANTS, assert_same, full_logits, make_ids, make_model, read, shared_model, tensors
from covering import covering

from titans_hf import TitansCache

GREEDY = dict(do_sample=False, pad_token_id=0)


def test_what_was_not_recorded_cannot_be_taken_back():
    """crop() beyond the recorded columns raises an error."""
    for variant in VARIANTS:
        model, ids = shared_model(variant), make_ids(1, 9)
        cache = read(model, ids)[1]
        held = tensors(cache)
        with pytest.raises(RuntimeError, match=r"crop\(-3\).*activate_past_recording.*copy.copy"):
            cache.crop(-3)
        with pytest.raises(ValueError, match="tokens_to_remove"):
            cache.crop(3)
        cache.crop(0)
        cache.activate_past_recording()
        read(model, ids, None, cache)
        with pytest.raises(RuntimeError, match=r"crop\(-10\).*9 columns"):
            cache.crop(-10)
        with pytest.raises(RuntimeError, match="reset"):
            cache.reset(torch.tensor([True]))
        cache.reset()
        assert cache.num_bytes == 0 and cache.get_seq_length() == 0 and held[0].shape[0] == 1


def test_recording_ends():
    """After stop_past_recording() a cache is as one that never recorded; after a crop it waits for the next token."""
    for variant in VARIANTS:
        model, ids = shared_model(variant), make_ids(2, 20)
        cache, plain = TitansCache(model.config), read(model, ids[:, :12])[1]
        cache.activate_past_recording()
        read(model, ids[:, :12], None, cache)
        assert cache.num_bytes > plain.num_bytes
        cache.crop(-2)
        with pytest.raises(RuntimeError, match="read on first"):
            cache.stop_past_recording()
        read(model, ids[:, 10:12], None, cache)
        cache.stop_past_recording()
        assert cache.num_bytes == plain.num_bytes
        with pytest.raises(RuntimeError, match=r"crop\(-1\)"):
            cache.crop(-1)
        for each in (cache, plain):
            each.reset(torch.tensor([True, False]))
            each.start_prompt()
        assert_same(*(read(model, ids[:, 12:], None, each)[0] for each in (cache, plain)))


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_assisted_decoding_equals_greedy(variant):
    """Assisted decoding gives the greedy tokens with any drafts, and its cache can be read on from."""
    model = shared_model(variant)
    prompt = make_ids(1, 5).repeat(1, 3)
    expected = model.generate(prompt, max_new_tokens=40, **GREEDY)
    assistants = make_model("lmm" if variant == "mag" else "mag", seed=5), copy.deepcopy(model)
    for settings in (*({"assistant_model": x} for x in assistants), {"prompt_lookup_num_tokens": 5}):
        answer = model.generate(prompt, max_new_tokens=40, return_dict_in_generate=True, **settings, **GREEDY)
        assert torch.equal(answer.sequences, expected), settings
    read_already = answer.cache.get_seq_length()
    later = torch.cat([expected[:, read_already:], make_ids(1, 9, seed=3)], 1)
    whole = torch.cat([expected[:, :read_already], later], 1)
    assert_same(read(model, later, None, answer.cache)[0], full_logits(model, whole)[:, read_already:])


@covering(1, {"variant": ATTENTIONS, "before": [0, 3, 21], "learning": [(True, True, True), (True, False, True)]})
def test_crop_goes_back_to_any_column(variant, before, learning):
    """After crop() of 1 to 17 recorded columns, read with learning on or off, and of later ones, no trace is left."""
    model, ids, more = make_model(variant), make_ids(2, before + 17), make_ids(2, 9, seed=1)

    def read_on(num_columns: int, recording: bool) -> TitansCache:
        """Reads `before` and then columns in three calls, each with learning on or off."""
        cache = read(model, ids[:, :before])[1] if before else TitansCache(model.config)
        if recording:
            cache.activate_past_recording()
        for first, end, learns in zip((0, 4, 5), (4, 5, 17), learning, strict=True):
            if first < num_columns:
                model.set_memory_learning(learns)
                read(model, ids[:, before + first : before + min(end, num_columns)], None, cache)
        model.set_memory_learning(True)
        return cache

    for removed in range(1, 18):
        cache = read_on(17, True)
        cache.crop(-removed)
        kept = before + 17 - removed
        assert cache.get_seq_length() == kept and cache.is_initialized == (kept > 0)
        expected = read(model, more, None, read_on(17 - removed, False))[0]
        assert_same(read(model, more, [1, 5, 3], cache)[0], expected)
        cache.crop(-4)
        assert_same(read(model, more[:, 5:], None, cache)[0], expected[:, 5:])
