"""Fitting the episodic memory: it finds the keys and the gate that lower the loss, and trains nothing else."""

import pytest
import torch
from common import FORMS, full_logits, make_config, make_ids, make_model
from torch.nn.functional import cross_entropy

from titans_hf import TitansForCausalLM, episodic_fit, fit_episodic_memory
from titans_hf.episodic_memory import EpisodicMemory

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
    assert changed == {f"model.episodic_memory.{x}" for x in EpisodicMemory.PARAMETERS}
    for ids, columns, without, with_memory in zip(texts, *result, strict=True):
        losses = cross_entropy(full_logits(model, ids[None])[0, :-1], ids[1:], reduction="none")
        torch.testing.assert_close(with_memory, losses[columns], rtol=0, atol=1e-4)
        assert len(columns) > 190 and with_memory.mean() < without.mean() - 0.5


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


def test_the_read_out_is_at_a_minimum():
    """No change of a fitted number lowers the weighted mean loss by more than the jumps of the best entry do."""
    model, ids = make_model("mag", **CHANGES), names_text(4, 200)
    weights = torch.rand(len(ids), generator=torch.Generator().manual_seed(0)) * (torch.arange(len(ids)) % 3 > 0)
    fit_episodic_memory(model, [ids], [weights], progress=False)

    def mean_loss() -> float:
        losses = cross_entropy(full_logits(model, ids[None])[0, :-1], ids[1:], reduction="none")
        return ((losses * weights[1:]).sum() / weights[1:].sum()).item()

    memory, fitted = model.model.episodic_memory, mean_loss()
    for parameter in (memory.log_sharpness, memory.entry_weight, memory.gate_weight, memory.gate_bias):
        for i in range(len(parameter)):
            for change in (0.3, -0.6):
                parameter.data[i] += change
                assert mean_loss() > fitted - 3e-3
            parameter.data[i] += 0.3


def test_some_columns_of_a_long_text_are_enough(monkeypatch):
    """Where a text has more columns than the fit looks at, every n-th is taken, and the loss falls all the same."""
    monkeypatch.setattr(episodic_fit, "NUM_COLUMNS", 60)
    model, text, other = small_model(), names_text(1), names_text(3)
    first = loss(model, other)
    (columns,) = fit_episodic_memory(model, [text], progress=False).columns
    assert columns.diff().unique().tolist() == [4] and loss(model, other) < first - 0.3


def test_bad_arguments():
    """What cannot be fitted is refused by name."""
    model = small_model()
    with pytest.raises(ValueError, match="`token_memory_entries` of its config is 0"):
        fit_episodic_memory(make_model("mag"), [make_ids(9)])
    with pytest.raises(ValueError, match="`documents` must be tensors"):
        fit_episodic_memory(model, [make_ids(1)])
    with pytest.raises(ValueError, match="`weights` must have one number"):
        fit_episodic_memory(model, [make_ids(9)], [torch.ones(8)])
