"""The dual form and the single step against the autograd token loop, in float64."""

from dataclasses import replace

import pytest
import torch
from covering import covering
from memorize_runs import (
    CHUNK,
    TOLERANCE,
    B,
    D,
    H,
    assert_equals_reference,
    assert_same,
    make_decay_target,
    make_inputs,
    make_state,
    per_layer,
    run,
    scale_steps,
    without_momentum,
)

from titans_hf.memory_network import UpdateRule, gradient_factors, gradient_norm, layer_shapes
from titans_hf.memory_ops import CHECKPOINT_INTERVAL, memorize, memorize_on_grid
from titans_hf.memory_reference import memorize_reference
from titans_hf.memory_state import MemoryInputs, MemoryState, tensors_of
from titans_hf.token_grid import TokenGrid


@covering(
    2,
    {
        "depth": [1, 2, 3],
        "error_clip": [None, 1.0],
        "num_seen": [[0, 0, 0], [2, 2, 2], [5, 0, 3]],
        "length": [1, 3, 4, 13, 22],
    },
)
def test_dual_form_equals_reference(depth, error_clip, num_seen, length):
    """The dual form equals the token loop, with every gradient, at every phase of the chunk."""
    torch.manual_seed(length)
    state, inputs = make_state(depth, num_seen), make_inputs(length)
    if error_clip is None:  # the paper's loss diverges within 13 tokens at these rates, in the reference too
        inputs = scale_steps(inputs, 0.1 if length <= 13 else 0.01)
    for decay_target in ((), make_decay_target(depth)):
        assert_equals_reference(inputs, state, UpdateRule(error_clip), decay_target)


@covering(
    2,
    {
        "depth": [1, 2, 3],
        "momentum": [True, False],
        "num_seen": [[0, 0, 0], [2, 2, 2], [5, 0, 3]],
        "length": [1, 3, 4, 13, 22],
    },
)
def test_delta_rule_equals_reference(depth, momentum, num_seen, length):
    """The triangular system gives the token loop's deltas, with every gradient."""
    torch.manual_seed(length)
    state, inputs = make_state(depth, num_seen), make_inputs(length, momentum)
    factor = 0.5 + torch.rand(B, H, length, 1, dtype=torch.float64)
    inputs = inputs._replace(keys=inputs.keys * factor)  # both sides of |h| = 1
    for decay_target in ((), make_decay_target(depth)):
        assert_equals_reference(inputs, state, UpdateRule(1.0, delta_rule=True, hidden_step=0.3), decay_target)


@covering(
    2,
    {
        "depth": [1, 2, 3],
        "rule": [UpdateRule(1.0), UpdateRule(1.0, True), UpdateRule(1.0, network="residual")],
        "num_seen": [[0, 0, 0], [5, 0, 3]],
        "length": [1, 3, 4, 13, 22],
    },
)
def test_a_memory_without_momentum_equals_reference(depth, rule, num_seen, length):
    """Without a momentum, results and gradients are those of the token loop, and of a momentum whose gate is 0."""
    torch.manual_seed(length)
    full, inputs = make_state(depth, num_seen), make_inputs(length, momentum=False)
    factor = 0.5 + torch.rand(B, H, length, 1, dtype=torch.float64)
    inputs = inputs._replace(keys=inputs.keys * factor)  # both sides of |h| = 1
    for with_gates in (inputs, per_layer(inputs, depth, momentum=False)):
        if rule.delta_rule and with_gates is not inputs:
            continue
        with_gates = scale_steps(with_gates, 0.2)
        for decay_target in ((), make_decay_target(depth)):
            without, state = without_momentum(with_gates, full)
            actual = run(memorize, without, state, rule, decay_target)
            assert_same(actual, run(memorize_reference, without, state, rule, decay_target))
            still = replace(full, momentum=tuple(map(torch.zeros_like, full.momentum)))
            output = memorize(with_gates, still, rule, chunk_size=CHUNK, decay_target=decay_target)
            torch.testing.assert_close(actual[0][0], output.retrieved, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_full_step_of_the_delta_rule_stores_the_value():
    """With a step of 1/2 the memory returns a token's value for its key at once."""
    torch.manual_seed(0)
    state, inputs = make_state(1, [0, 0, 0]), make_inputs(CHUNK, momentum=False, forget=False)
    state = replace(state, momentum=tuple(map(torch.zeros_like, state.momentum)))
    keys = inputs.keys[:, :, :1].expand_as(inputs.keys)
    inputs = inputs._replace(queries=keys, keys=keys, inner_lr=torch.full_like(inputs.inner_lr, 0.5))
    rule = UpdateRule(1.0, delta_rule=True)
    retrieved = memorize(inputs, state, rule, chunk_size=CHUNK).retrieved
    torch.testing.assert_close(retrieved, inputs.values, rtol=TOLERANCE, atol=TOLERANCE)


def test_forgetting_leads_back_to_the_initial_weights():
    """Full forgetting gives the decay target. A deep memory of zeros has no gradient."""
    state, inputs, decay_target = make_state(2, [0, 0, 0]), make_inputs(13), make_decay_target(2)
    all_at_once = torch.full_like(inputs.log_retain, -torch.inf)
    inputs = inputs._replace(inner_lr=torch.zeros_like(inputs.inner_lr), log_retain=all_at_once)
    for length in (13, 1):
        first = inputs.map(lambda x, length=length: x[:, :, :length])
        still = MemoryState(state.weights, tuple(map(torch.zeros_like, state.momentum)), state.anchor, state.num_seen)
        after = memorize(first, still, UpdateRule(1.0), chunk_size=CHUNK, decay_target=decay_target).state
        for actual, expected in zip(after.weights, decay_target, strict=True):
            torch.testing.assert_close(actual, expected.expand_as(actual), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("momentum,forget", [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize("length", [1, 13])
def test_momentum_and_forgetting_off(momentum, forget, length):
    """Without momentum or forgetting the dual form equals the token loop."""
    torch.manual_seed(0)
    state, inputs = make_state(2, [5, 0, 3]), make_inputs(length, momentum, forget)
    assert_equals_reference(inputs, state, UpdateRule(1.0))


@pytest.mark.parametrize("delta_rule,network", [(False, "mlp"), (True, "mlp"), (False, "residual")])
@pytest.mark.parametrize("depth", [1, 3])
def test_reading_a_constant_memory_equals_steps_of_zero(depth, delta_rule, network):
    """Reading without an update gives output, surprise and state of an update whose steps are 0."""
    torch.manual_seed(5)
    state, inputs = make_state(depth, [0, 0, 0]), make_inputs(9, momentum=False, forget=False)
    state = replace(state, momentum=tuple(map(torch.zeros_like, state.weights)), anchor=state.weights)
    inputs = scale_steps(inputs, 0)
    rule, grid = UpdateRule(1.0, delta_rule, network), TokenGrid.build(state.num_seen, 9, 9)
    grid = replace(grid, needs_surprise=True)
    constant, updated = (
        memorize_on_grid(inputs, state, rule, grid, chunk_size=9, updates=updates) for updates in (False, True)
    )
    torch.testing.assert_close(constant.retrieved, updated.retrieved, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(constant.surprise, updated.surprise, rtol=0, atol=TOLERANCE)
    pairs = zip(tensors_of(constant.state), tensors_of(updated.state), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_both_clips_are_reached_and_left():
    """The inputs above lie on both sides of each clip."""
    torch.manual_seed(13)
    state, (_, keys, values, *_) = make_state(3, [0, 0, 0]), make_inputs(64)
    limit = values.norm(dim=-1)
    for clip in (None, 1.0):
        factors = gradient_factors(keys, values, state.weights, UpdateRule(clip))
        inputs, deltas = factors.inputs, factors.deltas
        clipped = deltas[-1].norm(dim=-1) >= 2 * limit - 1e-9
        assert 0.05 < clipped.double().mean() < 0.95
        lengths = [gradient_norm(x, d).squeeze(-1) for x, d in zip(inputs, deltas, strict=True)]
        longer = [(x > 4 * limit + 1e-9).double().mean() for x in lengths]
        assert all(x == 0 for x in longer) if clip else all(0.05 < x < 0.95 for x in longer)


@covering(1, {"split": [1, 3, 4, 5, 8, 12], "network": ["mlp", "residual"]})
def test_state_carries_on(split, network):
    """Two calls equal one, wherever the first ends in a chunk, and so do single tokens."""
    torch.manual_seed(1)
    state, inputs = make_state(2, [5, 0, 3]), make_inputs(13)
    inputs = per_layer(inputs, 2) if network == "residual" else inputs
    rule = UpdateRule(1.0, network=network)
    options = dict(chunk_size=CHUNK, decay_target=make_decay_target(2))
    whole = memorize(inputs, state, rule, **options)
    for lengths in ([split, 13 - split], [1] * 13):
        parts = []
        for part in zip(*(x.split(lengths, dim=2) for x in inputs if x is not None), strict=True):
            parts.append(memorize(MemoryInputs(*part), parts[-1].state if parts else state, rule, **options))
        retrieved, surprise = (torch.cat([getattr(x, name) for x in parts], 2) for name in ("retrieved", "surprise"))
        actual = (retrieved, surprise, *tensors_of(parts[-1].state))
        for a, b in zip(actual, (whole.retrieved, whole.surprise, *tensors_of(whole.state)), strict=True):
            torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def test_gradient_at_zero_error_is_finite():
    """Where the memory's error is 0, and |e| has no gradient, results and gradients are finite."""
    state = make_state(2, [0, 0, 0])
    state = MemoryState(
        (state.weights[0], torch.zeros_like(state.weights[1])), state.momentum, state.anchor, state.num_seen
    )
    inputs = make_inputs(5)
    inputs = inputs._replace(values=torch.zeros_like(inputs.values))
    for fn in (memorize, memorize_reference):
        outputs, gradients = run(fn, inputs, state, UpdateRule(1.0))
        assert all(x.isfinite().all() for x in (*outputs, *gradients))


def test_bfloat16_inputs_keep_a_float32_state():
    """Inputs in bfloat16 give a retrieval and a state in float32."""
    state = make_state(2, [0, 2, 3]).map(lambda x: x.float() if x.is_floating_point() else x)
    inputs = make_inputs(9).map(torch.Tensor.float)
    in_bfloat16 = {name: getattr(inputs, name).bfloat16() for name in ("queries", "keys", "values")}
    inputs = inputs._replace(**in_bfloat16)
    for length in (9, 1):
        first = inputs.map(lambda x, length=length: x[:, :, :length])
        output = memorize(first, state, UpdateRule(1.0), chunk_size=CHUNK)
        assert {output.retrieved.dtype, *(x.dtype for x in tensors_of(replace(output.state, num_seen=None)))} == {
            torch.float32
        }


@covering(
    2,
    {
        "gates": ["momentum near 1", "momentum 0"],
        "inputs": ["constant", "alternating", "random", "huge"],
        "depth": [1, 2, 3, 4],
        "dtype": [torch.float32, torch.bfloat16],
    },
)
def test_nothing_blows_up(inputs, depth, gates, dtype):
    """After 20,000 tokens at the gates' extremes without forgetting, the state is finite and within the bound."""
    length, chunk, max_lr = 20_000, 64, 0.2
    torch.manual_seed(0)
    keys = torch.nn.functional.normalize(torch.randn(1, 1, length, D), dim=-1)
    values = torch.randn(1, 1, length, D)
    if inputs in ("constant", "alternating"):
        period = 1 if inputs == "constant" else 2
        keys, values = (x[:, :, :period].repeat(1, 1, length // period, 1) for x in (keys, values))
        if inputs == "alternating":
            keys[:, :, 1::2] = keys[:, :, :1]
    elif inputs == "huge":
        values = 1e3 * torch.nn.functional.normalize(values, dim=-1)
    eta = torch.full((1, 1, length), 1 - 1e-4 if gates == "momentum near 1" else 0.0)
    keys, gates = keys.to(dtype), (max_lr * (1 - eta), eta.log(), torch.zeros_like(eta))
    tokens = MemoryInputs(keys, keys, values.to(dtype), *gates)
    weights = [torch.randn(1, *shape) / shape[0] ** 0.5 for shape in layer_shapes(D, depth, 2)]
    state = MemoryState.initial(weights, 1, torch.float32)
    retrieved, _, after = memorize(tokens, state, UpdateRule(1.0), chunk_size=chunk)
    assert all(x.isfinite().all() for x in (retrieved, *after.weights, *after.momentum))
    step = max_lr * 4 * values.norm(dim=-1).max() * 1.01
    for weight, initial in zip(after.weights, weights, strict=True):
        assert (weight - initial).norm() <= length * step


def test_training_keeps_the_states_that_some_chunks_start_with():
    """Besides its inputs, training stores the state of every CHECKPOINT_INTERVAL-th chunk alone."""
    state, inputs = make_state(2, [0, 0, 0]), make_inputs(10 * CHUNK).map(torch.Tensor.requires_grad_)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        memorize(inputs, state, UpdateRule(1.0), chunk_size=CHUNK)
    of_states = -(-10 // CHECKPOINT_INTERVAL) * sum(x.numel() for x in (*state.weights, *state.momentum))
    of_inputs = sum(x.numel() for x in inputs if x is not None)
    assert of_states <= sum(x.numel() for x in kept.values()) < of_states + 3 * of_inputs


def test_a_momentum_without_its_gate_is_refused():
    """A state with a momentum and inputs without its gate raise ValueError, and the other way round."""
    inputs, state = make_inputs(5), make_state(1, [0, 0, 0])
    without_gate, without = without_momentum(inputs, state)
    for given, before in ((without_gate, state), (inputs, without)):
        with pytest.raises(ValueError, match=r"`state` has \d tensors of momentum"):
            memorize(given, before, UpdateRule(1.0), chunk_size=CHUNK)


@pytest.mark.parametrize("length", [1, 5])
def test_a_mask_of_slots_is_refused(length):
    """`filled` of the inputs, which belongs to a grid, raises ValueError."""
    inputs = make_inputs(length)
    inputs = inputs._replace(filled=torch.zeros_like(inputs.inner_lr, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"`inputs\.filled` must be None"):
        memorize(inputs, make_state(1, [0, 0, 0]), UpdateRule(1.0), chunk_size=CHUNK)


@pytest.mark.parametrize("depth,rule", [(1, UpdateRule(1.0)), (2, UpdateRule(1.0, delta_rule=True))])
def test_a_state_without_the_anchor_that_the_rule_needs_is_refused(depth, rule):
    """A state whose gradients have no weights to be taken at raises ValueError."""
    inputs, state = make_inputs(5), replace(make_state(depth, [0, 0, 0]), anchor=())
    with pytest.raises(ValueError, match="`state` must have an anchor"):
        memorize(inputs, state, rule, chunk_size=CHUNK)


def test_a_second_derivative_is_refused():
    """A second derivative raises RuntimeError: the backward pass is written by hand, and differentiating it would be
    silently wrong.
    """
    state, inputs = make_state(2, [0, 0, 0]), make_inputs(6).map(torch.Tensor.requires_grad_)
    retrieved = memorize(inputs, state, UpdateRule(1.0), chunk_size=CHUNK).retrieved
    (gradient,) = torch.autograd.grad(retrieved.square().sum(), inputs.queries, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
