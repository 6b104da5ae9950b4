"""One model, in float64: logits are independent of how a sequence is split into calls, and so of later tokens."""

import pytest
import torch
from common import (
    ATTENTIONS,
    SETTINGS,
    VARIANTS,
    assert_same,
    assert_same_cache,
    each_variant,
    full_logits,
    make_ids,
    make_model,
    read,
    shared_model,
)
from covering import covering


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_split_in_two(variant):
    """Logits and state of every split into two calls equal those of one call."""
    model, ids = shared_model(variant), make_ids(2, 40)
    whole, after = read(model, ids)
    assert_same(whole, full_logits(model, ids))
    for split in range(1, 40):
        logits, cache = read(model, ids, [split, 40 - split])
        assert_same(logits, whole)
        assert_same_cache(cache, after)


@pytest.mark.parametrize("variant,changes", each_variant(SETTINGS))
def test_settings_keep_one_model(variant, changes):
    """In every setting, single tokens and calls off all boundaries give the logits and state of one call."""
    model, ids = make_model(variant, **{"num_hidden_layers": 1, **changes}), make_ids(2, 35)
    whole, after = read(model, ids)
    logits, cache = read(model, ids, [1] * 9 + [17, 1, 2, 6])
    assert_same(logits, whole)
    assert_same_cache(cache, after)


@covering(1, {"variant": ATTENTIONS, "pieces": [[40], [1] * 40]})
def test_float32_is_close(variant, pieces):
    """Logits in float32 are within 1e-4 of float64."""
    model, ids = make_model(variant, dtype=torch.float32), make_ids(2, 40)
    logits, _ = read(model, ids, pieces)
    assert logits.dtype == torch.float32
    assert_same(logits.double(), full_logits(shared_model(variant), ids), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_long_sequence_in_pieces(variant):
    """Calls over 3,000 tokens, and 800 single tokens, give the logits of one call."""
    model, ids = shared_model(variant), make_ids(1, 3000)
    whole = full_logits(model, ids)
    assert_same(read(model, ids, [999, 1, 1000, 7, 993])[0], whole)
    assert_same(read(model, ids[:, :800], [1] * 800)[0], whole[:, :800])
