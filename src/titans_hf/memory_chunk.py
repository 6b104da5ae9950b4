"""A group of consecutive chunks of the memory's update in the dual form (paper section 3.2): forward and hand-written
backward.

All gradients of a chunk are taken at the weights of its start (eq. 16), so each token's gradient is rank one in every
layer, all can be had at once (eq. 17), and the weights after every token follow from a few matrix products
(`memory_gates`), exactly. No per-token weights are formed. Factors per token are applied where the tensor is narrower:
before a matrix product or after it.

From chunk to chunk go only the deltas and the state. Everything else is computed for all chunks of the group at once:
before them the products of the gates, after them the reads, whose weights are known by then, and their backward.
docs/dev/log.md: "Four chunks at once, but for what one chunk needs of another"

The delta rule (`UpdateRule.delta_rule`) takes the last layer's error at the weights before each token. By eq. 16, all
errors of a chunk are taken at the weights of its start: where the keys of several tokens agree, each of their steps
corrects the whole error, and the sum of the steps overshoots. The delta rule takes the last layer's error
e_i = h_i M_{i-1} - v_i as eq. 10 does, at the weights before token i, but the inputs h_i of that layer still at the
chunk's start. M_{i-1} contains the deltas of the chunk's earlier tokens, so the deltas solve a triangular system of C
equations,

    delta_i = c_i (beta h_i W + f h_i S + h_i M_0 - v_i - sum_{j<i} G_{i-1,j} (h_i . h_j) delta_j)

with beta, f and G (`memory_gates`) after token i-1, and c_i = 2 / max(1, |h_i|^2) (divided by c_i, so that the matrix
of the system is (h h^T) o G with 1 / c_i on its diagonal). A step of theta = 1/2 makes the
memory return v_i for h_i (if |h_i| >= 1); smaller steps do not overshoot. With one layer and without momentum, this is
the gated delta rule (arXiv 2412.06464).
docs/dev/log.md: "Errors at the chunk's start against errors token by token"

Shapes: N batch and heads, P chunks of the group, C tokens of a chunk; weights (N, d_in, d_out). Tensors of the whole
group have P * N in the place of N, chunk after chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import pad

from .memory_gates import GateIntermediates, GateProducts, gate_products, gate_products_backward
from .memory_network import (
    ChunkLayer,
    FactorsDerivatives,
    GradientFactors,
    TokenNorms,
    UpdateRule,
    apply_layers,
    factors_derivatives,
    gradient_factors,
    gradient_factors_backward,
    layer_inputs,
    single_layer_factors,
    token_surprise,
    tokens_backward,
    with_last_deltas,
)
from .memory_state import MemorizeOutput, MemoryInputs, MemoryState, where_rows


class EndGates(NamedTuple):
    """The gate products after a chunk's last token, by which its end contains the start and the tokens' gradients."""

    weights_decay: Tensor  # beta_T (N, 1, 1)
    gradient_to_weights: Tensor  # G_T (N, C, 1)
    # None without momentum:
    momentum_to_weights: Tensor | None  # f_T (N, 1, 1)
    gradient_to_momentum: Tensor | None  # E_T theta (N, C, 1)
    momentum_decay: Tensor | None  # m_T (N, 1, 1)

    @classmethod
    def of(cls, gates: GateProducts) -> "EndGates":
        """Selects the products after the last token."""
        of_weights = gates.weights_decay[..., -1:, None], gates.gradient_to_weights[..., -1, :, None]
        if gates.momentum_decay is None:
            return cls(*of_weights, None, None, None)
        of_momentum = gates.gradient_to_momentum[..., None], gates.momentum_decay[..., None, None]
        return cls(*of_weights, gates.momentum_to_weights[..., -1:, None], *of_momentum)


class EarlierGates(NamedTuple):
    """The gate products before each token: those after the token before, of which the first has none."""

    system: Tensor  # row i: G_{i-1} (N, C, C), 1/2 at column i and 0 from there on
    weights_decay: Tensor  # beta (N, C, 1), 1 before the first token
    momentum_to_weights: Tensor | None  # f (N, C, 1), 0 before the first token; None without momentum

    @classmethod
    def of(cls, gates: GateProducts) -> "EarlierGates":
        """Shifts the products after each token to those before each token."""
        f, system = gates.momentum_to_weights, pad(gates.gradient_to_weights, (0, 0, 1, -1))
        system.diagonal(dim1=-2, dim2=-1).fill_(0.5)
        return cls(
            system,
            pad(gates.weights_decay, (1, -1), value=1.0)[..., None],
            None if f is None else pad(f, (1, -1))[..., None],
        )


class TokenDeltas(NamedTuple):
    """The deltas, and the intermediate results that their backward needs."""

    deltas: Tensor  # (N, C, d_out)
    scores: Tensor  # h h^T (N, C, C)
    system: Tensor  # A (N, C, C), lower triangular


def token_deltas(layer: ChunkLayer, values: Tensor, gates: EarlierGates) -> TokenDeltas:
    """Computes the last layer's deltas of a chunk's tokens with values (N, C, d_out)."""
    h = layer.inputs
    error = torch.baddbmm(values, gates.weights_decay * h, layer.offset, beta=-1)  # (N, C, d_in) @ (N, d_in, d_out)
    if layer.momentum is not None:
        error = error.baddbmm(gates.momentum_to_weights * h, layer.momentum)
    if layer.decay_target is not None:
        error = error.baddbmm(h, layer.decay_target)
    # A delta = e_0 with the error e_0 at the chunk's start; on A's diagonal max(1, |h|^2) / 2
    scores = torch.bmm(h, h.mT)  # (N, C, C)
    system = scores * gates.system
    system.diagonal(dim1=-2, dim2=-1).clamp_(min=0.5)
    return TokenDeltas(solve_triangular(system, error, upper=False), scores, system)


class TokenDeltasGradients(NamedTuple):
    """What the backward of `token_deltas` has computed for the gradients with respect to the gates and the values."""

    error: Tensor  # the gradient with respect to the error at the chunk's start (N, C, d_out)
    products: Tensor  # with respect to G_{i-1} (N, C, C)
    from_weights: Tensor  # the error's gradient through W (N, C, d_in)
    from_momentum: Tensor | None  # through S (N, C, d_in)


def token_deltas_backward(
    grad: Tensor, solution: TokenDeltas, layer: ChunkLayer, gates: EarlierGates, total: ChunkLayer
) -> TokenDeltasGradients:
    """Computes the backward of `token_deltas` from the gradient with respect to the deltas. Adds the gradients with
    respect to W, S and h to `total`, in place.
    """
    h, deltas = layer.inputs, solution.deltas
    # 1. A delta = e_0: with respect to e_0, A^-T grad; from the right, which copies least
    grad_error = solve_triangular(solution.system, grad.mT, upper=False, left=False).mT
    # 2. A = (h h^T) o G before each token, but for the diagonal where it is 1/2
    grad_products = torch.bmm(grad_error, deltas.mT).neg_()  # (N, C, d_out) @ (N, d_out, C)
    grad_scores = grad_products * gates.system
    is_square = solution.system.diagonal(dim1=-2, dim2=-1) > 0.5
    grad_scores.diagonal(dim1=-2, dim2=-1).mul_(is_square)
    grad_products.mul_(solution.scores)
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
    return TokenDeltasGradients(grad_error, grad_products, from_weights, from_momentum)


def add_scaled_product(total: Tensor, inputs: Tensor, factor: Tensor, grad: Tensor, alpha: float = 1.0) -> Tensor:
    """Adds alpha x^T diag(factor) grad to the total (N, d_in, d_out) in place: x (N, C, d_in), factor (N, C, 1), grad
    (N, C, d_out). The factor is applied to the narrower.
    """
    if inputs.shape[-1] > grad.shape[-1]:
        return total.baddbmm_(inputs.mT, factor * grad, alpha=alpha)  # (N, d_in, C) @ (N, C, d_out)
    return total.baddbmm_((factor * inputs).mT, grad, alpha=alpha)


def single_token_delta(inputs: Tensor, value: Tensor, weights: Tensor) -> Tensor:
    """Computes the delta of one token, 2 / max(1, |h|^2) (h M - v): inputs h (..., 1, d_in), weights (..., d_in,
    d_out).
    """
    return 2 / inputs.square().sum(-1, keepdim=True).clamp(min=1.0) * (inputs @ weights - value)


class ChunkFactors(NamedTuple):
    """The layers of the memory network in one chunk, the weights at which gradients were taken (empty where none were),
    the gradient factors, and the last layer's deltas by the delta rule (None without it).
    """

    layers: list[ChunkLayer]
    anchor: tuple[Tensor, ...]
    factors: GradientFactors
    token_deltas: TokenDeltas | None


class GroupIntermediates(NamedTuple):
    """The gate products and gradient factors of a group, with which the reads and the backward start, and the state at
    the end of the group.

    inputs and layers: of the whole group. gates: of the whole group, one for each layer of the memory network, all the
    same unless `inputs` has gates per layer. end_gates: the same, but one alone if all are the same. earlier_gates:
    with the delta rule, of the last layer.
    """

    inputs: MemoryInputs
    gates: tuple[GateProducts, ...]
    gate_intermediates: GateIntermediates
    end_gates: list[EndGates]
    earlier_gates: EarlierGates | None
    norms: TokenNorms | None
    layers: tuple[ChunkLayer, ...]
    chunks: list[ChunkFactors]
    state: MemoryState


class GroupGradients(NamedTuple):
    """Gradients with respect to a group's inputs (P * N, C, ...), the state at its start and the decay target (empty
    for 0).
    """

    inputs: MemoryInputs
    state: MemoryState
    decay_target: list[Tensor]


class Chain(NamedTuple):
    """What computes all that goes from chunk to chunk of a group in one call; the rest is then computed as if the group
    were one chunk of P * N rows.

    states: from what `group_intermediates` has before the chunks, computes the states at the starts of all chunks
    (P * N, ...) and at the group's end. gradients: from the group, the gradients with respect to its layers by the
    reads, the derivatives of the gradient factors, and the last two arguments of `group_backward`, computes the
    gradients with respect to the states at the ends of all chunks, and at the group's start.
    """

    states: Callable[..., tuple[MemoryState, MemoryState]]
    gradients: Callable[..., tuple[MemoryState, MemoryState]]


class GroupFunctions(NamedTuple):
    """The functions of one group of chunks, as written here, compiled, or with a chain.

    token: with a chain, the step of one token without gradients.
    """

    forward: Callable[..., MemorizeOutput]
    intermediates: Callable[..., GroupIntermediates]
    backward: Callable[..., GroupGradients]
    token: Callable[..., MemorizeOutput] | None = None


def unstack(tree: Any, num_chunks: int) -> list[Any]:
    """Splits tensors of a group (P * N, ...) into those of its chunks (N, ...), which are views."""
    if tree is None:
        return [None] * num_chunks
    if num_chunks == 1:
        return [tree]
    if isinstance(tree, Tensor):
        return tree.chunk(num_chunks)
    parts = zip(*(unstack(x, num_chunks) for x in tree), strict=True) if tree else [()] * num_chunks
    return [type(tree)(*part) if isinstance(tree, tuple) else list(part) for part in parts]


def stack(parts: Sequence[Any]) -> Any:
    """Joins the tensors of consecutive chunks (N, ...), or trees of them: (P * N, ...)."""
    tree = parts[0]
    if tree is None or isinstance(tree, Tensor):
        return tree if tree is None or len(parts) == 1 else torch.cat(parts)
    joined = [stack(x) for x in zip(*parts, strict=True)]
    return type(tree)(*joined) if isinstance(tree, tuple) else joined


def with_anchor(state: MemoryState, starts: Tensor | None) -> MemoryState:
    """Returns the state at a chunk's start: where the chunk starts, its anchor is the current weights (eq. 16).

    starts: (N,) bool, False where the chunk started in an earlier call, or has no token; None for True everywhere.
    """
    if not state.anchor:
        return state
    if starts is None:
        return replace(state, anchor=state.weights)
    return replace(state, anchor=tuple(map(partial(where_rows, starts), state.weights, state.anchor)))


def with_anchor_backward(grads: MemoryState, starts: Tensor | None) -> MemoryState:
    """Computes the backward of `with_anchor`: the anchor's gradient goes to the weights where the chunk starts, and to
    the previous anchor elsewhere; an empty anchor is 0.
    """
    if not grads.anchor:
        return grads
    to_weights, to_anchor = grads.anchor, ()
    if starts is not None:
        zeros = [torch.zeros_like(x) for x in grads.anchor]
        to_weights = tuple(map(partial(where_rows, starts), grads.anchor, zeros))
        to_anchor = tuple(map(partial(where_rows, starts), zeros, grads.anchor))
    return MemoryState(tuple(map(torch.add, grads.weights, to_weights)), grads.momentum, to_anchor)


def group_forward(
    inputs: MemoryInputs,
    state: MemoryState,
    decay_target: Sequence[Tensor],
    starts: Tensor | None,
    rule: UpdateRule,
    needs_surprise: bool,
    chain: Chain | None = None,
) -> MemorizeOutput:
    """Computes the retrieved values of a group's queries, the tokens' surprise if it is needed, both (P * N, C, ...),
    and the state at the group's end. The arguments are those of `group_intermediates`.
    """
    group = group_intermediates(inputs, state, decay_target, starts, rule, chain)
    retrieved = apply_layers(group.inputs.queries, _reads_of_layers(group), rule.network)
    surprise = None
    if needs_surprise:
        h, deltas = [x.inputs for x in group.layers], [x.deltas for x in group.layers]
        surprise = token_surprise(group.chunks[0].factors._replace(inputs=h, deltas=deltas))
    return MemorizeOutput(retrieved, surprise, group.state)


def group_intermediates(
    inputs: MemoryInputs,
    state: MemoryState,
    decay_target: Sequence[Tensor],
    starts: Tensor | None,
    rule: UpdateRule,
    chain: Chain | None = None,
) -> GroupIntermediates:
    """Computes gate products and gradient factors from a group's inputs and the state at its start.

    inputs: (P, N, C, ...). state: with the anchor of the first chunk. starts: (P, N) bool, True where a chunk starts;
    None for everywhere. chain: where given, `chunks` has one entry, with the tensors of the whole group.
    """
    num_chunks, depth = len(inputs.keys), len(state.weights)
    inputs = inputs.map(lambda x: x.flatten(0, 1))
    gates, gate_intermediates = _gates_of_layers(inputs, depth)
    shared = not inputs.has_gates_per_layer
    end_gates = [EndGates.of(gates[0])] if shared else [EndGates.of(x) for x in gates]
    earlier_gates = EarlierGates.of(gates[-1]) if rule.delta_rule else None
    norms = TokenNorms.of(inputs.keys, inputs.values, rule) if state.anchor else None
    after = None
    if chain is not None:
        of_state = (state, decay_target, starts, rule)
        state, after = chain.states(inputs, norms, end_gates[0], earlier_gates, *of_state)
        decay_target, num_chunks = [torch.cat([x] * num_chunks) for x in decay_target], 1
    of_chunks = zip(
        unstack(inputs.keys, num_chunks),
        unstack(inputs.values, num_chunks),
        unstack(norms, num_chunks),
        zip(*(unstack(x, num_chunks) for x in end_gates), strict=True),
        unstack(earlier_gates, num_chunks),
        strict=True,
    )
    chunks = []
    for chunk, (keys, values, norms_of_chunk, end, earlier) in enumerate(of_chunks):
        if chunk > 0:
            state = with_anchor(state, None if starts is None else starts[chunk])
        chunks.append(_chunk_factors(keys, values, norms_of_chunk, state, decay_target, earlier, rule))
        state = _end_of_chunk(chunks[-1].layers, end, state.anchor) if after is None else after
    of_group = []
    for i, of_layer in enumerate(zip(*(x.layers for x in chunks), strict=True)):
        target = of_layer[0].decay_target
        target = stack([target] * num_chunks)
        h = inputs.keys if i == 0 else stack([x.inputs for x in of_layer])
        offset, momentum, deltas = (
            stack([getattr(x, field) for x in of_layer]) for field in ("offset", "momentum", "deltas")
        )
        of_group.append(ChunkLayer(offset, momentum, h, deltas, target))
    return GroupIntermediates(
        inputs, gates, gate_intermediates, end_gates, earlier_gates, norms, tuple(of_group), chunks, state
    )


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


def _chunk_factors(
    keys: Tensor,
    values: Tensor,
    norms: TokenNorms | None,
    state: MemoryState,
    decay_target: Sequence[Tensor],
    earlier: EarlierGates | None,
    rule: UpdateRule,
) -> ChunkFactors:
    """Computes one chunk's gradient factors from the state at its start."""
    offsets = [w - m for w, m in zip(state.weights, decay_target, strict=True)] if decay_target else state.weights
    targets, momentum = decay_target or [None] * len(offsets), state.momentum or [None] * len(offsets)
    factors = gradient_factors(keys, values, state.anchor, rule, norms) if state.anchor else None
    solution = None
    if rule.delta_rule:
        last_inputs = factors.inputs[-1] if factors else keys
        solution = token_deltas(ChunkLayer(offsets[-1], momentum[-1], last_inputs, None, targets[-1]), values, earlier)
        deltas = solution.deltas
        factors = with_last_deltas(factors, deltas) if factors else single_layer_factors(keys, deltas)
    parts = (offsets, momentum, factors.inputs, factors.deltas, targets)
    layers = [ChunkLayer(*x) for x in zip(*parts, strict=True)]
    return ChunkFactors(layers, state.anchor, factors, solution)


def _reads_of_layers(group: GroupIntermediates) -> list[Callable[[Tensor], Tensor]]:
    """Returns each layer as a function that multiplies every token by the layer's weights after that token."""
    pairs = zip(group.layers, group.gates, strict=True)
    return [partial(read_layer, layer=layer, gates=gates) for layer, gates in pairs]


def read_layer(x: Tensor, layer: ChunkLayer, gates: GateProducts) -> Tensor:
    """Multiplies every token by the layer's weights after that token: (N, C, d_in) -> (N, C, d_out).

    x_t M_t = beta_t x_t W + f_t x_t S - sum_{i<=t} G_ti (x_t . h_i) delta_i + x_t M_0    (eq. 13-16, unrolled)
    """
    scores = torch.bmm(x, layer.inputs.mT) * gates.gradient_to_weights  # (N, C, d_in) @ (N, d_in, C): (x h^T) o G
    if x.shape[-1] > layer.offset.shape[-1]:
        output = gates.weights_decay[..., None] * torch.bmm(x, layer.offset)  # beta (x W): (N, d_in, d_out)
        if layer.momentum is not None:
            output.addcmul_(gates.momentum_to_weights[..., None], torch.bmm(x, layer.momentum))  # + f (x S)
    else:
        output = torch.bmm(gates.weights_decay[..., None] * x, layer.offset)
        if layer.momentum is not None:
            output.baddbmm_(gates.momentum_to_weights[..., None] * x, layer.momentum)
    if layer.decay_target is not None:
        output.baddbmm_(x, layer.decay_target)  # + x M_0
    return output.baddbmm_(scores, layer.deltas, alpha=-1)  # - ((x h^T) o G) delta: (N, C, C) @ (N, C, d_out)


def _end_of_chunk(layers: Sequence[ChunkLayer], gates: Sequence[EndGates], anchor: tuple[Tensor, ...]) -> MemoryState:
    """Computes the state at a chunk's end, with the anchor of the chunk (eq. 13-14, unrolled, and 18).

    M_T = beta_T W + f_T S - h^T diag(G_T) delta + M_0        S_T = m_T S - h^T diag(E_T theta) delta
    """
    weights, momentum = [], []
    for layer, end in zip(layers, gates if len(gates) > 1 else gates * len(layers), strict=True):
        if layer.decay_target is None:
            weights.append(end.weights_decay * layer.offset)
        else:
            weights.append(torch.addcmul(layer.decay_target, end.weights_decay, layer.offset))
        if layer.momentum is not None:
            weights[-1].addcmul_(end.momentum_to_weights, layer.momentum)
            momentum.append(end.momentum_decay * layer.momentum)
            add_scaled_product(momentum[-1], layer.inputs, end.gradient_to_momentum, layer.deltas, alpha=-1)
        add_scaled_product(weights[-1], layer.inputs, end.gradient_to_weights, layer.deltas, alpha=-1)
    return MemoryState(tuple(weights), tuple(momentum), anchor)


def group_backward(
    grad_retrieved: Tensor,
    group: GroupIntermediates,
    grads: MemoryState,
    starts: Tensor | None,
    chain: Chain | None = None,
) -> GroupGradients:
    """Computes the backward of `group_forward` of an MLP whose layers have the same gates, from the gradients with
    respect to what the queries retrieve (P * N, C, D) and to the state at the end; an empty anchor there is 0.
    """
    num_chunks, depth = len(group.chunks), len(group.layers)
    # 1. The queries' way through the layers once more: the input of each, and silu' before it
    reads = layer_inputs(group.inputs.queries, _reads_of_layers(group))
    # 2. The reads of each layer, from the last to the first. `layers` collects the gradients of all chunks.
    grad, layers, gates = grad_retrieved, [], []
    for i in reversed(range(depth)):
        of_read = _read_backward(grad, reads.inputs[i], group.layers[i], group.gates[i])
        layers.insert(0, of_read.layer)
        gates.insert(0, of_read.gates)
        grad = of_read.x.mul_(reads.slopes[i - 1]) if i > 0 else of_read.x
    # 3. From the last chunk to the first: what the state at a chunk's end and the deltas depend on
    derivatives, at_start = _derivatives(group), None
    num_rows = len(grads.weights[0])
    if chain is not None:
        grads, at_start = chain.gradients(group, layers, derivatives, grads, starts)
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
        if chunk.token_deltas is not None:
            solved = token_deltas_backward(deltas[-1], chunk.token_deltas, chunk.layers[-1], earlier, total[-1])
            of_deltas.insert(0, solved)
            deltas[-1] = None
        grad_anchor = ()
        if chunk.anchor:
            network = gradient_factors_backward(chunk.factors, of_factor, chunk.anchor, h, deltas)
            of_factors.insert(0, network._replace(weights=None))
            grad_anchor = tuple(map(torch.add, network.weights, grads.anchor) if grads.anchor else network.weights)
        of_momentum = tuple(x.momentum for x in total if x.momentum is not None)
        grads = MemoryState(tuple(x.offset for x in total), of_momentum, grad_anchor)
        if p > 0:
            grads = with_anchor_backward(grads, None if starts is None else starts[p])
    grads = grads if at_start is None else at_start
    # 4. The decay target, and the products of the gates at the ends and before each token
    grad_target = []
    for i, (layer, total) in enumerate(zip(group.layers, layers, strict=True)):
        end = stack([x[i] for x in of_ends])
        gates[i] = _with_end_gates(gates[i], end, layer)
        if layer.decay_target is not None:  # the offset is the weights less the target
            grad_target.append(total.decay_target.add_(end.weights).sub_(total.offset))
    grad_values = None
    if of_deltas:
        solved = stack(of_deltas)
        gates.append(_earlier_gates_backward(solved, group.layers[-1]))
        grad_values = -solved.error
        if grad_target:
            grad_target[-1].baddbmm_(group.layers[-1].inputs.mT, solved.error)  # (N, d_in, C) @ (N, C, d_out)
    grad_target = [x.unflatten(0, (-1, num_rows)).sum(0) for x in grad_target]
    # 5. Keys and values in the gradient factors
    if of_factors:
        tokens, first_weights = group.inputs, stack([x.anchor[0] for x in group.chunks])
        of_tokens = stack(of_factors), derivatives, tokens.keys, tokens.values, first_weights, layers[0].inputs
        of_values = tokens_backward(*of_tokens)
        grad_values = of_values if grad_values is None else grad_values.add_(of_values)
    # 6. The gates, whose products all layers share
    products = GateProducts(*map(_sum_of_given, zip(*gates, strict=True)))
    inner_lr, filled = group.inputs.inner_lr, group.inputs.filled
    grad_gates = gate_products_backward(products, group.gates[0], group.gate_intermediates, inner_lr, filled)
    inputs = MemoryInputs(grad, layers[0].inputs, grad_values, *grad_gates)
    return GroupGradients(inputs, grads, grad_target)


def _derivatives(group: GroupIntermediates) -> FactorsDerivatives | None:
    """Computes the derivatives of the gradient factors of all chunks at once; None without factors."""
    if not group.chunks[0].anchor:
        return None
    kept = [chunk.factors.intermediates for chunk in group.chunks]
    norms = [] if group.norms is None else stack([[*x.delta_norms, x.error_norm] for x in kept])
    pre_activations = stack([x.pre_activations for x in kept])
    return factors_derivatives([x.inputs for x in group.layers], pre_activations, norms, group.norms)


def _sum_of_given(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Sums the gradients that are not None, in place of the first; None if all are."""
    given = [x for x in parts if x is not None]
    return reduce(Tensor.add_, given) if given else None


class _ReadGradients(NamedTuple):
    x: Tensor
    layer: ChunkLayer
    gates: GateProducts


def _read_backward(grad: Tensor, x: Tensor, layer: ChunkLayer, gates: GateProducts) -> _ReadGradients:
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
    return _ReadGradients(grad_x, grad_layer, GateProducts(grad_products, grad_beta, grad_f, None, None))


class _ProductGradients(NamedTuple):
    """Gradients with respect to the arguments of factor x W: x (N, C, d_in), factor (N, C), W (N, d_in, d_out)."""

    inputs: Tensor
    factor: Tensor
    weights: Tensor


def _scaled_product_backward(grad: Tensor, inputs: Tensor, factor: Tensor, weights: Tensor) -> _ProductGradients:
    """Computes the backward of factor x W from the gradient of the product (N, C, d_out); factor (N, C, 1)."""
    from_weights = torch.bmm(grad, weights.mT)  # (N, C, d_out) @ (N, d_out, d_in)
    grad_factor = (inputs * from_weights).sum(-1)
    wide = inputs.shape[-1] > grad.shape[-1]  # then the factor is applied to the gradient
    scaled, grad = (inputs, factor * grad) if wide else (factor * inputs, grad)
    return _ProductGradients(from_weights.mul_(factor), grad_factor, torch.bmm(scaled.mT, grad))


class _EndGradients(NamedTuple):
    """What the backward of `_end_of_chunk` leaves for the gradients with respect to the gates: the given gradients with
    respect to weights and momentum at the end (N, d_in, d_out), and their products with the deltas (N, C, d_in), or
    with the inputs if they are wider (N, C, d_out).
    """

    weights: Tensor
    momentum: Tensor | None
    weights_product: Tensor
    momentum_product: Tensor | None


def _end_backward(
    grad_weights: Tensor, grad_momentum: Tensor | None, layer: ChunkLayer, total: ChunkLayer, end: EndGates
) -> _EndGradients:
    """Computes the backward of `_end_of_chunk` for one layer; adds the gradients with respect to the layer to `total`,
    in place.
    """
    total.offset.addcmul_(end.weights_decay, grad_weights)
    weights_product = _subtract_steps_backward(grad_weights, layer, total, end.gradient_to_weights)
    momentum_product = None
    if layer.momentum is not None:
        total.momentum.addcmul_(end.momentum_to_weights, grad_weights)
        total.momentum.addcmul_(end.momentum_decay, grad_momentum)
        momentum_product = _subtract_steps_backward(grad_momentum, layer, total, end.gradient_to_momentum)
    return _EndGradients(grad_weights, grad_momentum, weights_product, momentum_product)


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


def _with_end_gates(total: GateProducts, end: _EndGradients, layer: ChunkLayer) -> GateProducts:
    """Adds the gradients with respect to `EndGates` to those of the gate products of one layer."""
    narrower = layer.deltas if layer.inputs.shape[-1] > layer.deltas.shape[-1] else layer.inputs
    total.gradient_to_weights[..., -1, :] -= (narrower * end.weights_product).sum(-1)
    total.weights_decay[..., -1] += (end.weights * layer.offset).sum((-2, -1))
    if layer.momentum is None:
        return total
    total.momentum_to_weights[..., -1] += (end.weights * layer.momentum).sum((-2, -1))
    return total._replace(
        gradient_to_momentum=(narrower * end.momentum_product).sum(-1).neg_(),
        momentum_decay=(end.momentum * layer.momentum).sum((-2, -1)),
    )


def _earlier_gates_backward(solved: TokenDeltasGradients, layer: ChunkLayer) -> GateProducts:
    """Shifts the gradients with respect to `EarlierGates` to those of the gate products: those before token i are the
    products after token i - 1.
    """
    grad_f = None
    if solved.from_momentum is not None:
        grad_f = pad((layer.inputs * solved.from_momentum).sum(-1), (-1, 1))
    grad_beta = pad((layer.inputs * solved.from_weights).sum(-1), (-1, 1))
    return GateProducts(pad(solved.products, (0, 0, -1, 1)), grad_beta, grad_f, None, None)


GROUP_FUNCTIONS = GroupFunctions(group_forward, group_intermediates, group_backward)
