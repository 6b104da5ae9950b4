"""The delta rule for the last layer of the memory network: each token's error at the weights before that token.

By eq. 16, all errors of a chunk are taken at the weights of its start: where the keys of several tokens agree, each of
their steps corrects the whole error, and the sum of the steps overshoots. The delta rule takes the last layer's error
e_i = h_i M_{i-1} - v_i as eq. 10 does, at the weights before token i, but the inputs h_i of that layer still at the
chunk's start. M_{i-1} contains the deltas of the chunk's earlier tokens, so the deltas solve a triangular system of C
equations,

    delta_i = c_i (beta h_i W + f h_i S + h_i M_0 - v_i - sum_{j<i} G_{i-1,j} (h_i . h_j) delta_j)

with beta, f and G (`memory_gates`) after token i-1, and c_i = 2 / max(1, |h_i|^2). A step of theta = 1/2 makes the
memory return v_i for h_i (if |h_i| >= 1); smaller steps do not overshoot. With one layer and without momentum, this is
the gated delta rule (arXiv 2412.06464).

Shapes: N batch and heads, C tokens of the chunk; weights (N, d_in, d_out).
docs/log.md: "Errors at the chunk's start against errors token by token"
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import pad

from .memory_gates import GateProducts
from .memory_network import ChunkLayer


class TokenDeltas(NamedTuple):
    """The deltas, and the intermediate results that their backward needs."""

    deltas: Tensor  # (N, C, d_out)
    error_scale: Tensor  # c (N, C, 1)
    scores: Tensor  # h h^T (N, C, C)
    gradient_to_weights: Tensor  # row i: G_{i-1} (N, C, C)
    system: Tensor  # c G_{i-1} o (h h^T) (N, C, C), strictly lower triangular


class TokenDeltasGradients(NamedTuple):
    """Gradients with respect to the arguments of `token_deltas`."""

    layer: ChunkLayer
    values: Tensor
    gates: GateProducts


def token_deltas(layer: ChunkLayer, values: Tensor, gates: GateProducts) -> TokenDeltas:
    """Computes the last layer's deltas of a chunk's tokens with values (N, C, d_out)."""
    h = layer.inputs
    output = (_before_token(gates.weights_decay, 1.0) * h) @ layer.offset  # (N, C, d_in) @ (N, d_in, d_out)
    if layer.momentum is not None:
        output = output.baddbmm(_before_token(gates.momentum_to_weights, 0.0) * h, layer.momentum)
    if layer.decay_target is not None:
        output = output + h @ layer.decay_target
    error_scale = _error_scale(h)
    scores = h @ h.mT  # (N, C, C)
    products = pad(gates.gradient_to_weights, (0, 0, 1, 0))[..., :-1, :]  # row i: G_{i-1}, 0 from column i on
    system = error_scale * products * scores
    # (I + A) delta = c e_0; `unitriangular` reads A as if its diagonal were 1
    deltas = solve_triangular(system, error_scale * (output - values), upper=False, unitriangular=True)
    return TokenDeltas(deltas, error_scale, scores, products, system)


def token_deltas_backward(
    grad: Tensor, solution: TokenDeltas, layer: ChunkLayer, gates: GateProducts
) -> TokenDeltasGradients:
    """Computes the backward of `token_deltas` from the gradient with respect to the deltas."""
    h, deltas, error_scale = layer.inputs, solution.deltas, solution.error_scale
    # 1. (I + A) delta = c e_0 with the system A and the error e_0 at the start: e_0 has the gradient c (I + A)^-T grad
    adjoint = solve_triangular(solution.system.mT, grad, upper=True, unitriangular=True)
    grad_error = error_scale * adjoint
    # 2. c = 2 / |h|^2 where |h| > 1: dc/dh = -c^2 h
    grad_scale = (adjoint * deltas).sum(-1, keepdim=True) / error_scale
    grad_h = torch.where(error_scale < 2, -grad_scale * error_scale.square() * h, 0.0)
    # 3. The deltas of the chunk's earlier tokens: -(G o (h h^T)) delta
    grad_products = (grad_error @ deltas.mT).neg_()  # (N, C, d_out) @ (N, d_out, C)
    grad_scores = grad_products * solution.gradient_to_weights
    grad_products = grad_products.mul_(solution.scores)
    grad_h = grad_h.baddbmm_(grad_scores, h).baddbmm_(grad_scores.mT, h)
    # 4. beta h W + f h S + h M_0
    offset = scaled_product_backward(grad_error, h, _before_token(gates.weights_decay, 1.0), layer.offset)
    grad_h.add_(offset.inputs)
    grad_momentum = grad_f = grad_target = None
    if layer.momentum is not None:
        f = _before_token(gates.momentum_to_weights, 0.0)
        from_momentum, grad_f, grad_momentum = scaled_product_backward(grad_error, h, f, layer.momentum)
        grad_h.add_(from_momentum)
        grad_f = pad(grad_f, (0, 1))[..., 1:]
    if layer.decay_target is not None:
        grad_h.baddbmm_(grad_error, layer.decay_target.mT)
        grad_target = h.mT @ grad_error
    # 5. The gate products before token i are those after token i - 1
    grad_gates = GateProducts(
        gradient_to_weights=pad(grad_products, (0, 0, 0, 1))[..., 1:, :],
        weights_decay=pad(offset.factor, (0, 1))[..., 1:],
        momentum_to_weights=grad_f,
        gradient_to_momentum=None,  # no delta depends on the momentum at the chunk's end
        momentum_decay=None,
    )
    grad_layer = ChunkLayer(offset.weights, grad_momentum, grad_h, None, grad_target)
    return TokenDeltasGradients(grad_layer, -grad_error, grad_gates)


class ProductGradients(NamedTuple):
    """Gradients with respect to the arguments of factor x W: x (N, C, d_in), factor (N, C), W (N, d_in, d_out)."""

    inputs: Tensor
    factor: Tensor
    weights: Tensor


def scaled_product_backward(grad: Tensor, inputs: Tensor, factor: Tensor, weights: Tensor) -> ProductGradients:
    """Computes the backward of factor x W from the gradient of the product (N, C, d_out); factor (N, C, 1)."""
    from_weights = grad @ weights.mT  # (N, C, d_out) @ (N, d_out, d_in)
    grad_factor = (inputs * from_weights).sum(-1)
    wide = inputs.shape[-1] > grad.shape[-1]  # then the factor is applied to the gradient
    grad_weights = inputs.mT @ (factor * grad) if wide else (factor * inputs).mT @ grad  # (N, d_in, C) @ (N, C, d_out)
    return ProductGradients(from_weights.mul_(factor), grad_factor, grad_weights)


def single_token_delta(inputs: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """Computes the delta of one token, c (h M - v): inputs h (..., 1, d_in), weights (..., d_in, d_out)."""
    return _error_scale(inputs) * (inputs @ weights - value)


def _error_scale(inputs: Tensor) -> Tensor:
    """Computes c = 2 / max(1, |h|^2): h (..., d_in) -> (..., 1)."""
    return 2 / inputs.square().sum(-1, keepdim=True).clamp(min=1.0)


def _before_token(after: Tensor, at_start: float) -> Tensor:
    """Shifts factors after each token (N, C) to those before each token (N, C, 1); before the first: `at_start`."""
    return pad(after[..., :-1], (1, 0), value=at_start).unsqueeze(-1)
