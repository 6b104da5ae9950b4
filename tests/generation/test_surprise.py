"""output_surprise: the norm of autograd's gradient and the gates, for every token and for tokens alone."""

import pytest
import torch
from common import (
    ATTENTIONS,
    PAPER,
    TWO_VARIANTS,
    VARIANTS,
    assert_same,
    left_pad,
    make_ids,
    make_model,
    read,
    shared_model,
)
from covering import in_one_test

from titans_hf import TitansCache
from titans_hf.mixers_titans import LayerSurprise

QUANTITIES = ("gradient_norm", "inner_lr", "momentum_decay", "forget")
GREEDY = dict(max_new_tokens=9, do_sample=False, pad_token_id=0)


def stacked(surprise: tuple[LayerSurprise, ...]) -> torch.Tensor:
    """(layers, quantities, B, H, T)"""
    return torch.stack([torch.stack([getattr(layer, name) for name in QUANTITIES]) for layer in surprise])


@torch.no_grad()
def surprise_of(model, ids, cache=None, **kwargs) -> torch.Tensor:
    return stacked(model(ids, cache=cache, output_surprise=True, **kwargs).surprise)


@pytest.mark.parametrize("variant", VARIANTS)
def test_surprise_does_not_depend_on_how_a_sequence_is_cut(variant):
    """The surprise of a token is the same in one call, several, or token by token."""
    model, ids = shared_model(variant), make_ids(2, 45)
    whole = surprise_of(model, ids)
    assert whole.shape == (2, len(QUANTITIES), 2, 4, 45)
    assert (whole[:, 0] > 0).all() and whole.std(-1).min() > 1e-4  # of every quantity, from token to token
    for sizes in ([13, 32], [5, 1, 1, 9, 29], [1] * 45):
        cache = TitansCache(model.config)
        assert_same(torch.cat([surprise_of(model, piece, cache) for piece in ids.split(sizes, 1)], dim=-1), whole)


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_padding_does_not_surprise(variant):
    """Tokens of padded rows have their own values and padding has 0."""
    model, rows = shared_model(variant), [make_ids(31), make_ids(17, seed=1)]
    ids, mask = left_pad(rows)
    cache = TitansCache(model.config)
    found = surprise_of(model, ids, cache, attention_mask=mask)
    for i, row in enumerate(rows):
        assert_same(found[:, :, i, :, 31 - len(row) :], surprise_of(model, row[None])[:, :, 0])
    assert not found[:, :, 1, :, :14].any()
    step = surprise_of(model, make_ids(2, 1), cache, attention_mask=torch.tensor([[1], [0]]))
    assert step[:, :2, 0].all() and not step[:, :, 1].any()


@pytest.mark.parametrize("changes", [{}, {**PAPER, "memory_depth": 2}], ids=["default", "paper"])
def test_the_gates_are_those_of_the_layer(changes):
    """inner_lr, momentum_decay and forget are the layer's theta, eta and alpha, or the means of a layer's own gates."""
    model, ids = make_model("lmm", **changes), make_ids(1, 21)
    found = surprise_of(model, ids)[0]
    layer = model.model.layers[0]
    with torch.no_grad():
        x, memory = layer.mixer_norm(model.model.embed_tokens(ids)), layer.mixer.memory
        gates = (memory.inner_lr, memory.momentum, memory.forget)
        theta, eta, alpha = (torch.sigmoid(gate(x)).unflatten(-1, (4, -1)).mean(-1).mT for gate in gates)
    if not changes:  # the default is the delta rule, in its stable form
        eta = eta / 3
        theta = theta * (1 - eta)
    assert_same(found[1:], torch.stack([model.config.memory_max_lr * theta, eta, alpha]))


@in_one_test("switch", [dict(memory_momentum=False), dict(memory_forget=False), dict(memory_max_lr=0)])
def test_gates_that_are_off(switch):
    """A gate that is off is reported as 0, and no other."""
    found = dict(zip(QUANTITIES, surprise_of(make_model("mag", **switch), make_ids(1, 9))[0], strict=True))
    off = {"memory_momentum": ["momentum_decay"], "memory_forget": ["forget"], "memory_max_lr": QUANTITIES[1:]}
    assert [name for name in QUANTITIES if not found[name].any()] == [*off[next(iter(switch))]]


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_it_is_told_on_request_alone(variant):
    """Surprise is returned only on request, detached, and leaves loss and gradients the same."""
    model, ids = make_model(variant).train(), make_ids(2, 21)
    plain = model(ids, labels=ids)
    assert plain.surprise is None and "surprise" not in plain
    asked = model(ids, labels=ids, output_surprise=True)
    assert torch.equal(asked.loss, plain.loss)
    parts = [update for layer in asked.surprise for updates, _ in layer.parts for update in updates]
    kept = [x for surprise, gates in parts for x in (surprise, *gates) if x is not None]
    assert not any(x.requires_grad for x in (stacked(asked.surprise), *kept))
    assert_same(stacked(asked.surprise), surprise_of(model, ids))
    gradients = [torch.autograd.grad(x.loss, model.parameters()) for x in (plain, asked)]
    assert all(map(torch.equal, *gradients))


def test_columns_that_are_read_again_are_told_once():
    """After crop() a call returns the surprise of its own tokens alone."""
    model, ids = shared_model("mag"), make_ids(2, 30)
    cache = read(model, ids[:, :13])[1]
    cache.activate_past_recording()
    read(model, ids[:, 13:20], cache=cache)
    cache.crop(-3)
    assert_same(surprise_of(model, ids[:, 17:], cache), surprise_of(model, ids)[..., 17:])
