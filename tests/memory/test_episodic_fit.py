"""Fitting the episodic memory: it finds the keys and the gate that lower the loss, and trains nothing else."""

import pytest
import torch
from common import FORMS, full_logits, make_config, make_ids, make_model
from torch.nn.functional import cross_entropy

from titans_hf import TitansForCausalLM, fit_episodic_memory

CHANGES = FORMS["episodic memory"] | dict(token_memory_entries=300, token_memory_key_size=16)


def names_text(seed: int, number: int = 60) -> torch.Tensor:
    """Returns names of four tokens, in random order: after its first token, a name that was read before is known."""
    generator = torch.Generator().manual_seed(seed)
    names = torch.randint(50, (8, 4), generator=generator)
    return names[torch.randint(8, (number,), generator=generator)].flatten()


def small_model() -> TitansForCausalLM:
    torch.manual_seed(0)
    return TitansForCausalLM(make_config("mag", **CHANGES, initializer_range=0.1)).eval()


def loss(model, ids) -> float:
    return cross_entropy(full_logits(model, ids[None, :-1])[0], ids[1:]).item()


def test_a_fit_lowers_the_loss_of_other_texts():
    """A fitted memory gains on texts that it was not fitted to, and reports what a plain evaluation finds."""
    model, texts, other = small_model(), [names_text(1), names_text(2, 50)], names_text(3)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    first = loss(model, other)
    result = fit_episodic_memory(model, texts, progress=False)
    assert loss(model, other) < first - 0.5
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {f"model.episodic_memory.{x}" for x in ("center", "projection", "gate_weight", "gate_bias")}
    for ids, without, with_memory in zip(texts, result.before, result.after, strict=True):
        losses = cross_entropy(full_logits(model, ids[None])[0, :-1], ids[1:], reduction="none")
        torch.testing.assert_close(with_memory.float(), losses, rtol=0, atol=1e-4)
        assert with_memory.mean() < without.mean() - 0.5


def test_keys_are_principal_directions():
    """Center and projection are the mean and the principal directions of y: the products of the centred y with the
    columns of W are uncorrelated, with deviations to the power of 1/2.
    """
    model, ids = make_model("mag", **CHANGES), make_ids(700)
    fit_episodic_memory(model, [ids], key_tokens=700, progress=False)
    memory = model.model.episodic_memory
    with torch.no_grad():
        y = model.model(ids[None], defer_episodic_memory=True).mlp_inputs[0]
        torch.testing.assert_close(memory.center, y.mean(0))
        projected = (y - memory.center) @ memory.projection
        covariance = projected.T @ projected / len(y)
    torch.testing.assert_close(covariance, covariance.diagonal().diag(), rtol=0, atol=1e-8)
    variances = torch.linalg.eigvalsh((y - y.mean(0)).T @ (y - y.mean(0)) / len(y))[-16:]
    torch.testing.assert_close(covariance.diagonal(), variances.sqrt())


def test_the_gate_is_at_the_minimum():
    """At the fitted gate, the gradient of the mean loss of the texts with respect to weights and bias is 0, also with a
    weight for each token.
    """
    model, ids = make_model("mag", **CHANGES), names_text(4)
    weights = torch.rand(len(ids), generator=torch.Generator().manual_seed(0)) * (torch.arange(len(ids)) % 3 > 0)
    fit_episodic_memory(model, [ids], [weights], progress=False)
    losses = cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
    memory = model.model.episodic_memory
    found = torch.autograd.grad(
        (losses * weights[1:]).sum() / weights[1:].sum(), [memory.gate_weight, memory.gate_bias]
    )
    assert max(x.abs().max() for x in found) < 1e-4


def test_bad_arguments():
    """What cannot be fitted is refused by name."""
    model = small_model()
    with pytest.raises(ValueError, match="`token_memory_entries` of its config is 0"):
        fit_episodic_memory(make_model("mag"), [make_ids(9)])
    with pytest.raises(ValueError, match="`documents` must be tensors"):
        fit_episodic_memory(model, [make_ids(1)])
    with pytest.raises(ValueError, match="`weights` must have one number"):
        fit_episodic_memory(model, [make_ids(9)], [torch.ones(8)])
