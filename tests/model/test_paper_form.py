"""The paper's form in every field: it decodes, pads, packs, trains and is saved as the default is."""

import pytest
import torch
from common import (
    ATTENTIONS,
    PAPER,
    assert_same,
    assert_same_gradients,
    full_logits,
    gradients,
    left_pad,
    load_aligned,
    make_config,
    make_ids,
    make_model,
)
from initial_values import STD, check_initial_values

from titans_hf import TitansForCausalLM


def paper_model(variant: str, **changes) -> TitansForCausalLM:
    return make_model(variant, **{**PAPER, "num_hidden_layers": 1, **changes})


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_generated_tokens_are_greedy(variant):
    """Generated tokens are the likeliest of the whole text in one call."""
    model, ids = paper_model(variant), make_ids(2, 17)
    answer = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(full_logits(model, answer)[:, 16:-1].argmax(-1), answer[:, 17:])


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_padded_and_packed_rows_are_what_they_are_alone(variant):
    """Rows have the logits that they have alone, in a padded batch and in a packed row, and the same gradients."""
    model, rows = paper_model(variant), [make_ids(31), make_ids(17, seed=1), make_ids(6, seed=2)]
    alone = [full_logits(model, row[None])[0] for row in rows]
    ids, mask = left_pad(rows)
    for ours, row, expected in zip(full_logits(model, ids, mask), rows, alone, strict=True):
        assert_same(ours[len(ours) - len(row) :], expected)
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    packed = torch.cat(rows)[None]
    assert_same(full_logits(model, packed, position_ids=positions)[0], torch.cat(alone))
    model(packed, position_ids=positions).logits.square().sum().backward()
    ours = gradients(model)
    model.zero_grad()
    sum(model(row[None]).logits.square().sum() for row in rows).backward()
    assert_same_gradients(ours, gradients(model))


def test_a_saved_model_is_the_same(tmp_path):
    """A saved model loads with the same logits."""
    model, ids = paper_model("mac"), make_ids(2, 21)
    model.save_pretrained(tmp_path)
    assert torch.equal(full_logits(load_aligned(tmp_path), ids), full_logits(model, ids))


@pytest.mark.parametrize("variant", ["mac", "mag"])
def test_a_new_model_learns_without_nan(variant):
    """A new model starts as documented, and 30 steps in float32 reduce the loss on repeated text."""
    torch.manual_seed(0)
    changes = dict(PAPER, memory_expansion=4, num_persistent_tokens=8)
    model = TitansForCausalLM(make_config(variant, **changes, initializer_range=STD))
    check_initial_values(model)
    ids = make_ids(4, 12, vocab_size=20).repeat(1, 4)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(30):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(x.grad.isfinite().all() for x in model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses


def test_gates_per_layer_are_returned_as_their_mean():
    """The gates of a token are the means over the layers of the memory network, (B, H, T)."""
    model, ids = paper_model("lmm"), make_ids(1, 21)
    with torch.no_grad():
        surprise = model(ids, output_surprise=True).surprise[0]
        layer = model.model.layers[0]
        x, memory = layer.mixer_norm(model.model.embed_tokens(ids)), layer.mixer.memory
        gates = (memory.inner_lr, memory.momentum, memory.forget)
        theta, eta, alpha = (torch.sigmoid(gate(x)).unflatten(-1, (4, 2)).mean(-1).mT for gate in gates)
    assert_same(surprise.inner_lr, model.config.memory_max_lr * theta)
    assert_same(surprise.momentum_decay, eta)
    assert_same(surprise.forget, alpha)
    assert surprise.gradient_norm.shape == (1, 4, 21)
