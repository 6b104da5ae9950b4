"""A memory with an activation, an inner loss or a network of one's own: it trains right, and is not lost in silence."""

import pytest
import torch
from common import assert_same, full_logits, make_config, make_ids, make_model, read
from torch.autograd import gradcheck

from titans_hf import NeuralMemory, TitansForCausalLM
from titans_hf.memory_deep import ACTIVATIONS

DEEP = dict(memory_update_rule="chunk", memory_depth=2)


def gated(x, layers):
    """Three layers: the first two are multiplied, the third leads back."""
    return x + layers[2](torch.tanh(layers[0](x)) * layers[1](x))


def absolute(prediction, value):
    """A smooth absolute error, one number a token."""
    return ((prediction - value).square() + 0.1).sqrt().sum(-1)


class Scaled(torch.nn.Module):
    """A network with a parameter of its own."""

    def __init__(self, size: int):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(size, dtype=torch.float64))

    def forward(self, x, layers):
        return layers[1](torch.sin(self.scale * layers[0](x)))


def make_memory(network, loss=None, shapes=None) -> NeuralMemory:
    config = make_config("lmm", hidden_size=4, memory_num_heads=1, memory_chunk_size=3, **DEEP)
    torch.manual_seed(0)
    memory = NeuralMemory(config, network=network, loss=loss, shapes=shapes).double()
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return memory


@pytest.mark.parametrize("network,loss,shapes", [
    (gated, None, [(4, 6), (4, 6), (6, 4)]),
    (None, absolute, None),
    (Scaled(8), absolute, [(4, 8), (8, 4)]),
])  # fmt: skip
def test_gradients_are_those_of_finite_differences(network, loss, shapes):
    """With functions of one's own, the gradient of each parameter, and of the text, is the numeric one."""
    memory = make_memory(network, loss, shapes)
    names, parameters = zip(*memory.named_parameters(), strict=True)
    x = torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True)

    def outputs(x, *given):
        return torch.func.functional_call(memory, dict(zip(names, given, strict=True)), (x,))[0]

    assert gradcheck(outputs, (x, *parameters), atol=1e-6, rtol=1e-4)
    assert not isinstance(network, torch.nn.Module) or "network.scale" in names


def test_calls_of_any_size():
    """A memory of one's own read in two calls is that of one call."""
    memory, x = make_memory(gated, absolute, [(4, 6), (4, 6), (6, 4)]), torch.randn(2, 11, 4, dtype=torch.float64)
    with torch.no_grad():
        whole, state = memory(x)
        first, before = memory(x[:, :4])
        second, after = memory(x[:, 4:], before)
    assert_same(torch.cat([first, second], 1), whole)
    assert_same(after.memory.weights, state.memory.weights)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_by_name(name):
    """Each named activation is in a model's outputs, of both rules, however the text is cut."""
    ids = make_ids(1, 15)
    for changes in ({}, DEEP):
        model = make_model("mag", memory_activation=name, **changes)
        logits = full_logits(model, ids)
        assert_same(read(model, ids, [6, 1, 8])[0], logits)
        other = make_model("mag", memory_activation="relu" if name != "relu" else "gelu", **changes)
        assert (full_logits(other, ids) - logits).abs().max() > 1e-6


def test_a_function_of_ones_own_is_not_saved(tmp_path):
    """A model with a function of one's own cannot be saved, and names the place; by name it can. The delta rule has no
    network that could be set.
    """
    model = TitansForCausalLM(make_config("mac", memory_loss="l2", **DEEP))
    model.save_pretrained(tmp_path / "named")
    model.model.layers[1].mixer.memory.set_rule(loss=absolute)
    with pytest.raises(ValueError, match=r"the loss of model.layers.1.mixer.memory is a function of your own"):
        model.save_pretrained(tmp_path / "own")
    assert not (tmp_path / "own").exists()
    with pytest.raises(ValueError, match="`network` needs `memory_update_rule='chunk'`"):
        NeuralMemory(make_config("lmm"), network=gated)
