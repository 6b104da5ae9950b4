"""The dual form and the single step against the autograd token loop, in float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from covering import covering
from memorize_runs import CHUNK, assert_same, make_decay_target, make_inputs, make_state, run, without_momentum

from titans_hf import memory_chunk, memory_ops
from titans_hf.memory_network import UpdateRule
from titans_hf.memory_ops import memorize
from titans_hf.memory_reference import memorize_reference
from titans_hf.memory_state import MemoryInputs, tensors_of

# The rule, whether each layer has gates of its own, and a factor of the steps: the paper's loss diverges within 13
# tokens at the steps of the others, in the reference too.
FORMS = {
    "chunk": (UpdateRule(1.0), False, 1.0),
    "plain loss": (UpdateRule(None), False, 0.01),
    "delta": (UpdateRule(1.0, delta_rule=True, hidden_step=0.3), False, 1.0),
    "delta, hidden layers fixed": (UpdateRule(1.0, delta_rule=True, hidden_step=0.0), False, 1.0),
    "residual": (UpdateRule(1.0, network="residual"), False, 0.1),
    "residual, plain loss": (UpdateRule(None, network="residual"), False, 0.1),
    "residual, gates per layer": (UpdateRule(None, network="residual"), True, 0.1),
    "gates per layer": (UpdateRule(1.0), True, 1.0),
    "delta, gates per layer": (UpdateRule(1.0, delta_rule=True), True, 1.0),
    "delta, small hidden steps, gates per layer": (UpdateRule(1.0, delta_rule=True, hidden_step=0.125), True, 1.0),
    "delta, hidden layers fixed, gates per layer": (UpdateRule(1.0, delta_rule=True, hidden_step=0.0), True, 1.0),
}


@covering(
    2,
    {
        "form": FORMS,
        "depth": [1, 2, 3],
        "momentum,forget": [("gate", True), ("off", True), ("none", True), ("gate", False), ("none", False)],
        "num_seen": [[0, 0, 0], [2, 2, 2], [5, 0, 3]],
        "length": [1, 3, 4, 13, 22],
        "halves": [set(), {"cpu"}],
    },
)
def test_every_form_equals_the_reference(form, depth, momentum, forget, num_seen, length, halves, monkeypatch):
    """Outputs, state, surprise and every gradient are the token loop's to 1e-14 of a tensor's largest entry (1e-13 with
    whole steps of hidden layers, 1e-11 in a residual network: rounding grows there), at every phase of the chunk, for
    keys on both sides of length 1, with and without a decay target; with momentum, a gate of 0 for it, and none; with
    both ways to solve the systems.
    """
    monkeypatch.setattr(memory_chunk, "SOLVED_BY_HALVES", halves)
    torch.manual_seed(length)
    rule, gates_per_layer, factor = FORMS[form]
    state, options = make_state(depth, num_seen), dict(momentum=momentum == "gate", forget=forget)
    inputs = make_inputs(length, **options)
    inputs = inputs._replace(keys=inputs.keys * (0.5 + torch.rand_like(inputs.keys[..., :1])))
    if gates_per_layer:
        drawn = [make_inputs(length, **options)[3:6] for _ in range(depth)]
        inputs = MemoryInputs(*inputs[:3], *(torch.stack(gates, -1) for gates in zip(*drawn, strict=True)))
    if momentum == "none":
        inputs, state = without_momentum(inputs, state)
    inputs = inputs._replace(inner_lr=factor * inputs.inner_lr)
    for decay_target in ((), make_decay_target(depth)):
        arguments = (inputs, state, rule, decay_target)
        tolerance = 1e-11 if rule.network == "residual" else 1e-13 if form == "delta, gates per layer" else 1e-14
        assert_same(run(memorize, *arguments), run(memorize_reference, *arguments), tolerance)


@pytest.mark.parametrize("dtype,allowed", [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_a_system_is_solved_by_halves(dtype, allowed, monkeypatch):
    """The solution by halves and its gradients are those of `solve_triangular`, with 64 equal keys too."""
    monkeypatch.setattr(memory_chunk, "SOLVED_BY_HALVES", {"cpu"})
    torch.manual_seed(0)
    for size, same in ((64, False), (64, True), (37, False), (1, False)):
        keys, right = torch.nn.functional.normalize(torch.randn(2, 3, size, 16, dtype=torch.float64), dim=-1)
        keys = keys[:, :1].expand_as(keys) if same else keys
        system = torch.tril(keys @ keys.mT * torch.rand(size, size), -1) + 0.5 * torch.eye(size)

        def results(solve, dtype, given=(system, right)):
            given = [x.to(dtype).requires_grad_() for x in given]
            solution = solve(*given)
            of_system, of_right = torch.autograd.grad(solution.square().sum(), given)
            return solution, of_system.tril(), of_right

        exact = results(partial(torch.linalg.solve_triangular, upper=False), torch.float64)
        for ours, theirs in zip(results(memory_chunk.solve, dtype), exact, strict=True):
            assert (ours - theirs).norm() <= allowed * theirs.norm()


@pytest.mark.parametrize("length", [1, 13])
def test_forgetting_everything_equals_the_reference(length):
    """A gate of 0, whose logarithm is -inf, leads back to the decay target. A deep memory of zeros has no gradient."""
    inputs = make_inputs(length)
    inputs = inputs._replace(log_retain=torch.full_like(inputs.log_retain, -torch.inf))
    arguments = (inputs, make_state(2, [0, 0, 0]), UpdateRule(1.0), make_decay_target(2))
    assert_same(run(memorize, *arguments), run(memorize_reference, *arguments))


def test_gradient_at_zero_error_is_finite():
    """Where the memory's error is 0, and |e| has no gradient, results and gradients are finite."""
    state = make_state(2, [0, 0, 0])
    state = replace(state, weights=(state.weights[0], torch.zeros_like(state.weights[1])))
    inputs = make_inputs(5)
    inputs = inputs._replace(values=torch.zeros_like(inputs.values))
    for fn in (memorize, memorize_reference):
        outputs, gradients = run(fn, inputs, state, UpdateRule(1.0))
        assert all(x.isfinite().all() for x in (*outputs, *gradients))


@pytest.mark.parametrize("network,kept_bytes", [("mlp", memory_ops.KEPT_BYTES), ("mlp", 0), ("residual", 0)])
def test_training_keeps_states(network, kept_bytes, monkeypatch):
    """Besides its inputs, training stores the states of all chunks where they are small, elsewhere those of the groups'
    starts alone, and computes the same; where autograd makes the backward, the anchors too.
    """
    state, inputs = make_state(2, [0, 0, 0]), make_inputs(10 * CHUNK)
    arguments = (inputs, state, UpdateRule(1.0, network=network))
    expected = run(memorize, *arguments)
    monkeypatch.setattr(memory_ops, "KEPT_BYTES", kept_bytes)
    assert_same(run(memorize, *arguments), expected)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        memorize(inputs.map(torch.Tensor.requires_grad_), *arguments[1:], chunk_size=CHUNK)
    by_hand = network == "mlp"
    of_states = (*state.weights, *state.momentum) if by_hand else tensors_of(state)
    number = (10 if kept_bytes else -(-10 // memory_ops.GROUP_SIZES["cpu"])) * sum(x.numel() for x in of_states)
    of_inputs = sum(x.numel() for x in inputs if x is not None)
    assert number * by_hand <= sum(x.numel() for x in kept.values()) < number + 3 * of_inputs


def arguments(depth: int = 2, rule: UpdateRule = UpdateRule(1.0), **changes) -> tuple:  # noqa: B008
    """Returns inputs, state and rule; `changes` are of the state."""
    return make_inputs(5), replace(make_state(depth, [0, 0, 0]), **changes), rule


@pytest.mark.parametrize(
    "given,message",
    [
        (arguments(momentum=()), r"`state` has \d tensors of momentum"),
        (arguments(2, UpdateRule(1.0, delta_rule=True), anchor=()), "`state` must have an anchor"),
        ((make_inputs(5)._replace(filled=torch.ones(1, 1, 5)), *arguments()[1:]), r"`inputs\.filled` must be None"),
        (arguments(1, UpdateRule(None, True, "residual")), "`delta_rule` must be False with the network 'residual'"),
        (arguments(1, UpdateRule(None, network="resid")), "`network` must be one of mlp, residual, but is 'resid'"),
    ],
)
def test_what_does_not_fit_together_is_refused(given, message):
    """Momentum or its gate alone, a missing anchor, a mask of slots, and impossible rules raise ValueError."""
    with pytest.raises(ValueError, match=message):
        memorize(*given, chunk_size=CHUNK)


def test_a_second_derivative_is_refused():
    """A second derivative raises RuntimeError: the backward pass is written by hand, and differentiating it would be
    silently wrong.
    """
    state, inputs = make_state(2, [0, 0, 0]), make_inputs(6).map(torch.Tensor.requires_grad_)
    retrieved = memorize(inputs, state, UpdateRule(1.0), chunk_size=CHUNK).retrieved
    (gradient,) = torch.autograd.grad(retrieved.square().sum(), inputs.queries, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
