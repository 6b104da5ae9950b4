"""Training: loss, gradients, recorded tensors, and truncated backpropagation through time."""

import re

import pytest
import torch
from common import (
    ATTENTIONS,
    PAPER,
    VARIANTS,
    assert_same,
    assert_same_gradients,
    full_logits,
    gradients,
    left_pad,
    make_ids,
    make_model,
    read,
)
from covering import covering

from titans_hf import TitansCache


@covering(1, {"variant": VARIANTS, "changes": [{}, PAPER]})
def test_every_parameter_has_a_gradient_with_memory_off(variant, changes):
    """With memory off, every parameter has a gradient, 0 for the gates: DDP fails for a parameter without one."""
    model, ids = make_model(variant, memory_max_lr=0, **changes), make_ids(2, 20)
    model(ids, labels=ids).loss.backward()
    found = gradients(model)
    gates = [x for name, x in found.items() if re.search("inner_lr|momentum|forget", name)]
    assert None not in found.values() and gates and not any(x.any() for x in gates)


@pytest.mark.parametrize("variant,changes", [*((variant, {}) for variant in VARIANTS), ("mac", PAPER)])
def test_gradients_are_those_of_finite_differences(variant, changes):
    """Gradients equal finite differences, through the memory's updates."""
    model, ids = make_model(variant, num_hidden_layers=1, **changes), make_ids(1, 13)
    direction = torch.randn(13, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (model(ids).logits[0] * direction).sum().backward()
    step = 1e-6
    for seed, parameter in enumerate(model.parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.add_(sign * step * noise)
                values.append((full_logits(model, ids)[0] * direction).sum())
                parameter.sub_(sign * step * noise)
        numeric, exact = (values[0] - values[1]) / (2 * step), (parameter.grad * noise).sum()
        assert abs(numeric - exact) < 1e-5 * max(1.0, abs(exact)), list(model.state_dict())[seed]


@covering(2, {"variant": VARIANTS, "reentrant,padded": [(False, True), (True, False)], "changes": [{}, PAPER]})
def test_gradient_checkpointing_changes_nothing(variant, reentrant, padded, changes):
    """Activation checkpointing keeps logits and gradients, padded or not."""
    ids, mask = left_pad([make_ids(20), make_ids(13, seed=1)]) if padded else (make_ids(2, 20), None)
    found = []
    for checkpointing in (False, True):
        model = make_model(variant, **changes).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            assert model.is_activation_checkpointing
        output = model(ids, attention_mask=mask, labels=ids, use_cache=False)
        output.loss.backward()
        found.append((output.logits.detach(), gradients(model)))
    assert_same(found[1][0], found[0][0])
    assert_same_gradients(found[1][1], found[0][1])


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_gradient_checkpointing_with_a_cache(variant):
    """In training with activation checkpointing, a cache is used without gradients, and refused with them."""
    model, ids = make_model(variant), make_ids(2, 24)
    expected, options = full_logits(model, ids)[:, 11:], dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    generated = model.generate(ids, **options)
    cache = read(model, ids[:, :11])[1]
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="`cache` cannot be used in training with gradient checkpointing"):
        model(ids[:, 11:], cache=cache)
    with torch.no_grad():
        assert_same(model(ids[:, 11:], cache=cache).logits, expected)
    assert cache.get_seq_length() == 24
    assert torch.equal(model.generate(ids, **options), generated)


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_gradients_cross_calls_until_detached(variant):
    """Gradients pass through a cache as in one call, and detach() stops them."""
    model, ids = make_model(variant).train(), make_ids(2, 23)
    model(ids).logits.square().mean(-1).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    cache = TitansCache(model.config)
    sum(model(x, cache=cache).logits.square().mean(-1).sum() for x in ids.split([9, 1, 13], 1)).backward()
    assert_same_gradients(gradients(model), expected)
    for detached in (False, True):
        embeds = model.model.embed_tokens(ids).detach().requires_grad_()
        cache = TitansCache(model.config)
        first = model(inputs_embeds=embeds[:, :9], cache=cache).logits
        if detached:
            assert cache.detach() is cache
        second = model(inputs_embeds=embeds[:, 9:], cache=cache).logits
        gradient = torch.autograd.grad(second.square().sum(), embeds, retain_graph=True)[0]
        assert (gradient[:, 9:].abs().amax(-1) > 0).all()
        assert (gradient[:, :9].abs().amax(-1) > 0).all() if not detached else not gradient[:, :9].any()
        assert torch.autograd.grad(first.square().sum(), embeds)[0].any()  # the first call's graph is intact


@pytest.mark.parametrize("variant", ["mac", "mag", "mal"])
def test_attentions_over_pieces(variant):
    """Recorded attention weights are the same in one call, several and padded rows."""
    model, rows = make_model(variant, attention="eager"), [make_ids(21), make_ids(13, seed=1)]
    ids, mask = left_pad(rows)
    cache = TitansCache(model.config)
    width = 3 + (16 if variant == "mac" else 12)
    with torch.no_grad():
        batch = model(ids, attention_mask=mask, output_attentions=True).attentions
        whole = model(rows[0][None], output_attentions=True).attentions
        calls = rows[0][None].split([9, 1, 11], 1)
        pieces = [model(x, cache=cache, output_attentions=True).attentions for x in calls]
        alone = model(rows[1][None], output_attentions=True).attentions
    for layer in range(2):
        assert whole[layer].shape == (1, 4, 21, width) and batch[layer].shape == (2, 4, 21, width)
        assert_same(torch.cat([piece[layer] for piece in pieces], 2), whole[layer])
        assert_same(batch[layer][:1], whole[layer])
        assert_same(batch[layer][1:, :, 8:], alone[layer])
