"""Forms of the memory whose backward is autograd's, against the autograd token loop, in float64."""

import pytest
import torch
from covering import covering
from memorize_runs import (
    CHUNK,
    GATES,
    B,
    H,
    assert_equals_reference,
    assert_same,
    make_decay_target,
    make_inputs,
    make_state,
    per_layer,
    run,
    scale_steps,
)

from titans_hf import UpdateRule, memorize_reference
from titans_hf.memory_ops import CHECKPOINT_INTERVAL, memorize
from titans_hf.memory_state import tensors_of


@covering(
    2,
    {
        "depth": [1, 2, 3],
        "error_clip,gates": [(None, "head"), (1.0, "head"), (None, "layer")],
        "num_seen": [[0, 0, 0], [5, 0, 3]],
        "length": [1, 3, 13, 22],
    },
)
def test_the_residual_network_equals_reference(depth, gates, error_clip, num_seen, length):
    """M(x) = x + LN(MLP(x)) and its update equal the token loop with every gradient."""
    torch.manual_seed(length)
    state, inputs = make_state(depth, num_seen), make_inputs(length)
    inputs = per_layer(inputs, depth) if gates == "layer" else inputs
    inputs = scale_steps(inputs, 0.1)
    for decay_target in ((), make_decay_target(depth)):
        assert_equals_reference(inputs, state, UpdateRule(error_clip, network="residual"), decay_target)


@covering(
    2, {"depth": [1, 2, 3], "delta_rule": [False, True], "num_seen": [[0, 0, 0], [5, 0, 3]], "length": [1, 3, 13, 22]}
)
def test_gates_per_layer_equal_reference(depth, delta_rule, num_seen, length):
    """An MLP whose layers have gates of their own equals the token loop with every gradient."""
    torch.manual_seed(length)
    state, inputs = make_state(depth, num_seen), per_layer(make_inputs(length), depth)
    for decay_target in ((), make_decay_target(depth)):
        assert_equals_reference(inputs, state, UpdateRule(1.0, delta_rule), decay_target)


def test_gates_per_layer_that_are_equal_are_those_of_the_head():
    """Equal gates in every layer give what gates per head give."""
    torch.manual_seed(0)
    state, inputs = make_state(3, [5, 0, 3]), make_inputs(13)
    layers = inputs._replace(**{gate: getattr(inputs, gate)[..., None].expand(B, H, 13, 3) for gate in GATES})
    rule = UpdateRule(1.0)
    assert_same(run(memorize, layers, state, rule)[:1], run(memorize, inputs, state, rule)[:1])


def test_training_by_autograd_keeps_the_states_that_some_chunks_start_with():
    """Where autograd makes the backward, training stores the inputs twice and the state of every CHECKPOINT_INTERVAL-th
    chunk.
    """
    state, inputs = make_state(2, [0, 0, 0]), make_inputs(10 * CHUNK).map(torch.Tensor.requires_grad_)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        memorize(inputs, state, UpdateRule(1.0, network="residual"), chunk_size=CHUNK)
    of_states = -(-10 // CHECKPOINT_INTERVAL) * sum(x.numel() for x in tensors_of(state))
    assert sum(x.numel() for x in kept.values()) < of_states + 3 * sum(x.numel() for x in inputs if x is not None)


@pytest.mark.parametrize("compute", [memorize, memorize_reference])
def test_rules_that_cannot_be(compute):
    """The delta rule with another network than an MLP, and an unknown network, are refused."""
    state, inputs = make_state(1, [0, 0, 0]), make_inputs(3)
    for rule, message in (
        (UpdateRule(None, True, "residual"), "`delta_rule` must be False with the network 'residual'"),
        (UpdateRule(None, network="resid"), "`network` must be one of mlp, residual, but is 'resid'"),
    ):
        with pytest.raises(ValueError, match=message):
            compute(inputs, state, rule, chunk_size=CHUNK)
