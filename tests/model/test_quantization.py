"""Transformers' quantisers: linear layers can be replaced, gates are left out, and the memory's state stays float32."""

import pytest
import torch
from common import TWO_VARIANTS, assert_same, full_logits, make_ids, make_model, read, shared_model
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from titans_hf.cache_files import model_fingerprint

GATES = ("inner_lr", "momentum", "forget")


class Replacement(nn.Module):
    """Computes a linear layer as those of quantisers do: from its input alone, in the input's dtype."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_every_linear_layer_can_be_replaced(variant):
    """A model keeps its logits if linear layers take their input alone, and no gate is one."""
    model, ids = make_model(variant), make_ids(2, 21)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert len(linears) > 10
    assert not [name for name in linears if name.rpartition(".")[2] in GATES]
    for name, module in linears.items():
        model.set_submodule(name, Replacement(module))
    expected = full_logits(shared_model(variant), ids)
    assert_same(full_logits(model, ids), expected)
    assert_same(read(model, ids, [9, 1, 11])[0], expected)


def test_fingerprint_of_tensors_put_together():
    """The fingerprint of a tensor that consists of others, as quantisers make them, depends on each of these."""
    model, hashes = make_model("lmm"), []
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    for scale in (weight, weight.clone(), weight + 1e-6):
        model.model.layers[0].mlp.up_proj.weight = nn.Parameter(TwoTensor(weight, scale))
        hashes.append(model_fingerprint(model)["weights"])
    assert hashes[0] == hashes[1] != hashes[2]
