"""The delta rule for the last layer of the memory network: every token's error at the weights before that token.

By eq. 16, all errors of a chunk are taken at its start: where keys of a chunk agree, each of their steps corrects the
whole error, and their sum overshoots. Here, with the inputs h_i of the last layer as in eq. 16, its error is
e_i = h_i M_{i-1} - v_i (eq. 10 without chunks), exactly: h_i M_{i-1} contains the chunk's earlier deltas, so that they
solve a triangular system of C equations,

    delta_i = c_i (beta h_i W + f h_i S + h_i M_0 - v_i - sum_{j<i} G_{i-1,j} (h_i . h_j) delta_j)

with beta, f and G after token i-1, and c_i = 2 / max(1, |h_i|^2). A step theta of 1/2 then replaces what the memory
returns for a key by its value, and no smaller one overshoots. With one layer, and without momentum, this is the gated
delta rule.

Shapes: N batch and heads, C tokens of the chunk; weights (N, d_in, d_out).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import pad

from .memory_gates import GateProducts


class LastLayer(NamedTuple):
    """The last layer at a chunk's start: offset W (the weights less M_0), momentum S, decay target M_0 or None for 0,
    (N, d_in, d_out) each, and its inputs h (N, C, d_in).
    """

    offset: Tensor
    momentum: Tensor
    decay_target: Tensor | None
    inputs: Tensor


class TokenDeltas(NamedTuple):
    """The deltas (N, C, d_out), and what their backward needs: c (N, C, 1), h h^T, G before each token and the
    system's matrix below its diagonal (N, C, C).
    """

    deltas: Tensor
    error_scale: Tensor
    scores: Tensor
    gradient_to_weights: Tensor
    system: Tensor


class TokenDeltasGradients(NamedTuple):
    """Gradients with respect to the arguments of `token_deltas`."""

    layer: LastLayer
    values: Tensor
    gates: GateProducts


def token_deltas(layer: LastLayer, values: Tensor, gates: GateProducts) -> TokenDeltas:
    """Computes the deltas of a chunk's tokens from their values (N, C, d_out)."""
    h = layer.inputs
    beta, f = _before_token(gates.weights_decay, 1.0), _before_token(gates.momentum_to_weights, 0.0)
    output = (beta * h) @ layer.offset + (f * h) @ layer.momentum  # (N, C, d_in) @ (N, d_in, d_out)
    if layer.decay_target is not None:
        output = output + h @ layer.decay_target
    error_scale = 2 / h.square().sum(-1, keepdim=True).clamp(min=1.0)  # c
    scores = h @ h.mT  # (N, C, C)
    products = pad(gates.gradient_to_weights, (0, 0, 1, 0))[..., :-1, :]  # row i: G_{i-1}, 0 from column i on
    system = error_scale * products * scores
    deltas = _solve(system, error_scale * (output - values))
    return TokenDeltas(deltas, error_scale, scores, products, system)


def token_deltas_backward(
    grad: Tensor, found: TokenDeltas, layer: LastLayer, values: Tensor, gates: GateProducts
) -> TokenDeltasGradients:
    """Computes the backward of `token_deltas` from the gradient with respect to the deltas."""
    h, deltas, error_scale = layer.inputs, found.deltas, found.error_scale
    # 1. Through the system: delta = c e(delta), so that e has the gradient c A^-T grad
    adjoint = solve_triangular(found.system.mT, grad, upper=True, unitriangular=True)
    grad_error = error_scale * adjoint
    # 2. c = 2 / |h|^2 where |h| > 1: dc/dh = - c^2 h
    grad_scale = (adjoint * deltas).sum(-1, keepdim=True) / error_scale
    grad_h = torch.where(error_scale < 2, -grad_scale * error_scale.square() * h, 0.0)
    # 3. The chunk's earlier deltas: - (G o (h h^T)) delta
    grad_products = (grad_error @ deltas.mT).neg_()  # (N, C, d_out) @ (N, d_out, C)
    grad_scores = grad_products * found.gradient_to_weights
    grad_products = grad_products.mul_(found.scores)
    grad_h = grad_h.baddbmm_(grad_scores, h).baddbmm_(grad_scores.mT, h)
    # 4. beta h W + f h S + h M_0
    beta, f = _before_token(gates.weights_decay, 1.0), _before_token(gates.momentum_to_weights, 0.0)
    from_offset, from_momentum = grad_error @ layer.offset.mT, grad_error @ layer.momentum.mT  # (N, C, d_in)
    grad_beta, grad_f = (h * from_offset).sum(-1), (h * from_momentum).sum(-1)
    grad_h.addcmul_(beta, from_offset).addcmul_(f, from_momentum)
    grad_offset, grad_momentum = (beta * h).mT @ grad_error, (f * h).mT @ grad_error  # (N, d_in, C) @ (N, C, d_out)
    grad_target = None
    if layer.decay_target is not None:
        grad_h.baddbmm_(grad_error, layer.decay_target.mT)
        grad_target = h.mT @ grad_error
    # 5. Gates before token i are those after token i - 1
    grad_gates = GateProducts(
        pad(grad_products, (0, 0, 0, 1))[..., 1:, :],
        pad(grad_beta, (0, 1))[..., 1:],
        pad(grad_f, (0, 1))[..., 1:],
        torch.zeros_like(gates.gradient_to_momentum),
        torch.zeros_like(gates.momentum_decay),
    )
    return TokenDeltasGradients(LastLayer(grad_offset, grad_momentum, grad_target, grad_h), -grad_error, grad_gates)


def single_token_delta(inputs: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """Computes the delta of one token, c (h M - v): inputs h (..., 1, d_in), weights (..., d_in, d_out)."""
    return 2 / inputs.square().sum(-1, keepdim=True).clamp(min=1.0) * (inputs @ weights - value)


def _before_token(after: Tensor, at_start: float) -> Tensor:
    """Moves factors after each token (N, C) to the next one: (N, C, 1), `at_start` at the first."""
    return pad(after[..., :-1], (1, 0), value=at_start).unsqueeze(-1)


def _solve(system: Tensor, right: Tensor) -> Tensor:
    """Solves (I + system) x = right, the system being 0 on and above its diagonal."""
    return solve_triangular(system, right, upper=False, unitriangular=True)
