"""Inputs and states that memorize() and the chunk listing cannot use: errors that name them."""

from dataclasses import replace

import pytest
import torch
from memorize_runs import CHUNK, make_inputs, make_state, without_momentum

from titans_hf import UpdateRule
from titans_hf.memory_ops import memorize


def test_a_momentum_without_its_gate_is_refused():
    """A state with a momentum and inputs without its gate raise ValueError, and the other way round: otherwise a memory
    would lose its momentum silently.
    """
    inputs, state = make_inputs(5), make_state(1, [0, 0, 0])
    without_gate, without = without_momentum(inputs, state)
    for given, before in ((without_gate, state), (inputs, without)):
        with pytest.raises(ValueError, match=r"`state` has \d tensors of momentum"):
            memorize(given, before, UpdateRule(1.0), chunk_size=CHUNK)


@pytest.mark.parametrize("length", [1, 5])
def test_a_mask_of_slots_is_refused(length):
    """`filled` of the inputs, which belongs to a grid, raises ValueError: otherwise a single token that it excludes
    would be learned.
    """
    inputs = make_inputs(length)
    inputs = inputs._replace(filled=torch.zeros_like(inputs.inner_lr, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"`inputs\.filled` must be None"):
        memorize(inputs, make_state(1, [0, 0, 0]), UpdateRule(1.0), chunk_size=CHUNK)


@pytest.mark.parametrize("depth,rule", [(1, UpdateRule(1.0)), (2, UpdateRule(1.0, delta_rule=True))])
def test_a_state_without_the_anchor_that_the_rule_needs_is_refused(depth, rule):
    """A state whose gradients have no weights to be taken at raises ValueError: otherwise another rule would update it
    silently.
    """
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
