"""The cache: its constant size, calls that fail, rows that are reset, merging, and prompts after what was read."""

import copy

import pytest
import torch
from common import (
    ATTENTIONS,
    TWO_VARIANTS,
    assert_same,
    assert_same_cache,
    full_logits,
    make_config,
    make_ids,
    make_model,
    read,
    redraw,
    shared_model,
    tensors,
)
from covering import covering
from memory_folders import everything

from titans_hf import (
    TitansCache,
    TitansForQuestionAnswering,
    TitansForSequenceClassification,
    TitansForTokenClassification,
)

HEADS = (TitansForQuestionAnswering, TitansForSequenceClassification, TitansForTokenClassification)


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_size_does_not_grow(variant):
    """The cache and the storages of its tensors have the same size after 200 and 2,000 tokens."""
    model = make_model(variant, dtype=torch.float32, memory_chunk_size=32, segment_length=32)
    short, long = (read(model, make_ids(1, length))[1] for length in (200, 2000))
    assert short.num_bytes == long.num_bytes == sum(x.numel() * x.element_size() for x in tensors(long)) > 10_000
    assert read(model, make_ids(1, 40), [1] * 40)[1].num_bytes == short.num_bytes
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors(long)}
    assert sum(storages.values()) <= long.num_bytes  # a view would keep its whole storage


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_a_prompt_after_what_was_read(variant):
    """After start_prompt() generate() takes the prompt and its mask alone, padded or not."""
    model, ids, prompt = shared_model(variant), make_ids(2, 21), make_ids(2, 7, seed=1)
    options = dict(max_new_tokens=9, do_sample=False, pad_token_id=0)
    whole = model.generate(torch.cat([ids, prompt], dim=1), **options)
    cache = read(model, ids)[1]
    cache.start_prompt()
    mask = torch.ones_like(prompt)
    mask[1, :3] = 0
    assert torch.equal(model.generate(prompt, cache=copy.copy(cache), **options), whole[:, 21:])
    padded = model.generate(prompt, attention_mask=mask, cache=copy.copy(cache), **options)
    assert torch.equal(padded[0], whole[0, 21:])
    alone = model.generate(torch.cat([ids[1:], prompt[1:, 3:]], dim=1), **options)
    assert torch.equal(padded[1, 7:], alone[0, 25:])
    cache.activate_past_recording()
    with pytest.raises(RuntimeError, match=r"start_prompt\(\) cannot be undone"):
        cache.start_prompt()


@covering(2, {"variant": ATTENTIONS, "recording": [False, True], "where": ["layer", "head", "loss"]})
def test_a_call_that_fails_leaves_the_cache(variant, recording, where):
    """A call that ends between two layers, in the LM head or behind the model leaves the cache as it was."""
    model, ids = make_model(variant), make_ids(2, 21)
    cache = TitansCache(model.config)
    if recording:
        cache.activate_past_recording()
    read(model, ids[:, :13], cache=cache)
    before = everything(cache)

    def interrupt(*args):
        if where != "loss":
            raise KeyboardInterrupt

    module = model.model.layers[1] if where == "layer" else model.lm_head
    hook = module.register_forward_pre_hook(interrupt)
    with pytest.raises((KeyboardInterrupt, ValueError)), torch.no_grad():
        model(ids[:, 13:], cache=cache, labels=ids[:, :3])
    hook.remove()
    after = everything(cache)
    assert all(after[name] is x for name, x in before.items()) and after.keys() == before.keys()
    assert_same(read(model, ids[:, 13:], cache=cache)[0], full_logits(model, ids)[:, 13:])


def test_weights_of_the_memory():
    """`memory_weights` gives what the memory holds, per layer; reading on leaves the returned tensors as they are."""
    model = shared_model("mag")
    cache = TitansCache(model.config)
    assert cache.memory_weights(1) == ()
    read(model, make_ids(2, 9), None, cache)
    weights = cache.memory_weights(1)
    assert [x.shape[:2] for x in weights] == [(2, 4)]  # the last layer learns
    assert [x.shape for x in cache.memory_momentum(1)] == [x.shape for x in weights] * model.config.memory_momentum
    kept = [x.clone() for x in weights]
    read(model, make_ids(2, 1), None, cache)
    assert all(map(torch.equal, weights, kept)) and not torch.equal(cache.memory_weights(1)[0], kept[0])


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_the_deprecated_name_of_the_cache():
    """`past_key_values` is the cache too: otherwise a call would read its tokens without it, and say nothing."""
    model, ids = shared_model("mag"), make_ids(1, 30)
    cache = read(model, ids[:, :20])[1]
    heads = [redraw(kind(make_config("mag")).double()).eval() for kind in HEADS]
    with torch.no_grad():
        for call in (model, model.model, *heads):
            given = ({"cache": copy.copy(cache)}, {"past_key_values": copy.copy(cache)}, {})
            first, second, alone = (call(ids[:, 20:], **x)[0] for x in given)
            assert torch.equal(first, second) and not torch.equal(first, alone)
            assert given[1]["past_key_values"].get_seq_length() == 30


def reset_cache(model, ids: torch.Tensor) -> TitansCache:
    """Returns a cache that has read two rows, of which the first was reset."""
    cache = read(model, ids)[1]
    cache.reset(torch.tensor([True, False]))
    return cache


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_nothing_of_a_reset_row_stays_in_the_cache(variant):
    """A reset row has zero tensors and count 0, and the others theirs; a mask without True leaves all as it is."""
    model, ids = shared_model(variant), make_ids(2, 21)
    cache, before = reset_cache(model, ids), read(model, ids)[1]
    assert cache.num_tokens_seen.tolist() == [0, 21]
    for x, y in zip(tensors(cache), tensors(before), strict=True):
        assert not x[0].any() and torch.equal(x[1], y[1])
    held = tensors(before)
    before.reset(torch.zeros(2, dtype=torch.bool))
    assert before.rows_to_restart() is None and all(x is y for x, y in zip(held, tensors(before), strict=True))


def test_rows_to_reset_are_a_mask():
    """Indices and masks of other lengths raise an error."""
    cache = read(shared_model("lmm"), make_ids(2, 9))[1]
    for rows in ([0, 1], [True], [True] * 3):
        with pytest.raises((ValueError, RuntimeError), match=r"boolean tensor|must have one entry per row"):
            cache.reset(torch.tensor(rows))
    assert cache.rows_to_restart() is None


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_merging_lies_between(variant):
    """merge() interpolates weights, momentum and anchors alone, also with one row, and leaves `other` as it is."""
    model = shared_model(variant)
    for rows, weight in ((3, 0.25), (1, 0.5), (3, 1)):
        cache, other = read(model, make_ids(3, 21))[1], read(model, make_ids(rows, 34, seed=1))[1]
        ours, theirs = copy.deepcopy(cache), copy.deepcopy(other)
        cache.merge(other, weight)
        assert_same_cache(other, theirs, 0)
        for layer, a, b in zip(cache.layers, ours.layers, theirs.layers, strict=True):
            for name, x in layer.named_tensors().items():
                before, taken = a.named_tensors()[name], b.named_tensors()[name]
                is_memory = any(part in name for part in ("weights", "momentum", "anchor"))
                assert_same(x, (1 - weight) * before + weight * taken if is_memory else before)
        assert cache.get_seq_length() == 21


def test_what_cannot_be_merged():
    """What cannot be merged, or by no such weight, raises an error and leaves the cache."""
    model, ids = shared_model("mag"), make_ids(2, 21)
    cache, reset, recording = read(model, ids)[1], reset_cache(model, ids), read(model, ids)[1]
    kept = copy.deepcopy(tensors(cache))
    recording.activate_past_recording()
    cropped = read(model, ids, cache=copy.copy(recording))[1]
    cropped.crop(-3)
    for ours, other, weight, message in (
        (cache, cache, 1.5, r"`weight` must be from 0 to 1, but is 1\.5"),
        (cache, TitansCache(model.config), 0.5, "`other` has read nothing"),
        (cache, reset, 0.5, "`other` has read nothing since rows were reset"),
        (cache, cropped, 0.5, "`other` has columns to read again"),
        (TitansCache(model.config), cache, 0.5, "this cache has read nothing"),
        (reset, cache, 0.5, "this cache has read nothing since rows were reset"),
        (recording, cache, 0.5, "cannot be undone"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            ours.merge(other, weight)
    assert all(map(torch.equal, kept, tensors(cache)))
