"""One chunk of the memory's update in the dual form (paper section 3.2): forward and hand-written backward.

All gradients of a chunk are taken at the weights of its start (eq. 16), so each token's gradient is rank one in every
layer, all can be had at once (eq. 17), and the weights after every token follow from a few matrix products
(`memory_gates`), exactly. No per-token weights are formed. Factors per token are applied where the tensor is narrower:
before a matrix product or after it.

The delta rule (`UpdateRule.delta_rule`) takes the last layer's error at the weights before each token. By eq. 16, all
errors of a chunk are taken at the weights of its start: where the keys of several tokens agree, each of their steps
corrects the whole error, and the sum of the steps overshoots. The delta rule takes the last layer's error
e_i = h_i M_{i-1} - v_i as eq. 10 does, at the weights before token i, but the inputs h_i of that layer still at the
chunk's start. M_{i-1} contains the deltas of the chunk's earlier tokens, so the deltas solve a triangular system of C
equations,

    delta_i = c_i (beta h_i W + f h_i S + h_i M_0 - v_i - sum_{j<i} G_{i-1,j} (h_i . h_j) delta_j)

with beta, f and G (`memory_gates`) after token i-1, and c_i = 2 / max(1, |h_i|^2). A step of theta = 1/2 makes the
memory return v_i for h_i (if |h_i| >= 1); smaller steps do not overshoot. With one layer and without momentum, this is
the gated delta rule (arXiv 2412.06464).
docs/dev/log.md: "Errors at the chunk's start against errors token by token"

Shapes: N batch and heads, C tokens of the chunk; weights (N, d_in, d_out).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import pad

from .memory_gates import GateIntermediates, GateProducts, gate_products, gate_products_backward
from .memory_network import (
    ChunkLayer,
    GradientFactors,
    UpdateRule,
    apply_layers,
    gradient_factors,
    gradient_factors_backward,
    layer_inputs,
    single_layer_factors,
    token_surprise,
    with_last_deltas,
)
from .memory_state import MemorizeOutput, MemoryInputs, MemoryState


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
        gradient_to_momentum=None,  # the deltas do not depend on the momentum at the chunk's end
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


class ChunkIntermediates(NamedTuple):
    """The gate products and gradient factors of a chunk, with which forward and backward start.

    gates: one per layer of the memory network, all the same unless `inputs` has gates per layer.
    token_deltas: the last layer's deltas by the delta rule; None without it.
    """

    inputs: MemoryInputs
    gates: tuple[GateProducts, ...]
    gate_intermediates: GateIntermediates
    factors: GradientFactors
    layers: tuple[ChunkLayer, ...]
    anchor: tuple[Tensor, ...]
    token_deltas: TokenDeltas | None


class ChunkGradients(NamedTuple):
    """Gradients with respect to a chunk's inputs, the state at its start and the decay target (empty for 0)."""

    inputs: MemoryInputs
    state: MemoryState
    decay_target: list[Tensor]


class ChunkFunctions(NamedTuple):
    """The functions of one chunk, as written here or compiled."""

    forward: Callable[..., MemorizeOutput]
    intermediates: Callable[..., ChunkIntermediates]
    backward: Callable[..., ChunkGradients]


def chunk_forward(
    inputs: MemoryInputs, state: MemoryState, decay_target: Sequence[Tensor], rule: UpdateRule, needs_surprise: bool
) -> MemorizeOutput:
    """Computes the retrieved values of a chunk's queries, the tokens' surprise if it is needed, and the state at the
    chunk's end.
    """
    chunk = chunk_intermediates(inputs, state, decay_target, rule)
    retrieved = apply_layers(inputs.queries, _reads_of_layers(chunk), rule.network)
    surprise = token_surprise(chunk.factors) if needs_surprise else None
    return MemorizeOutput(retrieved, surprise, end_of_chunk(chunk))


def chunk_intermediates(
    inputs: MemoryInputs, state: MemoryState, decay_target: Sequence[Tensor], rule: UpdateRule
) -> ChunkIntermediates:
    """Computes gate products and gradient factors from a chunk's inputs and the state at its start."""
    gates, gate_intermediates = _gates_of_layers(inputs, len(state.weights))
    offsets = [w - m for w, m in zip(state.weights, decay_target, strict=True)] if decay_target else state.weights
    targets, momentum = decay_target or [None] * len(offsets), state.momentum or [None] * len(offsets)
    factors = gradient_factors(inputs.keys, inputs.values, state.anchor, rule) if state.anchor else None
    solution = None
    if rule.delta_rule:
        last_inputs = factors.inputs[-1] if factors else inputs.keys
        last_layer = ChunkLayer(offsets[-1], momentum[-1], last_inputs, None, targets[-1])
        solution = token_deltas(last_layer, inputs.values, gates[-1])
        deltas = solution.deltas
        if factors:
            factors = with_last_deltas(factors, deltas, rule.hidden_step)
        else:
            factors = single_layer_factors(inputs.keys, deltas)
    parts = (offsets, momentum, factors.inputs, factors.deltas, targets)
    layers = tuple(ChunkLayer(*x) for x in zip(*parts, strict=True))
    return ChunkIntermediates(inputs, gates, gate_intermediates, factors, layers, state.anchor, solution)


def _gates_of_layers(inputs: MemoryInputs, depth: int) -> tuple[tuple[GateProducts, ...], GateIntermediates]:
    """Computes the gate products of each layer of the memory network, and the intermediate results of all layers."""
    gates, filled = (inputs.inner_lr, inputs.log_momentum_decay, inputs.log_retain), inputs.filled
    if not inputs.has_gates_per_layer:
        products, intermediates = gate_products(*gates, filled)
        return (products,) * depth, intermediates
    filled = None if filled is None else filled[:, None]
    products, intermediates = gate_products(*(None if x is None else x.mT for x in gates), filled)  # (N, L, C)
    layers = ([None if x is None else x.select(1, layer) for x in products] for layer in range(depth))
    return tuple(GateProducts(*layer) for layer in layers), intermediates


def _reads_of_layers(chunk: ChunkIntermediates) -> list[Callable[[Tensor], Tensor]]:
    """Returns each layer as a function that multiplies every token by the layer's weights after that token."""
    pairs = zip(chunk.layers, chunk.gates, strict=True)
    return [partial(read_layer, layer=layer, gates=gates) for layer, gates in pairs]


def read_layer(x: Tensor, layer: ChunkLayer, gates: GateProducts) -> Tensor:
    """Multiplies every token by the layer's weights after that token: (N, C, d_in) -> (N, C, d_out).

    x_t M_t = beta_t x_t W + f_t x_t S - sum_{i<=t} G_ti (x_t . h_i) delta_i + x_t M_0    (eq. 13-16, unrolled)
    """
    scores = (x @ layer.inputs.mT) * gates.gradient_to_weights  # (N, C, d_in) @ (N, d_in, C): (x h^T) o G
    if x.shape[-1] > layer.offset.shape[-1]:
        output = gates.weights_decay[..., None] * (x @ layer.offset)  # beta (x W): (N, C, d_in) @ (N, d_in, d_out)
        if layer.momentum is not None:
            output.addcmul_(gates.momentum_to_weights[..., None], x @ layer.momentum)  # + f (x S)
    else:
        output = (gates.weights_decay[..., None] * x) @ layer.offset
        if layer.momentum is not None:
            output.baddbmm_(gates.momentum_to_weights[..., None] * x, layer.momentum)
    if layer.decay_target is not None:
        output.baddbmm_(x, layer.decay_target)  # + x M_0
    return output.baddbmm_(scores, layer.deltas, alpha=-1)  # - ((x h^T) o G) delta: (N, C, C) @ (N, C, d_out)


def end_of_chunk(chunk: ChunkIntermediates) -> MemoryState:
    """Computes the state at the chunk's end, with the anchor of the chunk."""
    pairs = list(zip(chunk.layers, chunk.gates, strict=True))
    weights = tuple(_weights_at_end(layer, gates) for layer, gates in pairs)
    momentum = tuple(_momentum_at_end(layer, gates) for layer, gates in pairs if layer.momentum is not None)
    return MemoryState(weights, momentum, chunk.anchor)


def _weights_at_end(layer: ChunkLayer, gates: GateProducts) -> Tensor:
    """Computes M_T = beta_T W + f_T S - h^T diag(G_T) delta + M_0 (eq. 13-14, unrolled)."""
    weights = gates.weights_decay[..., -1, None, None] * layer.offset
    if layer.decay_target is not None:
        weights.add_(layer.decay_target)
    if layer.momentum is not None:
        weights.addcmul_(gates.momentum_to_weights[..., -1, None, None], layer.momentum)
    return _subtract_gradients(weights, layer, gates.gradient_to_weights[..., -1, :, None])


def _momentum_at_end(layer: ChunkLayer, gates: GateProducts) -> Tensor:
    """Computes S_T = m_T S - h^T diag(E_T theta) delta (eq. 14, unrolled: eq. 18)."""
    momentum = gates.momentum_decay[..., None, None] * layer.momentum
    return _subtract_gradients(momentum, layer, gates.gradient_to_momentum[..., None])


def _subtract_gradients(x: Tensor, layer: ChunkLayer, factor: Tensor) -> Tensor:
    """Computes x - h^T diag(factor) delta in place: x (N, d_in, d_out), factor (N, C, 1)."""
    if layer.inputs.shape[-1] > layer.deltas.shape[-1]:  # (N, d_in, C) @ (N, C, d_out)
        return x.baddbmm_(layer.inputs.mT, factor * layer.deltas, alpha=-1)
    return x.baddbmm_((factor * layer.inputs).mT, layer.deltas, alpha=-1)


def chunk_backward(
    grad_retrieved: Tensor,
    chunk: ChunkIntermediates,
    grad_weights: Sequence[Tensor],
    grad_momentum: Sequence[Tensor],
) -> ChunkGradients:
    """Computes the backward of `chunk_forward` of an MLP whose layers have the same gates, from the gradients with
    respect to its output. Six steps lead from the outputs to the inputs.
    """
    # 1. The queries' way through the layers once more: the input of each, and silu' before it
    reads = layer_inputs(chunk.inputs.queries, _reads_of_layers(chunk))
    # 2. The reads of each layer, and its weights and momentum at the end; from the last layer to the first
    grad, layer_gradients, gate_gradients = grad_retrieved, [], []
    for i in reversed(range(len(chunk.layers))):
        grad_of_momentum = grad_momentum[i] if grad_momentum else None
        gradients = _layer_backward(grad, grad_weights[i], grad_of_momentum, reads.inputs[i], chunk, i)
        layer_gradients.insert(0, gradients.layer)
        gate_gradients.append(gradients.gates)
        grad = gradients.x.mul_(reads.slopes[i - 1]) if i > 0 else gradients.x
    grads = ChunkLayer(*map(list, zip(*layer_gradients, strict=True)))  # a list over the layers for each field
    # 3. With the delta rule, the system that the last layer's deltas solve
    grad_values = None
    if chunk.token_deltas is not None:
        grad_values, grad_gates = _delta_rule_backward(grads, chunk)
        gate_gradients.append(grad_gates)
    # 4. The factors h and delta of the tokens' gradients, at the weights of the chunk's start
    grad_keys, grad_anchor = grads.inputs[0], []
    if chunk.anchor:
        network = gradient_factors_backward(
            chunk.factors, chunk.inputs.values, chunk.anchor, grads.inputs, grads.deltas
        )
        grad_keys, grad_anchor = network.keys, network.weights
        grad_values = network.values if grad_values is None else network.values + grad_values
    # 5. The products of the gates, which all layers share
    grad_products = GateProducts(*map(_sum_of_given, zip(*gate_gradients, strict=True)))
    inner_lr, filled = chunk.inputs.inner_lr, chunk.inputs.filled
    grad_gates = gate_products_backward(grad_products, chunk.gates[0], chunk.gate_intermediates, inner_lr, filled)
    # 6. The inputs, the state at the chunk's start, and the decay target
    return ChunkGradients(
        MemoryInputs(grad, grad_keys, grad_values, *grad_gates),
        MemoryState(grads.offset, [x for x in grads.momentum if x is not None], grad_anchor),
        [x for x in grads.decay_target if x is not None],
    )


def _delta_rule_backward(grads: ChunkLayer, chunk: ChunkIntermediates) -> tuple[Tensor, GateProducts]:
    """Adds the backward of `token_deltas` to the last layer's gradients in the lists of `grads`; returns the gradients
    with respect to the values and the gate products.
    """
    solved = token_deltas_backward(grads.deltas[-1], chunk.token_deltas, chunk.layers[-1], chunk.gates[-1])
    grads.offset[-1] = grads.offset[-1] + solved.layer.offset
    if grads.momentum[-1] is not None:
        grads.momentum[-1] = grads.momentum[-1] + solved.layer.momentum
    grads.inputs[-1] = grads.inputs[-1] + solved.layer.inputs
    if grads.decay_target[-1] is not None:  # the offset is the weights less the target
        grads.decay_target[-1] = grads.decay_target[-1] + solved.layer.decay_target - solved.layer.offset
    grads.deltas[-1] = torch.zeros_like(grads.deltas[-1])
    return solved.values, solved.gates


def _sum_of_given(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Sums the gradients that are not None; None if all are."""
    given = [x for x in parts if x is not None]
    return sum(given) if given else None


class _LayerGradients(NamedTuple):
    x: Tensor
    layer: ChunkLayer
    gates: GateProducts


def _layer_backward(
    grad: Tensor, grad_weights: Tensor, grad_momentum: Tensor | None, x: Tensor, chunk: ChunkIntermediates, i: int
) -> _LayerGradients:
    """Computes the backward of `read_layer` and `end_of_chunk` for layer i with respect to x, the layer and the gates.

    Given are the gradients with respect to the output (N, C, d_out), and to weights and momentum at the end (N, d_in,
    d_out).
    """
    layer, gates = chunk.layers[i], chunk.gates[i]
    inputs, deltas = layer.inputs, layer.deltas
    # 1. ((x h^T) o G) delta: with respect to G and, as `grad_scores`, to x h^T
    scores, grad_scores = x @ inputs.mT, grad @ deltas.mT  # (N, C, C)
    grad_products = (scores * grad_scores).neg_()
    scores, grad_scores = scores.mul_(gates.gradient_to_weights), grad_scores.mul_(gates.gradient_to_weights)
    # 2. beta (x W), and beta_T W in the weights at the end: with respect to x, beta and W
    grad_x, grad_beta, grad_offset = scaled_product_backward(grad, x, gates.weights_decay[..., None], layer.offset)
    grad_offset.addcmul_(gates.weights_decay[..., -1, None, None], grad_weights)
    grad_beta[..., -1] += (grad_weights * layer.offset).sum((-2, -1))
    # 3. The tokens' gradients h (x) delta in the weights at the end
    end = _end_backward(grad_weights, layer, gates.gradient_to_weights[..., -1, :, None])
    grad_products[..., -1, :] -= end.factor
    grad_inputs, grad_deltas = end.inputs, end.deltas
    # 4. The same for the momentum: f (x S), f_T S, and m_T S and the tokens' gradients in the momentum at the end
    grad_f = grad_m = grad_momentum_factor = grad_start_momentum = None
    if layer.momentum is not None:
        f = gates.momentum_to_weights[..., None]
        from_momentum, grad_f, grad_start_momentum = scaled_product_backward(grad, x, f, layer.momentum)
        grad_x.add_(from_momentum)
        grad_start_momentum.addcmul_(gates.momentum_to_weights[..., -1, None, None], grad_weights)
        grad_start_momentum.addcmul_(gates.momentum_decay[..., None, None], grad_momentum)
        grad_f[..., -1] += (grad_weights * layer.momentum).sum((-2, -1))
        grad_m = (grad_momentum * layer.momentum).sum((-2, -1))
        end = _end_backward(grad_momentum, layer, gates.gradient_to_momentum[..., None])
        grad_momentum_factor = end.factor.neg_()
        grad_inputs.add_(end.inputs)
        grad_deltas.add_(end.deltas)
    grad_gates = GateProducts(grad_products, grad_beta, grad_f, grad_momentum_factor, grad_m)
    # 5. h, delta and x in the scores of step 1
    grad_inputs = grad_inputs.baddbmm_(grad_scores.mT, x).neg_()
    grad_deltas = grad_deltas.baddbmm_(scores.mT, grad).neg_()
    grad_x.baddbmm_(grad_scores, inputs, alpha=-1)
    # 6. The decay target: W is the weights less M_0, and x M_0 is added to the output
    grad_target = None
    if layer.decay_target is not None:
        grad_x.baddbmm_(grad, layer.decay_target.mT)
        grad_target = (grad_weights - grad_offset).baddbmm_(x.mT, grad)
    grad_layer = ChunkLayer(grad_offset, grad_start_momentum, grad_inputs, grad_deltas, grad_target)
    return _LayerGradients(grad_x, grad_layer, grad_gates)


class _EndGradients(NamedTuple):
    inputs: Tensor
    deltas: Tensor
    factor: Tensor


def _end_backward(grad: Tensor, layer: ChunkLayer, factor: Tensor) -> _EndGradients:
    """Computes the gradients of h^T diag(factor) delta with respect to h (N, C, d_in), delta (N, C, d_out) and the
    factor per token, given as (N, C, 1), here (N, C).
    """
    inputs, deltas = layer.inputs, layer.deltas
    if inputs.shape[-1] > deltas.shape[-1]:
        product = inputs @ grad  # (N, C, d_in) @ (N, d_in, d_out)
        grad_factor = (deltas * product).sum(-1)
        return _EndGradients((factor * deltas) @ grad.mT, product.mul_(factor), grad_factor)
    product = deltas @ grad.mT  # (N, C, d_out) @ (N, d_out, d_in)
    grad_factor = (inputs * product).sum(-1)
    return _EndGradients(product.mul_(factor), (factor * inputs) @ grad, grad_factor)


CHUNK_FUNCTIONS = ChunkFunctions(chunk_forward, chunk_intermediates, chunk_backward)
