"""The listings of the two rules against `memorize` and the autograd token loop, in float64."""

from functools import partial

import pytest
import torch
from covering import covering
from memorize_runs import CHUNK, B, D, H, assert_same, make_decay_target, make_inputs, make_state, run, without_momentum

from titans_hf.memory_listing import torch_chunk_comba, torch_chunk_titans
from titans_hf.memory_network import UpdateRule
from titans_hf.memory_ops import memorize, memorize_by_kernel
from titans_hf.memory_reference import memorize_reference
from titans_hf.memory_state import MemorizeOutput, MemoryInputs, MemoryState
from titans_hf.token_grid import TokenGrid


def comba(inputs: MemoryInputs, state: MemoryState, rule: UpdateRule, *, chunk_size: int, decay_target):
    """Computes `memorize` of one layer by the listing in the place of fla's kernel, on the grid that the model has."""
    grid = TokenGrid.build(state.num_seen, inputs.keys.shape[2], chunk_size)
    slots = inputs.map(lambda x: grid.scatter(x.transpose(1, 2)).transpose(1, 2))
    output = memorize_by_kernel(partial(torch_chunk_comba, chunk_size=chunk_size), slots, state, grid, decay_target)
    return output._replace(retrieved=grid.gather(output.retrieved.transpose(1, 2)).transpose(1, 2))


def titans(inputs: MemoryInputs, state: MemoryState, rule: UpdateRule, *, chunk_size: int, decay_target):
    """Computes `memorize` of a deep memory by the listing of the deep form."""
    by_token = [x.transpose(1, 2) for x in inputs if x is not None]
    target = decay_target or [torch.zeros_like(w) for w in state.weights]
    hidden_step = rule.hidden_step if rule.delta_rule else None
    rest = (state.weights, state.momentum, rule.error_clip, hidden_step, chunk_size)
    output = torch_chunk_titans(*by_token, target, *rest)
    retrieved, weights, momentum = output
    anchor = tuple(torch.zeros_like(w) for w in weights if rule.needs_anchor(len(weights)))
    after = MemoryState(tuple(weights), tuple(momentum), anchor, state.num_seen + inputs.keys.shape[2])
    return MemorizeOutput(retrieved.transpose(1, 2), None, after)


def results(fn, *arguments):
    """Returns what a listing computes: outputs and final state, and the gradients of all inputs and states."""
    outputs, gradients = run(fn, *arguments)
    num_states = len(arguments[1].weights) + len(arguments[1].momentum)
    return [*outputs[: 1 + num_states], outputs[-1]], gradients  # the last is the number of tokens


@covering(2, {"forget": [True, False], "num_seen": [[0, 0, 0], [5, 0, 3]], "length": [1, 3, 4, 13, 22]})
def test_the_delta_form(forget, num_seen, length):
    """The listing gives outputs, state and gradients of both other forms, wherever the chunks start."""
    torch.manual_seed(length)
    inputs = make_inputs(length, forget=forget)
    inputs = inputs._replace(keys=inputs.keys * (0.5 + torch.rand(B, H, length, 1, dtype=torch.float64)))
    inputs, state = without_momentum(inputs, make_state(1, num_seen))
    for decay_target in (make_decay_target(1), ()):
        arguments = (inputs, state, UpdateRule(1.0, delta_rule=True), decay_target)
        listing = results(comba, *arguments)
        assert_same(listing, results(memorize, *arguments))
        assert_same(listing, results(memorize_reference, *arguments))


@covering(2, {"depth": [1, 2, 3], "num_seen": [[0, 0, 0], [4, 0, 8]], "length": [1, 3, 4, 13, 22]})
def test_the_deep_form(depth, num_seen, length):
    """The listing gives outputs, state and gradients of both other forms, with and without delta rule and clip."""
    torch.manual_seed(length)
    state, inputs = make_state(depth, num_seen), make_inputs(length)
    keys = inputs.keys * (0.5 + torch.rand(B, H, length, 1, dtype=torch.float64))
    inputs = inputs._replace(keys=keys, inner_lr=0.1 * inputs.inner_lr)
    target, delta_rule = make_decay_target(depth), UpdateRule(1.0, delta_rule=True, hidden_step=0.3)
    rules = [(delta_rule, target), (UpdateRule(1.0), ()), (UpdateRule(1.0), target), (UpdateRule(None), ())]
    for rule, decay_target in rules:
        inputs = inputs if rule.error_clip else inputs._replace(inner_lr=0.05 * inputs.inner_lr)
        arguments = (inputs, state, rule, decay_target)
        listing = results(titans, *arguments)
        assert_same(listing, results(memorize, *arguments))
        assert_same(listing, results(memorize_reference, *arguments))


@pytest.mark.parametrize("decay", ["any", "to nothing"])
def test_the_recurrence(decay):
    """With other keys to read by, and with a decay of 0, the delta form is its recurrence."""
    torch.manual_seed(0)
    q, k, v, p = (torch.randn(B, 7, H, D, dtype=torch.float64, requires_grad=True) for _ in range(4))
    g, beta = torch.rand(2, B, 7, H, dtype=torch.float64)
    g = -g if decay == "any" else torch.full_like(g, -torch.inf)
    state = start = torch.randn(B, H, D, D, dtype=torch.float64)
    expected = []
    for q_t, k_t, v_t, p_t, g_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, p, g, beta)), strict=True):
        error = v_t - torch.einsum("bhk,bhkv->bhv", p_t, state)
        state = g_t.exp()[..., None, None] * state + torch.einsum("bh,bhk,bhv->bhkv", beta_t, k_t, error)
        expected.append(0.5 * torch.einsum("bhk,bhkv->bhv", q_t, state))
    expected = torch.stack(expected, dim=1)
    outputs, after = torch_chunk_comba(q, k, v, p, g, beta, 0.5, start, True, CHUNK)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((x * weights).sum(), (q, k, v, p)) for x in (outputs, expected)]
    assert_same(([outputs, after], gradients[0]), ([expected, state], gradients[1]))


def test_names_and_layout_of_fla():
    """Queries are scaled by K^-0.5 unless a scale is given, the dtype is that of the queries, the state is optional."""
    q, k, v = torch.randn(3, 2, 5, H, D).bfloat16()
    g, beta = -torch.rand(2, 5, H), torch.rand(2, 5, H)
    outputs, state = torch_chunk_comba(q=q, k=k, v=v, p=k, g=g, beta=beta)
    assert outputs.dtype == torch.bfloat16 and state is None
    given, state = torch_chunk_comba(q=q, k=k, v=v, p=k, g=g, beta=beta, scale=D**-0.5, output_final_state=True)
    assert torch.equal(outputs, given) and state.shape == (2, H, D, D) and state.dtype == torch.float32
