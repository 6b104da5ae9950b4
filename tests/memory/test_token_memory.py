"""The token memory: it learns what follows within a text, it can be stopped, and its gradients are those of its
equations.
"""

import pytest
import torch
from common import TWO_VARIANTS, assert_same, full_logits, gradients, make_config, make_ids, make_model
from naive_model import naive_forward
from torch.nn.functional import cross_entropy

from titans_hf import TitansForCausalLM

CHANGES = dict(token_memory_features=24, tie_word_embeddings=True)


NAME_LENGTH = 4


def repeated_text(vocab_size: int) -> torch.Tensor:
    """Returns 8 names of `NAME_LENGTH` tokens, in random order, each 10 times."""
    generator = torch.Generator().manual_seed(0)
    names = torch.randperm(vocab_size, generator=generator)[: 8 * NAME_LENGTH].view(8, NAME_LENGTH)
    order = torch.cat([torch.randperm(8, generator=generator) for _ in range(10)])
    return names[order].flatten()


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_an_untrained_model_predicts_what_it_has_read_before(variant):
    """What followed a token before has a lower loss from the second time on, in a model that was never trained."""
    torch.manual_seed(0)
    changes = dict(hidden_size=64, vocab_size=100, initializer_range=0.1, token_memory_features=512)
    model = TitansForCausalLM(make_config(variant, **CHANGES | changes)).eval()
    ids = repeated_text(100)
    losses = cross_entropy(full_logits(model, ids[None, :-1])[0], ids[1:], reduction="none")
    within = torch.arange(1, len(ids)) % NAME_LENGTH > 0  # a name's first token comes after any name
    first, later = losses[:31][within[:31]], losses[127:][within[127:]]
    assert later.mean() < first.mean() - 0.5


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_gradients_equal_those_of_the_equations(variant):
    """The gradient of every parameter, embeddings and hidden states before it included, equals autograd's through the
    token loop.
    """
    model, ids = make_model(variant, num_hidden_layers=1, **CHANGES), make_ids(26)
    weights = torch.randn(26, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (model(ids[None]).logits[0] * weights).sum().backward()
    found = gradients(model)
    model.zero_grad()
    (naive_forward.__wrapped__(model, ids)[0] * weights).sum().backward()
    for name, expected in gradients(model).items():
        assert_same(found[name], expected, 1e-9 * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_memory_off_adds_nothing(variant):
    """With memory_max_lr = 0 the logits are those of the model without a token memory."""
    model, ids = make_model(variant, **CHANGES, memory_max_lr=0), make_ids(2, 30)
    without = TitansForCausalLM(make_config(variant, tie_word_embeddings=True, memory_max_lr=0)).double().eval()
    result = without.load_state_dict(model.state_dict(), strict=False)
    assert not result.missing_keys and all(name.startswith("model.token_memory") for name in result.unexpected_keys)
    assert_same(full_logits(model, ids), full_logits(without, ids))
