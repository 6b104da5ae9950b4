"""The hand-written backward of a group of consecutive chunks of the memory's update, and of its gates' products
(`memory_chunk` is the forward).

From the last chunk to the first go only the gradients with respect to the state and to the deltas. Everything else is
computed for all chunks of the group at once: before the chunks the backward of the reads, after them the backward of
the gates' products.

Shapes: as in `memory_chunk`.
"""

from collections.abc import Sequence
from functools import partial, reduce

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import pad

from .memory_chunk import (
    ChunkFactors,
    ChunkLayer,
    EarlierGates,
    EndGates,
    GateProducts,
    GroupIntermediates,
    add_scaled_product,
    reads_of_layers,
    stack,
    unstack,
    zero_empty_slots,
)
from .memory_network import (
    FactorsDerivatives,
    factors_derivatives,
    gradient_factors_backward,
    layer_inputs,
    tokens_backward,
)
from .memory_state import Gates, MemoryInputs, MemoryState, where_rows


def with_anchor_backward(grads: MemoryState, starts: Tensor | None) -> MemoryState:
    """Computes the backward of `with_anchor`: the anchor's gradient goes to the weights where the chunk starts, and to
    the previous anchor elsewhere. An empty anchor has gradient 0.
    """
    if not grads.anchor:
        return grads
    to_weights, to_anchor = grads.anchor, ()
    if starts is not None:
        zeros = [torch.zeros_like(x) for x in grads.anchor]
        to_weights = tuple(map(partial(where_rows, starts), grads.anchor, zeros))
        to_anchor = tuple(map(partial(where_rows, starts), zeros, grads.anchor))
    return MemoryState(tuple(map(torch.add, grads.weights, to_weights)), grads.momentum, to_anchor)


def group_backward(
    grad_retrieved: Tensor,
    group: GroupIntermediates,
    grads: MemoryState,
    starts: Tensor | None,
) -> tuple[MemoryInputs, MemoryState, list[Tensor]]:
    """Computes the backward of `group_forward` of an MLP whose layers share their gates, from the gradients with
    respect to the retrieved values (P * N, C, D) and to the state at the group's end (an empty anchor has gradient 0).
    Returns the gradients with respect to the inputs (P * N, C, ...), the state at the group's start and the decay
    target (empty for 0).
    """
    depth = len(group.layers)
    # 1. The queries' way through the layers once more: the input of each, and silu' before it
    inputs, slopes = layer_inputs(group.inputs.queries, reads_of_layers(group))
    # 2. The reads of each layer, from the last to the first. `layers` collects the gradients of all chunks.
    grad, layers, gates = grad_retrieved, [], []
    for i in reversed(range(depth)):
        grad, of_layer, of_gates = _read_backward(grad, inputs[i], group.layers[i], group.gates[i])
        layers.insert(0, of_layer)
        gates.insert(0, of_gates)
        grad = grad.mul_(slopes[i - 1]) if i > 0 else grad
    # 3. From the last chunk to the first: the states at the chunks' ends and the deltas
    derivatives, num_rows = _derivatives(group), len(grads.weights[0])
    grads, of_ends, of_deltas, of_factors = _chunks_backward(group, layers, derivatives, grads, starts)
    # 4. The decay target, and the products of the gates at the ends and before each token
    grad_target = []
    for i, (layer, total) in enumerate(zip(group.layers, layers, strict=True)):
        of_weights, *of_end = stack([x[i] for x in of_ends])
        gates[i] = _with_end_gates(gates[i], layer, of_weights, *of_end)
        if layer.decay_target is not None:  # the offset is the weights minus the target
            grad_target.append(total.decay_target.add_(of_weights).sub_(total.offset))
    grad_values = None
    if of_deltas:
        error, *of_gates = stack(of_deltas)
        gates.append(_earlier_gates_backward(*of_gates, group.layers[-1]))
        grad_values = -error
        if grad_target:
            grad_target[-1].baddbmm_(group.layers[-1].inputs.mT, error)  # (N, d_in, C) @ (N, C, d_out)
    grad_target = [x.unflatten(0, (-1, num_rows)).sum(0) for x in grad_target]
    # 5. Keys and values in the gradient factors
    if of_factors:
        tokens, first_weights = group.inputs, stack([x.anchor[0] for x in group.chunks])
        of_tokens = derivatives, tokens.keys, tokens.values, first_weights, layers[0].inputs
        of_values = tokens_backward(*stack(of_factors), *of_tokens)
        grad_values = of_values if grad_values is None else grad_values.add_(of_values)
    # 6. The gates, whose products all layers share
    products = GateProducts(*map(_sum_of_given, zip(*gates, strict=True)))
    inner_lr, filled = group.inputs.inner_lr, group.inputs.filled
    grad_gates = gate_products_backward(products, group.gates[0], group.gate_intermediates, inner_lr, filled)
    return MemoryInputs(grad, layers[0].inputs, grad_values, *grad_gates), grads, grad_target


def _chunks_backward(
    group: GroupIntermediates,
    layers: Sequence[ChunkLayer],
    derivatives: FactorsDerivatives | None,
    grads: MemoryState,
    starts: Tensor | None,
) -> tuple[MemoryState, list[list], list[tuple], list[tuple]]:
    """Computes the backward of the chunks' ends, of `token_deltas` and of the gradient factors, from the last chunk to
    the first. Adds gradients to `layers`, in place.

    Returns the gradients with respect to the state at the group's start, and for each chunk three results: of
    `_end_backward` for each layer, of `_token_deltas_backward` (with the delta rule), and of
    `gradient_factors_backward` for the tokens (with an anchor).
    """
    num_chunks, depth = len(group.chunks), len(group.layers)
    of_chunks = zip(
        group.chunks,
        zip(*(unstack(x._replace(decay_target=None), num_chunks) for x in layers), strict=True),
        unstack(group.end_gates[0], num_chunks),
        unstack(group.earlier_gates, num_chunks),
        unstack(derivatives, num_chunks),
        range(num_chunks),
        strict=True,
    )
    of_ends, of_deltas, of_factors = [], [], []
    for chunk, total, end, earlier, of_factor, p in reversed(list(of_chunks)):
        momentum = grads.momentum or [None] * depth
        arguments = zip(grads.weights, momentum, chunk.layers, total, strict=True)
        of_ends.insert(0, [_end_backward(*x, end) for x in arguments])
        h, deltas = [x.inputs for x in total], [x.deltas for x in total]
        if chunk.system is not None:
            of_deltas.insert(0, _token_deltas_backward(deltas[-1], chunk, earlier, total[-1]))
            deltas[-1] = None
        grad_anchor = ()
        if chunk.anchor:
            of_weights, of_tokens = gradient_factors_backward(chunk.factors, of_factor, chunk.anchor, h, deltas)
            of_factors.insert(0, of_tokens)
            grad_anchor = tuple(map(torch.add, of_weights, grads.anchor) if grads.anchor else of_weights)
        of_momentum = tuple(x.momentum for x in total if x.momentum is not None)
        grads = MemoryState(tuple(x.offset for x in total), of_momentum, grad_anchor)
        if p > 0:
            grads = with_anchor_backward(grads, None if starts is None else starts[p])
    return grads, of_ends, of_deltas, of_factors


def _derivatives(group: GroupIntermediates) -> FactorsDerivatives | None:
    """Computes the derivatives of the gradient factors of all chunks at once; None without factors."""
    if not group.chunks[0].anchor:
        return None
    kept = [chunk.factors.intermediates for chunk in group.chunks]
    norms = [] if group.norms is None else stack([[*x.delta_norms, x.error_norm] for x in kept])
    pre_activations = stack([x.pre_activations for x in kept])
    return factors_derivatives([x.inputs for x in group.layers], pre_activations, norms, group.norms)


def _sum_of_given(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Sums the gradients that are not None, in place of the first; None if there are none."""
    given = [x for x in parts if x is not None]
    return reduce(Tensor.add_, given) if given else None


def _token_deltas_backward(
    grad: Tensor, chunk: ChunkFactors, gates: EarlierGates, total: ChunkLayer
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Computes the backward of `token_deltas` from the gradient with respect to the deltas. Adds the gradients with
    respect to W, S and h to `total`, in place. Returns the gradients with respect to the error at the chunk's start
    (N, C, d_out) and to G_{i-1} (N, C, C), and the products of the error's gradient with W^T and S^T (N, C, d_in).
    """
    layer = chunk.layers[-1]
    h, deltas = layer.inputs, layer.deltas
    # 1. A delta = e_0: with respect to e_0, A^-T grad; from the right, which copies least
    grad_error = solve_triangular(chunk.system, grad.mT, upper=False, left=False).mT
    # 2. A = (h h^T) o G before each token, but for the diagonal where it is 1/2
    grad_products = torch.bmm(grad_error, deltas.mT).neg_()  # (N, C, d_out) @ (N, d_out, C)
    grad_scores = grad_products * gates.system
    is_square = chunk.system.diagonal(dim1=-2, dim2=-1) > 0.5
    grad_scores.diagonal(dim1=-2, dim2=-1).mul_(is_square)
    grad_products.mul_(chunk.scores)
    total.inputs.baddbmm_(grad_scores, h).baddbmm_(grad_scores.mT, h)
    # 3. beta h W + f h S + h M_0
    from_weights = torch.bmm(grad_error, layer.offset.mT)  # (N, C, d_out) @ (N, d_out, d_in)
    total.inputs.addcmul_(gates.weights_decay, from_weights)
    add_scaled_product(total.offset, h, gates.weights_decay, grad_error)
    from_momentum = None
    if layer.momentum is not None:
        from_momentum = torch.bmm(grad_error, layer.momentum.mT)
        total.inputs.addcmul_(gates.momentum_to_weights, from_momentum)
        add_scaled_product(total.momentum, h, gates.momentum_to_weights, grad_error)
    if layer.decay_target is not None:
        total.inputs.baddbmm_(grad_error, layer.decay_target.mT)
    return grad_error, grad_products, from_weights, from_momentum


def _read_backward(
    grad: Tensor, x: Tensor, layer: ChunkLayer, gates: GateProducts
) -> tuple[Tensor, ChunkLayer, GateProducts]:
    """Computes the backward of `read_layer` with respect to x, the layer and the gates, from the gradient with respect
    to the output (N, C, d_out).
    """
    h, deltas = layer.inputs, layer.deltas
    # 1. ((x h^T) o G) delta: with respect to G and, as `grad_scores`, to x h^T
    scores, grad_scores = torch.bmm(x, h.mT), torch.bmm(grad, deltas.mT)  # (N, C, C)
    grad_products = (scores * grad_scores).neg_()
    scores, grad_scores = scores.mul_(gates.gradient_to_weights), grad_scores.mul_(gates.gradient_to_weights)
    grad_deltas = torch.bmm(scores.mT, grad).neg_()
    grad_inputs = torch.bmm(grad_scores.mT, x).neg_()
    # 2. beta (x W) and f (x S)
    grad_x, grad_beta, grad_offset = _scaled_product_backward(grad, x, gates.weights_decay[..., None], layer.offset)
    grad_x.baddbmm_(grad_scores, h, alpha=-1)
    grad_f = grad_momentum = grad_target = None
    if layer.momentum is not None:
        f = gates.momentum_to_weights[..., None]
        from_momentum, grad_f, grad_momentum = _scaled_product_backward(grad, x, f, layer.momentum)
        grad_x.add_(from_momentum)
    # 3. x M_0
    if layer.decay_target is not None:
        grad_x.baddbmm_(grad, layer.decay_target.mT)
        grad_target = torch.bmm(x.mT, grad)
    grad_layer = ChunkLayer(grad_offset, grad_momentum, grad_inputs, grad_deltas, grad_target)
    return grad_x, grad_layer, GateProducts(grad_products, grad_beta, grad_f, None, None)


def _scaled_product_backward(
    grad: Tensor, inputs: Tensor, factor: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of factor x W with respect to x (N, C, d_in), factor (N, C) and W (N, d_in, d_out) from
    the gradient of the product (N, C, d_out); the factor is given as (N, C, 1).
    """
    from_weights = torch.bmm(grad, weights.mT)  # (N, C, d_out) @ (N, d_out, d_in)
    grad_factor = (inputs * from_weights).sum(-1)
    wide = inputs.shape[-1] > grad.shape[-1]  # then the factor is applied to the gradient
    scaled, grad = (inputs, factor * grad) if wide else (factor * inputs, grad)
    return from_weights.mul_(factor), grad_factor, torch.bmm(scaled.mT, grad)


def _end_backward(
    grad_weights: Tensor, grad_momentum: Tensor | None, layer: ChunkLayer, total: ChunkLayer, end: EndGates
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Computes the backward of `_end_of_chunk` for one layer; adds the gradients with respect to the layer to `total`,
    in place. Returns the tensors that the gradients with respect to the gates need: the given gradients with respect to
    weights and momentum at the end (N, d_in, d_out), and their products with the deltas (N, C, d_in), or with the
    inputs if they are wider (N, C, d_out).
    """
    total.offset.addcmul_(end.weights_decay, grad_weights)
    weights_product = _subtract_steps_backward(grad_weights, layer, total, end.gradient_to_weights)
    momentum_product = None
    if layer.momentum is not None:
        total.momentum.addcmul_(end.momentum_to_weights, grad_weights)
        total.momentum.addcmul_(end.momentum_decay, grad_momentum)
        momentum_product = _subtract_steps_backward(grad_momentum, layer, total, end.gradient_to_momentum)
    return grad_weights, grad_momentum, weights_product, momentum_product


def _subtract_steps_backward(grad: Tensor, layer: ChunkLayer, total: ChunkLayer, factor: Tensor) -> Tensor:
    """Adds the gradients of -h^T diag(factor) delta with respect to h and delta to `total`, in place; returns the
    product of the gradient (N, d_in, d_out) with delta, or with h if that is wider.
    """
    h, deltas = layer.inputs, layer.deltas
    if h.shape[-1] > deltas.shape[-1]:
        product = torch.bmm(h, grad)  # (N, C, d_in) @ (N, d_in, d_out)
        total.deltas.addcmul_(factor, product, value=-1)
        total.inputs.baddbmm_(factor * deltas, grad.mT, alpha=-1)
    else:
        product = torch.bmm(deltas, grad.mT)  # (N, C, d_out) @ (N, d_out, d_in)
        total.inputs.addcmul_(factor, product, value=-1)
        total.deltas.baddbmm_(factor * h, grad, alpha=-1)
    return product


def _with_end_gates(
    total: GateProducts,
    layer: ChunkLayer,
    weights: Tensor,
    momentum: Tensor | None,
    weights_product: Tensor,
    momentum_product: Tensor | None,
) -> GateProducts:
    """Adds the gradients with respect to `EndGates`, computed from the results of `_end_backward`, to `total`, the
    gradients with respect to the gate products of one layer.
    """
    narrower = layer.deltas if layer.inputs.shape[-1] > layer.deltas.shape[-1] else layer.inputs
    total.gradient_to_weights[..., -1, :] -= (narrower * weights_product).sum(-1)
    total.weights_decay[..., -1] += (weights * layer.offset).sum((-2, -1))
    if layer.momentum is None:
        return total
    total.momentum_to_weights[..., -1] += (weights * layer.momentum).sum((-2, -1))
    return total._replace(
        gradient_to_momentum=(narrower * momentum_product).sum(-1).neg_(),
        momentum_decay=(momentum * layer.momentum).sum((-2, -1)),
    )


def _earlier_gates_backward(
    products: Tensor, from_weights: Tensor, from_momentum: Tensor | None, layer: ChunkLayer
) -> GateProducts:
    """Computes the gradients with respect to the gate products from the results of `_token_deltas_backward`. These
    concern `EarlierGates`, whose products before token i are the products after token i - 1.
    """
    grad_f = None
    if from_momentum is not None:
        grad_f = pad((layer.inputs * from_momentum).sum(-1), (-1, 1))
    grad_beta = pad((layer.inputs * from_weights).sum(-1), (-1, 1))
    return GateProducts(pad(products, (0, 0, -1, 1)), grad_beta, grad_f, None, None)


def gate_products_backward(
    grad: GateProducts,
    products: GateProducts,
    intermediates: tuple[Tensor | None, ...],
    inner_lr: Tensor,
    filled: Tensor | None = None,
) -> Gates:
    """Computes the gradients with respect to the gates from the gradients with respect to their products."""
    (inner_lr,) = zero_empty_slots(filled, inner_lr)
    retain, combined, momentum, first_decay = intermediates
    # 1. G = (R E) diag(theta), f = eta_0 (R E)_0 and E_T diag(theta), with respect to theta and R E
    grad_lr = (grad.gradient_to_weights * combined).sum(-2)
    grad_combined = grad.gradient_to_weights * inner_lr[..., None, :]
    grad_beta = _suffix_sums(grad.weights_decay * products.weights_decay)
    if momentum is None:
        grad_log_retain = _segment_sums_backward(grad_combined * retain) + grad_beta
        return Gates(*zero_empty_slots(filled, grad_lr, None, grad_log_retain))
    grad_lr = grad_lr + grad.gradient_to_momentum * momentum[..., -1, :]
    grad_combined[..., 0] += grad.momentum_to_weights * first_decay
    # 2. R E, E_T diag(theta) and m_T = eta_0 E_T0, with respect to R and E
    grad_retain = grad_combined @ momentum.mT
    grad_momentum = retain.mT @ grad_combined
    grad_momentum[..., -1, :] += grad.gradient_to_momentum * inner_lr
    grad_momentum[..., -1, 0] += grad.momentum_decay * first_decay[..., 0]
    # 3. R and beta with respect to log(1 - alpha), E and eta_0 with respect to log eta
    grad_log_decay = _segment_sums_backward(grad_momentum * momentum)
    of_first = (grad.momentum_to_weights * products.momentum_to_weights).sum(-1)
    grad_log_decay[..., 0] += of_first + grad.momentum_decay * products.momentum_decay
    grads = (grad_lr, grad_log_decay, _segment_sums_backward(grad_retain * retain) + grad_beta)
    return Gates(*zero_empty_slots(filled, *grads))


def _suffix_sums(x: Tensor) -> Tensor:
    """Sums each entry and all entries after it: (..., C)."""
    return x.flip(-1).cumsum(-1).flip(-1)


def _segment_sums_backward(grad: Tensor) -> Tensor:
    """Computes the gradients with respect to x_l (..., C) from the gradients of the sums over j < l <= t at [t, j], 0
    above the diagonal.
    """
    # Not as the sum of the columns j < l minus the sum of the rows t < l: its error is ten times as large for eta.
    return pad(grad.cumsum(-1).tril(-1).sum(-2)[..., :-1], (1, 0))
