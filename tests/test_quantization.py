"""Transformers' quantisers replace linear layers of the model."""

import pytest
import torch
from common import VARIANTS, assert_same, full_logits, make_ids, make_model, read, shared_model
from torch import nn

GATES = ("inner_lr", "momentum", "forget")


class Replacement(nn.Module):
    """Computes a linear layer as those of quantisers do: from its input alone, in the input's dtype."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_linear_layer_can_be_replaced(variant):
    """A model keeps its logits if linear layers take their input alone: otherwise quantisers' layers would fail
    in it.
    """
    model, ids = make_model(variant), make_ids(2, 21)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert any(name.endswith(GATES) for name in linears)
    for name, module in linears.items():
        model.set_submodule(name, Replacement(module))
    expected = full_logits(shared_model(variant), ids)
    assert_same(full_logits(model, ids), expected)
    assert_same(read(model, ids, [9, 1, 11])[0], expected)
