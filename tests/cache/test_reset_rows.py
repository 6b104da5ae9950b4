"""reset(rows): these rows' earlier tokens have no effect, whatever is done with the cache afterwards."""

import copy

import pytest
import torch
from common import ATTENTIONS, assert_same, full_logits, make_ids, read, shared_model, tensors
from covering import covering, in_one_test

from titans_hf import TitansCache

FIRST_ROW = torch.tensor([True, False])


def reset_cache(model, ids: torch.Tensor) -> TitansCache:
    cache = read(model, ids)[1]
    cache.reset(FIRST_ROW)
    return cache


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_a_crop_does_not_bring_it_back(variant):
    """crop() of columns recorded after a reset, all or a part, keeps the reset."""
    model, ids, drafted, more = (shared_model(variant), *(make_ids(2, n, seed=n) for n in (21, 7, 9)))
    for crops in ((-7,), (-3, -4), (-2,)):
        cache = reset_cache(model, ids)
        cache.activate_past_recording()
        read(model, drafted, [2, 5], cache)
        for removed in crops:
            cache.crop(removed)
        kept = drafted[:, : 7 + sum(crops)]
        logits = read(model, more, [4, 5], cache)[0]
        for row, before in enumerate((ids[:1, :0], ids[1:])):
            whole = torch.cat([before, kept[row : row + 1], more[row : row + 1]], dim=1)
            assert_same(logits[row : row + 1], full_logits(model, whole)[:, -9:])


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_nothing_of_it_stays_in_the_cache(variant):
    """A reset row has zero tensors and count 0, and the others theirs."""
    model, ids = shared_model(variant), make_ids(2, 21)
    cache, before = reset_cache(model, ids), read(model, ids)[1]
    assert cache.num_tokens_seen.tolist() == [0, 21]
    for x, y in zip(tensors(cache), tensors(before), strict=True):
        assert not x[0].any() and torch.equal(x[1], y[1])


@covering(1, {"variant": ATTENTIONS, "recorded": [False, True]})
def test_a_file_keeps_the_reset(variant, recorded, tmp_path):
    """A reset row is still reset after saving and loading, also with recorded columns and crop()."""
    model, ids, more = shared_model(variant), make_ids(2, 21), make_ids(2, 9, seed=1)
    cache = reset_cache(model, ids)
    if recorded:
        cache.activate_past_recording()
        read(model, make_ids(2, 6, seed=2), cache=cache)
    cache.save_pretrained(tmp_path, model)
    cache = TitansCache.from_pretrained(tmp_path, model)
    if recorded:
        cache.crop(-2)
        cache.save_pretrained(tmp_path, model)
        cache = TitansCache.from_pretrained(tmp_path, model)
        cache.crop(-4)
    assert cache.num_tokens_seen.tolist() == [0, 21]
    logits = read(model, more, cache=cache)[0]
    assert_same(logits[:1], full_logits(model, more[:1]))
    assert_same(logits[1:], full_logits(model, torch.cat([ids[1:], more[1:]], dim=1))[:, 21:])


def test_rows_that_were_reset_cannot_be_merged():
    """Merging with a row that was reset and has read nothing raises an error."""
    model, ids = shared_model("mag"), make_ids(2, 21)
    pair = (reset_cache(model, ids), read(model, ids)[1])
    for cache, other in (pair, pair[::-1]):
        kept = copy.deepcopy(tensors(cache))
        with pytest.raises(ValueError, match="nothing since rows were reset"):
            cache.merge(other)
        assert all(map(torch.equal, kept, tensors(cache)))
    cache = reset_cache(model, ids)
    read(model, ids[:, :1], cache=cache)
    cache.merge(read(model, ids)[1])


@in_one_test(
    "rows,message",
    [
        (torch.tensor([0, 1]), "boolean tensor"),
        (torch.tensor([True]), r"`rows` must have one entry per row \(2\), but has 1"),
        (torch.tensor([True] * 3), r"`rows` must have one entry per row \(2\), but has 3"),
    ],
)
def test_rows_are_a_mask(rows, message):
    """Indices and masks of other shapes raise an error."""
    cache = read(shared_model("lmm"), make_ids(2, 9))[1]
    with pytest.raises((ValueError, RuntimeError), match=message):
        cache.reset(rows)
    assert cache.rows_to_restart() is None


def test_a_reset_of_no_row_changes_nothing():
    """A mask without True leaves the cache as it is."""
    cache = read(shared_model("lmm"), make_ids(2, 9))[1]
    before = tensors(cache)
    cache.reset(torch.zeros(2, dtype=torch.bool))
    assert cache.rows_to_restart() is None
    assert all(x is y for x, y in zip(before, tensors(cache), strict=True))
