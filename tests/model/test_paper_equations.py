"""The model equals its equations in `naive_model.py`, and the paper's form those in `paper_model.py`, in float64."""

import pytest
import torch
from common import PAPER, SETTINGS, VARIANTS, assert_same, each_variant, full_logits, make_ids, make_model
from naive_model import naive_forward
from paper_model import paper_forward

LENGTH = 26  # two windows, three segments, six chunks, and a part of each


@pytest.mark.parametrize("variant,changes", each_variant(SETTINGS))
def test_logits_equal_the_naive_model(variant, changes):
    """Logits equal the naive model's in every setting."""
    model, ids = make_model(variant, **(changes and {"num_hidden_layers": 1, **changes})), make_ids(LENGTH)
    assert_same(full_logits(model, ids[None])[0], naive_forward(model, ids)[0])


@pytest.mark.parametrize(
    "variant,changes",
    [
        *((variant, {}) for variant in VARIANTS),
        ("mac", dict(memory_depth=3, memory_expansion=4)),
        ("mag", dict(memory_depth=1)),
    ],
)
def test_the_papers_form_equals_the_paper(variant, changes):
    """With the paper's form in every field, logits equal those of the paper's equations."""
    model, ids = make_model(variant, **{**PAPER, "num_hidden_layers": 1, **changes}), make_ids(LENGTH)
    assert_same(full_logits(model, ids[None])[0], paper_forward(model, ids))


@pytest.mark.parametrize("variant", ["mac", "mag", "mal"])
def test_recorded_attention_equals_the_naive_model(variant):
    """Recorded weights equal the naive model's."""
    model, ids = make_model(variant, attention="eager"), make_ids(LENGTH)
    config = model.config
    with torch.no_grad():
        recorded = model(ids[None], output_attentions=True).attentions
    expected = naive_forward(model, ids)[1]
    assert len(recorded) == len(expected) == config.num_hidden_layers
    for ours, theirs in zip(recorded, expected, strict=True):
        if variant != "mac":  # (heads, T, P + T) by token -> (heads, T, P + W), the window up to each token
            num_persistent, window = config.num_persistent_tokens, config.sliding_window
            padded = torch.nn.functional.pad(theirs[..., num_persistent:], (window - 1, 0))
            band = torch.stack([padded[:, t, t : t + window] for t in range(LENGTH)], 1)
            assert_same(band.sum(-1), theirs[..., num_persistent:].sum(-1))  # nothing lies outside of the window
            theirs = torch.cat([theirs[..., :num_persistent], band], -1)
        assert_same(ours[0], theirs)
        assert_same(ours.sum(-1), torch.ones_like(ours[..., 0]))
