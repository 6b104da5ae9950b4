"""The backward of the memory's sweep over chunks, from the states that some of them start with.

Nothing else is kept: what happens within a chunk is computed again, and the states between. Shapes: N batch and heads,
C tokens of a chunk; weights (N, d_in, d_out).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .memory_gates import GateProducts, gate_products_backward
from .memory_network import Factors
from .memory_sweep import (
    KEPT_EVERY,
    Layer,
    Layers,
    Plan,
    Prepared,
    Tokens,
    pieces,
    prepare,
    read_layer,
    split_state,
    step,
    sweep,
    where_begins,
    with_anchor,
)


class Sweep(torch.autograd.Function):
    """`sweep`, which keeps for its backward the state that every `KEPT_EVERY`-th chunk starts with."""

    @staticmethod
    def forward(ctx, plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        starts = []
        results = sweep(plan, [x.detach() for x in tensors], starts)
        ctx.mark_non_differentiable(results[1])
        ctx.plan = plan
        initial = split_state(plan, tensors[6:])[1]
        ctx.save_for_backward(*tensors[:6], *(x for start in starts for part in start for x in part), *initial)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_retrieved: Tensor, _: Tensor, *grad_after: Tensor) -> tuple[Tensor | None, ...]:
        plan, saved = ctx.plan, ctx.saved_tensors  # once: under checkpointing, asking for them computes them
        tokens, saved = pieces(plan, (grad_retrieved, *saved[:6])), saved[6:]
        firsts, size = range(0, len(tokens), KEPT_EVERY), 3 * plan.depth
        starts = [Layers.of(saved[i * size : (i + 1) * size]) for i in range(len(firsts))]
        initial = saved[len(firsts) * size :]
        grads, grad_tokens, grad_initial = Layers.of(grad_after), [], [torch.zeros_like(x) for x in initial]
        with torch.autocast(grad_retrieved.device.type, enabled=False):
            for first, start in zip(reversed(firsts), reversed(starts), strict=True):
                group = tokens[first : first + KEPT_EVERY]
                again = _prepare_again(plan, first, [piece for _, *piece in group], start, initial)
                for chunk, (grad, *piece) in reversed(list(enumerate(group, first))):
                    work, after = plan.work(chunk_backward, piece), (grads.weights, grads.momentum)
                    grad_start, grad_piece, to_initial = work(grad, piece, again.pop(), *after)
                    grad_tokens.append(grad_piece)
                    grad_initial = [x.add_(y) for x, y in zip(grad_initial, to_initial, strict=True)]
                    grads = _before_anchor(plan, chunk, grad_start, grads.anchor)
        grad_tokens = (torch.cat(parts[::-1], dim=1) for parts in zip(*grad_tokens, strict=True))
        return None, *grad_tokens, *grads.weights, *grads.momentum, *grads.anchor, *grad_initial


def _prepare_again(
    plan: Plan, first: int, group: Sequence[Sequence[Tensor]], state: Layers, initial: Sequence[Tensor]
) -> list[Prepared]:
    """Of the `pieces` of chunks that follow each other, from the state that the first starts with."""
    found = []
    for chunk, piece in enumerate(group, first):
        if found:
            state = with_anchor(plan, chunk, Layers(*step(found[-1]), state.anchor))
        found.append(plan.work(prepare, piece)(piece, state, initial, plan.error_clip))
    return found


def _before_anchor(plan: Plan, chunk: int, grads: Layers, later: Sequence[Tensor]) -> Layers:
    """Gradients with respect to the state that a chunk starts with, `later` to the anchor after it -> to the state
    before: its anchor was taken from the weights where it began, else from the chunk before.
    """
    grad_anchor = [x + y for x, y in zip(grads.anchor, later, strict=True)]
    nothing = [torch.zeros_like(x) for x in grad_anchor]
    here = where_begins(plan, chunk, grad_anchor, nothing)
    grad_weights = tuple(x + y for x, y in zip(grads.weights, here, strict=True))
    return Layers(grad_weights, grads.momentum, where_begins(plan, chunk, nothing, grad_anchor))


def chunk_backward(
    grad: Tensor,
    piece: Sequence[Tensor],
    prepared: Prepared,
    grad_weights: Sequence[Tensor],
    grad_momentum: Sequence[Tensor],
) -> tuple[Layers, Tokens, list[Tensor]]:
    """Of `chunk_forward`: gradients with respect to what it returns -> to the state before, to its tokens and to the
    initial weights.
    """
    tokens, gates, gate_parts, factors, layers, anchor = prepared
    reads, slopes = [tokens.queries], []
    for layer in layers[:-1]:
        pre_activation = read_layer(reads[-1], layer, gates)
        sigmoid = torch.sigmoid(pre_activation)
        reads.append(pre_activation.mul_(sigmoid))
        slopes.append(torch.lerp(reads[-1], sigmoid.new_ones(()), sigmoid))
    grad_layers, grad_gates = [], []
    for i in reversed(range(len(layers))):
        after = grad_weights[i], grad_momentum[i]
        grad, grad_layer, grad_of_gates = _layer_backward(grad, *after, reads[i], layers[i], gates)
        grad_layers.insert(0, grad_layer)
        grad_gates.append(grad_of_gates)
        if i > 0:
            grad = grad.mul_(slopes[i - 1])
    to_weights, to_momentum, grad_inputs, grad_deltas, to_initial = map(list, zip(*grad_layers, strict=True))
    grad_pair, to_anchor = _factors_backward(factors, tokens.values, anchor, grad_inputs, grad_deltas)
    grad_gates = GateProducts(*(sum(parts) for parts in zip(*grad_gates, strict=True)))
    to_gates = gate_products_backward(grad_gates, gates, gate_parts, tokens.inner_lr, *piece[6:])
    grad_tokens = Tokens(grad, *grad_pair, *to_gates)
    return Layers(to_weights, to_momentum, to_anchor), grad_tokens, [x for x in to_initial if x is not None]


def _layer_backward(
    grad: Tensor, grad_weights: Tensor, grad_momentum: Tensor, x: Tensor, layer: Layer, gates: GateProducts
) -> tuple[Tensor, Layer, GateProducts]:
    """Of `read_layer` and `step_layer`: gradients with respect to what they return -> to x, the layer and the gates."""
    learnt, momentum, inputs, deltas, initial = layer
    beta, carry = gates.retain[..., None], gates.carry[..., None]
    share, momentum_share = gates.write[..., -1, :, None], gates.momentum_write[..., None]
    scores, grad_scores = x @ inputs.mT, grad @ deltas.mT
    grad_write = (scores * grad_scores).neg_()
    scores, grad_scores = scores.mul_(gates.write), grad_scores.mul_(gates.write)
    to_weights = gates.retain[..., -1, None, None] * grad_weights
    to_momentum = gates.momentum_carry[..., None, None] * grad_momentum
    to_momentum.addcmul_(gates.carry[..., -1, None, None], grad_weights)
    from_weights, from_momentum = grad @ learnt.mT, grad @ momentum.mT
    grad_retain, grad_carry = (x * from_weights).sum(-1), (x * from_momentum).sum(-1)
    grad_x = from_weights.mul_(beta).addcmul_(carry, from_momentum)
    if inputs.shape[-1] > deltas.shape[-1]:
        to_weights.baddbmm_(x.mT, beta * grad)
        to_momentum.baddbmm_(x.mT, carry * grad)
        from_weights, from_momentum = inputs @ grad_weights, inputs @ grad_momentum
        grad_share, grad_momentum_share = (deltas * from_weights).sum(-1), (deltas * from_momentum).sum(-1)
        grad_deltas = from_weights.mul_(share).addcmul_(momentum_share, from_momentum)
        grad_inputs = ((share * deltas) @ grad_weights.mT).baddbmm_(momentum_share * deltas, grad_momentum.mT)
    else:
        to_weights.baddbmm_((beta * x).mT, grad)
        to_momentum.baddbmm_((carry * x).mT, grad)
        from_weights, from_momentum = deltas @ grad_weights.mT, deltas @ grad_momentum.mT
        grad_share, grad_momentum_share = (inputs * from_weights).sum(-1), (inputs * from_momentum).sum(-1)
        grad_inputs = from_weights.mul_(share).addcmul_(momentum_share, from_momentum)
        grad_deltas = ((share * inputs) @ grad_weights).baddbmm_(momentum_share * inputs, grad_momentum)
    grad_write[..., -1, :] -= grad_share
    grad_retain[..., -1] += (grad_weights * learnt).sum((-2, -1))
    grad_carry[..., -1] += (grad_weights * momentum).sum((-2, -1))
    grad_gates = GateProducts(
        grad_write,
        grad_retain,
        grad_carry,
        momentum_write=grad_momentum_share.neg_(),
        momentum_carry=(grad_momentum * momentum).sum((-2, -1)),
    )
    grad_inputs.baddbmm_(grad_scores.mT, x).neg_()
    grad_deltas.baddbmm_(scores.mT, grad).neg_()
    grad_x.baddbmm_(grad_scores, inputs, alpha=-1)
    to_initial = None
    if initial is not None:
        grad_x.baddbmm_(grad, initial.mT)
        to_initial = (grad_weights - to_weights).baddbmm_(x.mT, grad)
    return grad_x, Layer(to_weights, to_momentum, grad_inputs, grad_deltas, to_initial), grad_gates


def _factors_backward(
    factors: Factors,
    values: Tensor,
    weights: Sequence[Tensor],
    grad_inputs: list[Tensor],
    grad_deltas: list[Tensor],
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Of `gradient_factors`: gradients with respect to its inputs and deltas, which are used up -> to keys and values,
    and to the weights.
    """
    last = len(weights) - 1
    grad_weights = []
    pulls = []  # of a limit, a multiple of |v|: gradients with respect to its logarithm
    for i, scale in enumerate(factors.scales):
        h, d = factors.inputs[i], factors.unlimited[i]
        pulls.append(_limited(scale, grad_deltas[i], d))
        grad_inputs[i].addcmul_(h, -_over_square(pulls[-1], h))
        grad_deltas[i].mul_(scale).addcmul_(d, -_over_square(pulls[-1], d))
    grad_slopes = []
    for i in range(last):
        grad_slopes.append(grad_deltas[i] * factors.returned[i])
        grad_returned = grad_deltas[i].mul_(factors.slopes[i])
        grad_weights.append(grad_returned.mT @ factors.unlimited[i + 1])
        grad_deltas[i + 1].baddbmm_(grad_returned, weights[i + 1])
    grad_error = grad_deltas[last].mul_(2)
    if factors.error_scale is not None:
        pulls.append(_limited(factors.error_scale, grad_error, factors.error))
        grad_error.mul_(factors.error_scale).addcmul_(factors.error, -_over_square(pulls[-1], factors.error))
    grad_values = -grad_error
    if pulls:
        grad_values.addcmul_(values, _over_square(sum(pulls), values))
    for i in reversed(range(len(weights))):
        if i == last:
            grad_output = grad_error
        else:
            z, s, h = factors.pre_activations[i], factors.sigmoids[i], factors.inputs[i + 1]
            # silu''(z) = s (1 - s) (2 + z - 2 silu(z))
            curvature = torch.sub(z, h, alpha=2).add_(2).mul_(torch.addcmul(s, s, s, value=-1))
            grad_output = curvature.mul_(grad_slopes[i]).addcmul_(grad_inputs[i + 1], factors.slopes[i])
        if i > 0:
            grad_weights[i - 1].baddbmm_(factors.inputs[i].mT, grad_output)
        else:
            grad_weights.insert(0, factors.inputs[i].mT @ grad_output)
        grad_inputs[i].baddbmm_(grad_output, weights[i].mT)
    return (grad_inputs[0], grad_values), grad_weights


def _limited(scale: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Of scale * x, scale = limit / norm: the gradient with respect to log(limit); 0 where nothing is limited."""
    return torch.where(scale < 1, (grad * x).sum(-1, keepdim=True) * scale, 0.0)


def _over_square(x: Tensor, vector: Tensor) -> Tensor:
    """x / |vector|^2, 0 where it is 0."""
    square = vector.square().sum(-1, keepdim=True)
    return torch.where(square > 0, x / torch.where(square > 0, square, 1.0), 0.0)
