"""reset(rows): these rows' earlier tokens have no effect, whatever is done with the cache afterwards."""

import copy

import pytest
import torch
from common import ATTENTIONS, make_ids, read, shared_model, tensors
from covering import in_one_test

from titans_hf import TitansCache

FIRST_ROW = torch.tensor([True, False])


def reset_cache(model, ids: torch.Tensor) -> TitansCache:
    cache = read(model, ids)[1]
    cache.reset(FIRST_ROW)
    return cache


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_nothing_of_it_stays_in_the_cache(variant):
    """A reset row has zero tensors and count 0, and the others theirs."""
    model, ids = shared_model(variant), make_ids(2, 21)
    cache, before = reset_cache(model, ids), read(model, ids)[1]
    assert cache.num_tokens_seen.tolist() == [0, 21]
    for x, y in zip(tensors(cache), tensors(before), strict=True):
        assert not x[0].any() and torch.equal(x[1], y[1])


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
