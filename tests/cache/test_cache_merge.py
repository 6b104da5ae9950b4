"""Merging caches: a mean of memories, and what cannot be merged."""

import copy

import pytest
from common import TWO_VARIANTS, assert_same, assert_same_cache, make_ids, make_model, read, shared_model

from titans_hf import TitansCache


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_merging_lies_between(variant):
    """merge() interpolates weights, momentum and anchors alone and leaves the other cache unchanged."""
    model = shared_model(variant)
    cache, other = read(model, make_ids(2, 21))[1], read(model, make_ids(2, 34, seed=1))[1]
    ours, theirs = copy.deepcopy(cache), copy.deepcopy(other)
    cache.merge(other, 0.25)
    assert_same_cache(other, theirs, 0)
    for layer, a, b in zip(cache.layers, ours.layers, theirs.layers, strict=True):
        found, before, taken = (dict(x.named_tensors()) for x in (layer, a, b))
        for name, x in found.items():
            memory = any(part in name for part in ("weights", "momentum", "anchor"))
            assert_same(x, 0.75 * before[name] + 0.25 * taken[name] if memory else before[name])
    assert cache.get_seq_length() == 21
    full = copy.copy(ours)
    full.merge(other, 1)
    for layer, b in zip(full.layers, theirs.layers, strict=True):
        assert_same(layer.state.memory.weights, b.state.memory.weights)
    mean = copy.copy(ours)
    for n, cache in enumerate((other, ours), start=2):
        mean.merge(cache, 1 / n)
    for layer, a, b in zip(mean.layers, ours.layers, theirs.layers, strict=True):
        pairs = zip(layer.state.memory.weights, a.state.memory.weights, b.state.memory.weights, strict=True)
        for x, y, z in pairs:
            assert_same(x, (2 * y + z) / 3)


def test_one_memory_is_merged_into_many():
    """A cache of one row merges into every row of another."""
    model = shared_model("mag")
    cache, other = read(model, make_ids(3, 21))[1], read(model, make_ids(1, 9, seed=1))[1]
    before = copy.copy(cache)
    cache.merge(other)
    for x, y, z in zip(*(c.layers[1].state.memory.weights for c in (cache, before, other)), strict=True):
        assert_same(x, (y + z) / 2)


def test_what_cannot_be_merged():
    """Merging with a wrong weight, model, batch size, empty cache or recorded columns raises an error."""
    model, ids = shared_model("mag"), make_ids(2, 21)
    cache = read(model, ids)[1]
    with pytest.raises(ValueError, match=r"`weight` must be from 0 to 1, but is 1\.5"):
        cache.merge(cache, 1.5)
    for other, message in (
        (read(shared_model("mal"), ids)[1], "same model, but its variant is mal, not mag"),
        (
            read(make_model("mag", memory_update_rule="chunk"), ids)[1],
            "its memory_update_rule is chunk, not delta",
        ),
        (TitansCache(model.config), "`other` has read nothing"),
        (None, "`other` must be a TitansCache of .*, but is a NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.merge(other)
    with pytest.raises(ValueError, match="this cache has read nothing"):
        TitansCache(model.config).merge(TitansCache(model.config))
    cropped = copy.copy(cache)
    cropped.activate_past_recording()
    with pytest.raises(RuntimeError, match="cannot be undone"):
        cropped.merge(cache)
    read(model, ids, cache=cropped)
    cropped.crop(-3)
    with pytest.raises(ValueError, match="`other` has columns to read again"):
        cache.merge(cropped)
