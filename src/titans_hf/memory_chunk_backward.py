"""The hand-written backward of a group of consecutive chunks of the memory's update, and of its gates' products
(`memory_chunk` is the forward).

From the last chunk to the first go only the gradients with respect to the state and to the deltas. Everything else is
computed for all chunks of the group at once: before the chunks the backward of the reads, after them the backward of
the gates' products.

Shapes: as in `memory_chunk`.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .memory_chunk import (
    ChunkLayer,
    GateProducts,
    GroupGates,
    GroupStates,
    delta_system,
    reads_of_layers,
    repeated,
    scaled,
    scan_group,
    solve,
    stack,
    start_error,
    unstack,
    weights_of,
    zero_empty_slots,
)
from .memory_network import (
    FactorsDerivatives,
    GradientFactors,
    Limits,
    UpdateRule,
    factors_derivatives,
    gradient_factors,
    gradient_factors_backward,
    layer_inputs,
    silu_backward,
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


class DeltaRule(NamedTuple):
    """What the delta rule's backward needs of the last layer, for all chunks at once."""

    scores: Tensor  # h h^T (P * N, C, C)
    inverse: Tensor  # A^-1 (P * N, C, C)
    grad_scores: Tensor  # the gradient of A with respect to the scores (P * N, C, C)
    start: Tensor  # beta, f before each token (P * N, C, M, 1)
    of_start: Tensor  # [beta h | f h] (P * N, C, M * d_in)


def group_backward(
    grad_retrieved: Tensor,
    inputs: MemoryInputs,
    start: GroupStates | MemoryState,
    decay_target: Sequence[Tensor],
    starts: Tensor | None,
    grads: MemoryState,
    rule: UpdateRule,
) -> tuple[MemoryInputs, MemoryState, list[Tensor]]:
    """Computes the backward of `group_forward` of an MLP whose layers share their gates, from the gradients with
    respect to the retrieved values (P * N, C, D) and to the state at the group's end (an empty anchor has gradient 0).
    Returns the gradients with respect to the inputs (P * N, C, ...), the state at the group's start and the decay
    target (empty for 0).

    start: the states at the chunks' starts, or that at the group's start, from which they are computed again.
    """
    num_chunks = len(inputs.keys)
    inputs, depth = inputs.map(lambda x: x.flatten(0, 1)), len(grads.weights)
    gates = GroupGates.of(inputs, depth, rule)
    if isinstance(start, MemoryState):
        start = scan_group(inputs, start, decay_target, starts, rule, gates, num_chunks)[0]
    targets = repeated(decay_target, num_chunks, depth)
    # 1. The tokens' gradients, and the delta rule's system
    factors, h, deltas, anchor, derivatives, delta_rule = None, [inputs.keys], [], (), None, None
    if rule.needs_anchor(depth):
        anchor = start.anchors or tuple(map(weights_of, start.layers, targets))
        limits = Limits.of(inputs.keys, inputs.values, rule)
        factors = gradient_factors(inputs.keys, inputs.values, anchor, rule, limits)
        h, deltas, derivatives = list(factors.inputs), list(factors.deltas), factors_derivatives(factors)
    if rule.delta_rule:
        delta_rule, delta = _delta_rule(inputs, h[-1], start.layers[-1], targets[-1], gates)
        deltas[depth - 1 :] = [delta]
    layers = list(map(ChunkLayer, start.layers, h, deltas, targets))
    # 2. The reads of each layer, from the last to the first, of the queries on their way through the layers once more
    queries, pre_activations = layer_inputs(inputs.queries, reads_of_layers(layers, gates))
    grad, totals, of_gates = grad_retrieved, [], []
    for i in reversed(range(depth)):
        grad, of_layer, of_products = _read_backward(grad, queries[i], layers[i], gates.products[i])
        totals.insert(0, of_layer)
        of_gates.append(of_products)
        grad = silu_backward(grad, pre_activations[i - 1]) if i > 0 else grad
    # 3. From the last chunk to the first: the states at the chunks' starts and the deltas
    of_anchor = (factors, derivatives, anchor)
    before, after, chain = _chunks_backward(
        layers, totals, gates, delta_rule, of_anchor, decay_target, starts, rule, grads, num_chunks
    )
    # 4. The keys, which no earlier chunk depends on
    grad_keys = totals[0].inputs
    chain.products[0] = _steps_backward(grad_keys, layers[0], after[0], gates.ends[0].steps)
    grad_values = None
    if delta_rule is not None:
        error = stack(chain.errors)
        if depth == 1:
            chain.of_errors[:] = [_error_backward(grad_keys, error, layers[-1], delta_rule)]
        grad_values = -error
        grad_products, product = (stack(x) for x in zip(*chain.of_errors, strict=True))
        of_gates.append(_earlier_gates_backward(grad_products * delta_rule.scores, product, h[-1]))
        if decay_target:
            of_target = torch.bmm(h[-1].mT, error).unflatten(0, (num_chunks, -1)).sum(0)  # (N, d_in, C) @ (N, C, d_out)
            chain.grad_target[-1].add_(of_target)
    if chain.of_factors:
        of_tokens = map(stack, zip(*((x, y, *z) for x, y, z in chain.of_factors), strict=True))
        output, of_error, *log_limits = of_tokens
        of_values = tokens_backward(output, of_error, log_limits, derivatives, inputs.values, anchor[0], grad_keys)
        grad_values = of_values if grad_values is None else grad_values.add_(of_values)
    # 5. The gates, whose products all layers share
    for i, layer in enumerate(layers):
        of_gates[depth - 1 - i] = _with_end_gates(of_gates[depth - 1 - i], layer, after[i], chain.products[i])
        if decay_target:
            chain.grad_target[i].add_(totals[i].decay_target.unflatten(0, (num_chunks, -1)).sum(0))
    products = GateProducts(*map(_sum_of_given, zip(*of_gates, strict=True)))
    grad_gates = gate_products_backward(
        products, gates.products[0], gates.intermediates, inputs.inner_lr, inputs.filled
    )
    return MemoryInputs(grad, grad_keys, grad_values, *grad_gates), before, chain.grad_target


def _delta_rule(
    inputs: MemoryInputs, h: Tensor, states: Tensor, target: Tensor | None, gates: GroupGates
) -> tuple[DeltaRule, Tensor]:
    """Computes the delta rule's system and the deltas of all chunks."""
    of_start = scaled(h, gates.earlier.start)
    scores, system = delta_system(h, gates.earlier)
    identity = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand_as(system)
    inverse = solve(system, identity)
    delta = torch.bmm(inverse, start_error(h, of_start, states, target, inputs.values))
    grad_scores = -gates.earlier.system
    grad_scores.diagonal(dim1=-2, dim2=-1).mul_(system.diagonal(dim1=-2, dim2=-1) > 0.5)
    return DeltaRule(scores, inverse, grad_scores, gates.earlier.start, of_start), delta


class ChainGradients(NamedTuple):
    """What the chunks' backward leaves for all chunks at once: lists with an entry per chunk, or per layer."""

    errors: list[Tensor]  # with respect to e_0 (N, C, d_out)
    of_errors: list[tuple[Tensor, Tensor]]  # of `_error_backward`
    products: list  # of `_steps_backward` of each layer, (P * N, C, M, d_in)
    of_factors: list[tuple]  # of `gradient_factors_backward`
    grad_target: list[Tensor]  # with respect to M_0 of each layer (N, d_in, d_out)


def _chunks_backward(
    layers: Sequence[ChunkLayer],
    totals: Sequence[ChunkLayer],
    gates: GroupGates,
    delta_rule: DeltaRule | None,
    of_anchor: tuple[GradientFactors | None, FactorsDerivatives | None, tuple[Tensor, ...]],
    decay_target: Sequence[Tensor],
    starts: Tensor | None,
    rule: UpdateRule,
    grads: MemoryState,
    num_chunks: int,
) -> tuple[MemoryState, list[Tensor], ChainGradients]:
    """Computes the backward of `scan_group` from the last chunk to the first. `totals` has the gradients by the reads;
    adds to them, in place, but for the first layer's inputs.

    Returns the gradients with respect to the state at the group's start, for each layer those with respect to the
    states at the chunks' ends (P * N, M, d_in, d_out), and what is left.
    """
    depth, has_momentum, carried = len(layers), bool(grads.momentum), list(grads.anchor)
    states = []  # of each layer at the chunks' starts, and at the group's end: (P + 1, N, M, d_in, d_out)
    for i, total in enumerate(totals):
        at_end = torch.stack([grads.weights[i], *(x[i] for x in [grads.momentum] * has_momentum)], 1)
        states.append(torch.cat([total.states, at_end]).unflatten(0, (num_chunks + 1, -1)))
    steps = [scaled(x.inputs, end.steps) for x, end in zip(layers, gates.ends, strict=True)]
    result = ChainGradients([], [], [[] for _ in layers], [], [x.clone() for x in grads.weights if decay_target])
    of_reads = tuple((x.inputs, x.deltas) for x in totals)
    of_chunks = (tuple(layers[1:]), of_reads, gates.ends[0], delta_rule, of_anchor, tuple(steps))
    chunks = unstack(of_chunks, num_chunks)
    for p in reversed(range(num_chunks)):
        own, total, end, of_rule, (factors, derivatives, anchor), scaled_steps = chunks[p]
        for i in range(depth):
            at_start, at_end = states[i][p], states[i][p + 1]
            total[i][1].baddbmm_(scaled_steps[i], at_end.flatten(1, 2), alpha=-1)
            at_start.addcmul_(end.decay, at_end)
            if has_momentum:
                at_start[:, 1].addcmul_(end.momentum_to_weights, at_end[:, 0])
            if i > 0:
                result.products[i].insert(0, _steps_backward(total[i][0], own[i - 1], at_end, end.steps))
        h, deltas = [None, *(x for x, _ in total[1:])], [x for _, x in total]
        if of_rule is not None:
            error = torch.bmm(of_rule.inverse.mT, deltas[-1])  # A delta = e_0: with respect to e_0, A^-T grad
            states[-1][p].flatten(1, 2).baddbmm_(of_rule.of_start.mT, error)
            if depth > 1:
                result.of_errors.insert(0, _error_backward(h[-1], error, own[-1], of_rule))
            result.errors.insert(0, error)
            deltas[-1] = None
        if anchor:
            of_weights, (output, of_error, logs) = gradient_factors_backward(
                factors, derivatives, anchor, rule, h, deltas
            )
            result.of_factors.insert(0, (output, of_error, logs))
            carried = list(map(torch.add, of_weights, carried)) if carried else of_weights
            if p > 0:  # to the weights where the chunk starts, to the chunk before elsewhere
                to_weights, carried = carried, []
                if starts is not None:
                    carried = [where_rows(starts[p], torch.zeros_like(x), x) for x in to_weights]
                    to_weights = list(map(torch.sub, to_weights, carried))
                for i, x in enumerate(to_weights):
                    states[i][p, :, 0].add_(x)
                    if decay_target:  # these weights are W + M_0
                        result.grad_target[i].add_(x)
    for i in range(1, depth):
        result.products[i] = stack(result.products[i])
    for total, of_states in zip(result.grad_target, states, strict=False):
        total.sub_(of_states[0, :, 0])
    at_start = [tuple(x[0, :, m].contiguous() for x in states) for m in range(1 + has_momentum)]
    before = MemoryState(at_start[0], at_start[1] if has_momentum else (), tuple(carried))
    return before, [x[1:].flatten(0, 1) for x in states], result


def _steps_backward(grad_inputs: Tensor, layer: ChunkLayer, at_end: Tensor, factors: Tensor) -> Tensor:
    """Computes the backward of -h^T diag(factors) delta, with factors (N, C, M, 1), with respect to h from the gradient
    (N, M, d_in, d_out), and subtracts it from `grad_inputs`, in place. Returns its product with the deltas, (N, C, M,
    d_in).
    """
    product = torch.bmm(layer.deltas, at_end.flatten(1, 2).mT).unflatten(-1, (-1, grad_inputs.shape[-1]))
    for part in range(product.shape[2]):
        grad_inputs.addcmul_(factors[:, :, part], product[:, :, part], value=-1)
    return product


def _error_backward(grad_inputs: Tensor, error: Tensor, layer: ChunkLayer, rule: DeltaRule) -> tuple[Tensor, Tensor]:
    """Computes the backward of A delta = e_0 with respect to h from the gradient with respect to e_0 (N, C, d_out), and
    adds it to `grad_inputs`, in place. Returns the products of that gradient with the deltas (N, C, C), and with W and
    S (N, C, M, d_in).
    """
    grad_products = torch.bmm(error, layer.deltas.mT)  # (N, C, d_out) @ (N, d_out, C)
    grad_scores = grad_products * rule.grad_scores
    grad_inputs.baddbmm_(grad_scores + grad_scores.mT, layer.inputs)
    product = torch.bmm(error, layer.states.flatten(1, 2).mT).unflatten(-1, (-1, grad_inputs.shape[-1]))
    for part in range(product.shape[2]):
        grad_inputs.addcmul_(rule.start[:, :, part], product[:, :, part])
    if layer.decay_target is not None:
        grad_inputs.baddbmm_(error, layer.decay_target.mT)
    return grad_products, product


def _read_backward(
    grad: Tensor, x: Tensor, layer: ChunkLayer, gates: GateProducts
) -> tuple[Tensor, ChunkLayer, GateProducts]:
    """Computes the backward of `read_layer` with respect to x, the layer and the gates, from the gradient with respect
    to the output (N, C, d_out).
    """
    h, deltas, start = layer.inputs, layer.deltas, gates.start_to_weights[..., None]
    # 1. ((x h^T) o G) delta: with respect to G and, as `grad_scores`, to x h^T
    scores, grad_scores = torch.bmm(x, h.mT), torch.bmm(grad, deltas.mT)  # (N, C, C)
    grad_products = (scores * grad_scores).neg_()
    scores, grad_scores = scores.mul_(gates.gradient_to_weights), grad_scores.mul_(gates.gradient_to_weights)
    grad_deltas = torch.bmm(scores.mT, grad).neg_()
    grad_inputs = torch.bmm(grad_scores.mT, x).neg_()
    # 2. beta (x W) + f (x S)
    joined = layer.states.flatten(1, 2)  # (N, M * d_in, d_out)
    product = torch.bmm(grad, joined.mT).unflatten(-1, (-1, x.shape[-1]))  # (N, C, M, d_in)
    grad_start = (product * x[:, :, None]).sum(-1)
    grad_states = torch.bmm(scaled(x, start).mT, grad).view_as(layer.states)
    grad_x = product.mul_(start).sum(2).baddbmm_(grad_scores, h, alpha=-1)
    # 3. x M_0
    grad_target = None
    if layer.decay_target is not None:
        grad_x.baddbmm_(grad, layer.decay_target.mT)
        grad_target = torch.bmm(x.mT, grad)
    grad_layer = ChunkLayer(grad_states, grad_inputs, grad_deltas, grad_target)
    return grad_x, grad_layer, GateProducts(grad_products, grad_start, None, None)


def _with_end_gates(total: GateProducts, layer: ChunkLayer, at_end: Tensor, product: Tensor) -> GateProducts:
    """Adds the gradients with respect to `EndGates`, from the gradients with respect to the states at the chunks' ends
    (N, M, d_in, d_out) and their products with the deltas (N, C, M, d_in), to `total`, the gradients with respect to
    the gate products of one layer.
    """
    of_steps = (layer.inputs[:, :, None] * product).sum(-1).neg_()  # G_T, E_T theta
    of_decay = (at_end * layer.states).sum((-2, -1))  # beta_T, m_T
    total.gradient_to_weights[..., -1, :] += of_steps[..., 0]
    total.start_to_weights[..., -1, 0] += of_decay[..., 0]
    if of_decay.shape[-1] == 1:
        return total
    total.start_to_weights[..., -1, 1] += (at_end[:, 0] * layer.states[:, 1]).sum((-2, -1))
    return total._replace(gradient_to_momentum=of_steps[..., 1], momentum_decay=of_decay[..., 1])


def _earlier_gates_backward(grad_products: Tensor, product: Tensor, h: Tensor) -> GateProducts:
    """Computes the gradients with respect to the gate products from the results of `_error_backward`, the first times
    the scores. These concern `EarlierGates`, whose products before token i are the products after token i - 1.
    """
    grad_start = (h[:, :, None] * product).sum(-1)
    return GateProducts(-pad(grad_products, (0, 0, -1, 1)), pad(grad_start, (0, 0, -1, 1)), None, None)


def _sum_of_given(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Sums the gradients that are not None, in place of the first; None if there are none."""
    first, *others = [x for x in parts if x is not None] or [None]
    for x in others:
        first.add_(x)
    return first


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
    grad_beta = _suffix_sums(grad.start_to_weights[..., 0] * products.start_to_weights[..., 0])
    if momentum is None:
        grad_log_retain = _segment_sums_backward(grad_combined * retain) + grad_beta
        return Gates(*zero_empty_slots(filled, grad_lr, None, grad_log_retain))
    grad_lr = grad_lr + grad.gradient_to_momentum * momentum[..., -1, :]
    grad_combined[..., 0] += grad.start_to_weights[..., 1] * first_decay
    # 2. R E, E_T diag(theta) and m_T = eta_0 E_T0, with respect to R and E
    grad_retain = grad_combined @ momentum.mT
    grad_momentum = retain.mT @ grad_combined
    grad_momentum[..., -1, :] += grad.gradient_to_momentum * inner_lr
    grad_momentum[..., -1, 0] += grad.momentum_decay * first_decay[..., 0]
    # 3. R and beta with respect to log(1 - alpha), E and eta_0 with respect to log eta
    grad_log_decay = _segment_sums_backward(grad_momentum * momentum)
    of_first = (grad.start_to_weights[..., 1] * products.start_to_weights[..., 1]).sum(-1)
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
