"""NeuralMemory as a layer of its own: called with hidden states and the state that its last call returned."""

import pytest
import torch
from common import assert_same, make_config, make_ids, make_model, redraw

from titans_hf import NeuralMemory
from titans_hf.memory_state import named_tensors

T, HIDDEN = 23, 32  # chunks of 4 tokens


@pytest.fixture(scope="module")
def memory():
    return redraw(NeuralMemory(make_config("lmm")).double())


@pytest.fixture(scope="module")
def hidden_states():
    return torch.randn(2, T, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def read(memory, hidden_states, sizes):
    """Returns the joined outputs of calls with the given numbers of tokens, and the last state."""
    outputs, state = [], None
    for piece in hidden_states.split(sizes, dim=1):
        output, state = memory(piece, state)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


def assert_same_state(actual, expected) -> None:
    assert_same(dict(named_tensors(actual)), dict(named_tensors(expected)))


def test_it_is_the_layer_of_the_model():
    """The layer alone equals that of a model without persistent tokens."""
    model, ids = make_model("lmm", num_persistent_tokens=0), make_ids(2, T)
    layer = model.model.layers[0]
    with torch.no_grad():
        hidden_states = layer.mixer_norm(model.model.embed_tokens(ids))
        expected, cache = [], model.model(ids, use_cache=True).cache
        hook = layer.mixer.register_forward_hook(lambda module, inputs, output: expected.append(output[0]))
        model(ids)
        hook.remove()
        output, state = layer.mixer.memory(hidden_states)
    assert_same(output, expected[0])
    assert_same_state(state, cache.layers[0].state)


def test_a_sequence_may_be_cut_anywhere(memory, hidden_states):
    """Outputs and state are independent of how a sequence is split into calls."""
    with torch.no_grad():
        expected, last = memory(hidden_states)
        assert expected.std() > 0.01
        cuts = [[i, T - i] for i in range(1, T)]
        for sizes in (*cuts, [1] * T, [3, 1, 9, 10]):
            output, state = read(memory, hidden_states, sizes)
            assert_same(output, expected)
            assert_same_state(state, last)


def test_other_shapes_are_refused(memory, hidden_states):
    """An input of another shape is refused by name."""
    for wrong in (hidden_states[..., :-1], hidden_states[0], hidden_states[:, :0]):
        with pytest.raises(ValueError, match=r"`hidden_states` must be \(batch, tokens, 32\) .*, but is \("):
            memory(wrong)


def test_a_state_of_other_rows(memory, hidden_states):
    """A state of another batch size raises an error: rows never continue other rows' memories."""
    _, state = memory(hidden_states)
    with pytest.raises((IndexError, RuntimeError)):
        memory(hidden_states[:1], state)
