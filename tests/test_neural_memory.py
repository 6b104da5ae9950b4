"""NeuralMemory alone: a layer that is called with hidden states and the state that its last call returned."""

import pytest
import torch
from common import assert_same, gradients, make_config, make_ids, make_model, redraw

from titans_hf import NeuralMemory
from titans_hf.layer_state import named_tensors

T, HIDDEN = 23, 32  # chunks of 4 tokens


@pytest.fixture(scope="module")
def memory():
    return redraw(NeuralMemory(make_config("lmm")).double())


@pytest.fixture(scope="module")
def hidden_states():
    return torch.randn(2, T, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def read(memory, hidden_states, sizes):
    """The outputs of calls with so many tokens each, joined, and the last state."""
    outputs, state = [], None
    for piece in hidden_states.split(sizes, dim=1):
        output, state = memory(piece, state)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


def assert_same_state(actual, expected) -> None:
    for (_, x), (_, y) in zip(named_tensors(actual), named_tensors(expected), strict=True):
        assert_same(x, y)


def test_it_is_the_layer_of_the_model():
    """Property: alone it computes what it computes in a model without persistent tokens. Else it is another layer."""
    model, ids = make_model("lmm", num_persistent_tokens=0), make_ids(2, T)
    layer = model.model.layers[0]
    with torch.no_grad():
        hidden_states = layer.mixer_norm(model.model.embed_tokens(ids))
        expected, cache = [], model.model(ids, use_cache=True).past_key_values
        hook = layer.mixer.register_forward_hook(lambda module, inputs, output: expected.append(output.hidden_states))
        model(ids)
        hook.remove()
        output, state = layer.mixer.memory(hidden_states)
    assert_same(output, expected[0])
    assert_same_state(state, cache.layers[0].state)


def test_a_sequence_may_be_cut_anywhere(memory, hidden_states):
    """Property: outputs and state are independent of how a sequence is cut into calls. Else a state loses tokens."""
    with torch.no_grad():
        expected, last = memory(hidden_states)
        assert expected.std() > 0.01
        cuts = [[i, T - i] for i in range(1, T)]
        for sizes in (*cuts, [1] * T, [3, 1, 9, 10]):
            output, state = read(memory, hidden_states, sizes)
            assert_same(output, expected)
            assert_same_state(state, last)


def test_gradients_do_not_depend_on_the_cut(memory, hidden_states):
    """Property: the gradient goes through the state. Else a memory is trained to keep nothing from call to call."""
    found = []
    for sizes in ([T], [9, 14], [4, 19]):
        memory.zero_grad()
        read(memory, hidden_states, sizes)[0].square().sum().backward()
        found.append(gradients(memory))
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert gradient.any(), name
            assert_same(other[name], gradient, 1e-9 * max(1.0, gradient.abs().max().item()))


def test_a_state_can_be_continued_in_several_ways(memory, hidden_states):
    """Property: a call leaves its state as it is. Else branches of one state affect each other."""
    with torch.no_grad():
        _, state = memory(hidden_states[:, :9])
        first, _ = memory(hidden_states[:, 9:], state)
        memory(hidden_states[:, :5], state)
        again, _ = memory(hidden_states[:, 9:], state)
    assert torch.equal(first, again)


def test_a_new_layer_is_initialised():
    """Property: a new layer's output is 0, as the memory's last layer is, and it learns. Else it has the values of
    whatever was in the computer's memory.
    """
    torch.manual_seed(0)
    layer = NeuralMemory(make_config("lmm", memory_conv_noise=0.0))
    *hidden, last = layer.initial_weights.parameters()
    assert not last.any() and all(0.5 < w.std() * w.shape[-2] ** 0.5 < 2 for w in hidden)
    assert torch.equal(layer.k_conv.weight[:, 0], torch.tensor([0.0, 0, 1, 0]).expand(HIDDEN, -1))
    output, state = layer(torch.randn(2, 8, HIDDEN))
    assert not output[:, 0].any() or output[:, 0].abs().max() < 1e-2
    assert output[:, -1].any() and state.memory.num_seen.tolist() == [8, 8]


def test_a_half_precision_layer_has_a_state_in_float32(hidden_states):
    """Property: outputs have the layer's dtype and the state float32. Else small updates are rounded away."""
    output, state = NeuralMemory(make_config("lmm")).bfloat16()(hidden_states.bfloat16())
    assert output.dtype == torch.bfloat16
    assert {x.dtype for x in state.memory.weights} == {torch.float32}


@pytest.mark.parametrize("shape", [(T, HIDDEN), (2, 0, HIDDEN), (0, 3, HIDDEN), (2, T, HIDDEN + 1)])
def test_hidden_states_of_another_shape(memory, shape):
    """Property: the error names the argument and its shape. Else it comes from a matrix product."""
    with pytest.raises(ValueError, match=rf"`hidden_states` must be \(rows, tokens, {HIDDEN}\)"):
        memory(torch.zeros(shape, dtype=torch.float64))


def test_a_state_of_other_rows(memory, hidden_states):
    """Property: the error names the state and its number of rows. Else rows continue other rows, or it is unclear."""
    _, state = memory(hidden_states)
    with pytest.raises(ValueError, match="`state` must have 1 rows as `hidden_states`, but has 2"):
        memory(hidden_states[:1], state)
