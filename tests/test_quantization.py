"""Transformers' quantisers on the model: linear layers are replaced, and the memory's gates are not."""

import pytest
import torch
from common import VARIANTS, assert_same, full_logits, make_ids, make_model, read, shared_model
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

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


@pytest.mark.parametrize("variant", VARIANTS)
def test_gates_are_not_quantised(variant):
    """Quantisers convert projections and leave the gates: otherwise the memory's step sizes and decay would be
    rounded.
    """
    model = shared_model(variant)
    excluded = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert should_convert_module(name, excluded) == (not name.endswith((*GATES, "lm_head"))), name
