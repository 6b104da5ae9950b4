"""A group of consecutive chunks of the memory's update in the dual form (paper section 3.2). The backward is
`memory_chunk_backward`.

All gradients of a chunk are taken at the weights of its start (eq. 16), so each token's gradient is rank one in every
layer, and all are computed at once (eq. 17). With the products of the gates, in log space, a few matrix products give
the weights after every token, exactly. Unrolling eq. 13-14 from the chunk's start, where the weights minus the decay
target are W_0, the momentum is S_0 and all gradients g_i are taken:

    W_t = beta_t W_0 + f_t S_0 - sum_{i<=t} G_ti g_i        G = (R E) diag(theta)     f = R m
    S_T = m_T S_0 - sum_i E_Ti theta_i g_i                  R_tj = prod_{j<l<=t} (1 - alpha_l)
                                                            E_ji = prod_{i<l<=j} eta_l

No per-token weights are formed. Factors per token are applied where the tensor is narrower: before a matrix product or
after it.

From chunk to chunk go only the deltas and the state. Everything else is computed for all chunks of the group at once,
because larger products take less time: before the chunks the products of the gates, after them the reads, whose weights
are known by then.

By eq. 16, all errors of a chunk are taken at the weights of its start: where the keys of several tokens agree, each of
their steps corrects the whole error, and the sum of the steps overshoots. The delta rule (`UpdateRule.delta_rule`)
takes the last layer's error e_i = h_i M_{i-1} - v_i at the weights before token i, as in eq. 10. The inputs h_i of that
layer are still computed at the chunk's start. M_{i-1} contains the deltas of the chunk's earlier tokens, so the deltas
solve a triangular system of C equations,

    delta_i = c_i (beta h_i W + f h_i S + h_i M_0 - v_i - sum_{j<i} G_{i-1,j} (h_i . h_j) delta_j)

with beta, f and G after token i-1, and c_i = 2 / max(1, |h_i|^2). Divided by c_i, the system has the matrix (h h^T) o G
with 1 / c_i on its diagonal. A step of theta = 1/2 makes the memory return v_i for h_i (if |h_i| >= 1); smaller steps
do not overshoot. With one layer and without momentum, this is the gated delta rule (arXiv 2412.06464).

Shapes: ... or N batch and heads, P chunks of the group, C tokens of a chunk; weights (N, d_in, d_out). Tensors of the
whole group have P * N in the place of N, chunk after chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import pad

from .memory_network import (
    GradientFactors,
    TokenNorms,
    UpdateRule,
    apply_layers,
    gradient_factors,
    single_layer_factors,
    token_surprise,
    with_last_deltas,
)
from .memory_state import MemorizeOutput, MemoryInputs, MemoryState, where_rows


class GateProducts(NamedTuple):
    """Factors by which the start of a chunk and its tokens' gradients enter later weights and momenta."""

    gradient_to_weights: Tensor  # G (..., C, C): share of token i's gradient in the weights after token t
    weights_decay: Tensor  # beta (..., C): share of the chunk-start weights in the weights after token t
    # None without momentum:
    momentum_to_weights: Tensor | None  # f (..., C): share of the chunk-start momentum in the weights after token t
    gradient_to_momentum: Tensor | None  # E_Ti theta_i (..., C): share of token i's gradient in the final momentum
    momentum_decay: Tensor | None  # m_T (...): share of the chunk-start momentum in the momentum at the chunk's end


def segment_products(log_decay: Tensor) -> Tensor:
    """Computes the product of the decays at j < l <= t at entry [t, j], 0 above the diagonal: (..., C) -> (..., C, C).

    The logarithms are summed directly, not as a difference of two cumulative sums: exact for decays of any size, -inf
    (a gate of 0) included. The sum runs along rows and is transposed: twice as fast as along columns.
    """
    terms = log_decay[..., None, :].expand(*log_decay.shape, log_decay.shape[-1])
    return terms.triu(1).cumsum(-1).exp().triu().mT


def zero_empty_slots(filled: Tensor | None, *per_slot: Tensor | None) -> tuple[Tensor | None, ...]:
    """Sets values per slot (..., C) to 0 at slots without a token."""
    if filled is None:
        return per_slot
    return tuple(None if x is None else x.masked_fill(~filled, 0.0) for x in per_slot)


def gate_products(
    inner_lr: Tensor, log_momentum_decay: Tensor | None, log_retain: Tensor, filled: Tensor | None = None
) -> tuple[GateProducts, tuple[Tensor | None, ...]]:
    """Computes the products from theta, log eta (None without momentum) and log(1 - alpha), each (..., C); `filled`
    (..., C) is False at slots without a token.

    Also returns the factors that the backward needs: R, whose columns at empty slots are 0, and R E (R without
    momentum), (..., C, C) each; E (..., C, C) and eta of the first token (..., 1), both None without momentum.
    """
    inner_lr, log_momentum_decay, log_retain = zero_empty_slots(filled, inner_lr, log_momentum_decay, log_retain)
    retain_products = segment_products(log_retain)  # R
    if filled is not None:
        # An empty slot leaves the weights unchanged: it must not add the momentum to them once more.
        retain_products = retain_products * filled[..., None, :]
    weights_decay = log_retain.cumsum(-1).exp()  # beta
    if log_momentum_decay is None:  # the gradients are the steps: E is the identity
        products = GateProducts(retain_products * inner_lr[..., None, :], weights_decay, None, None, None)
        return products, (retain_products, retain_products, None, None)
    momentum_products = segment_products(log_momentum_decay)  # E
    first_decay = log_momentum_decay[..., :1].exp()  # times the first column of E it is m, and of R E it is f
    combined_products = retain_products @ momentum_products  # R E: (..., C, C) @ (..., C, C)
    products = GateProducts(
        gradient_to_weights=combined_products * inner_lr[..., None, :],  # G = (R E) diag(theta)
        weights_decay=weights_decay,
        momentum_to_weights=combined_products[..., 0] * first_decay,  # f = R m
        gradient_to_momentum=momentum_products[..., -1, :] * inner_lr,  # E_T diag(theta)
        momentum_decay=momentum_products[..., -1, 0] * first_decay[..., 0],  # m_T
    )
    return products, (retain_products, combined_products, momentum_products, first_decay)


class ChunkLayer(NamedTuple):
    """One layer of the memory network in a chunk, or the gradients with respect to it.

    offset (W), momentum (S) (N, d_in, d_out): at the chunk's start; the offset is the weights minus the decay target,
    the momentum None without momentum.
    inputs h (N, C, d_in), deltas (N, C, d_out): the factors of the tokens' gradients; deltas None before the delta rule
    computes them.
    decay_target (M_0) (N, d_in, d_out): the weights that forgetting decays to; None for 0.
    """

    offset: Tensor
    momentum: Tensor | None
    inputs: Tensor
    deltas: Tensor | None
    decay_target: Tensor | None


class EndGates(NamedTuple):
    """The gate products after a chunk's last token: shares of the chunk's start and of the gradients in the end."""

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
    """The gate products before each token, which are the products after the token before it."""

    system: Tensor  # row i: G_{i-1} (N, C, C), 1/2 at column i and 0 from there on
    weights_decay: Tensor  # beta (N, C, 1), 1 before the first token
    momentum_to_weights: Tensor | None  # f (N, C, 1), 0 before the first token; None without momentum

    @classmethod
    def of(cls, gates: GateProducts) -> "EarlierGates":
        """Shifts the products after each token by one token."""
        f, system = gates.momentum_to_weights, pad(gates.gradient_to_weights, (0, 0, 1, -1))
        system.diagonal(dim1=-2, dim2=-1).fill_(0.5)
        return cls(
            system,
            pad(gates.weights_decay, (1, -1), value=1.0)[..., None],
            None if f is None else pad(f, (1, -1))[..., None],
        )


class ChunkFactors(NamedTuple):
    """The layers of the memory network in one chunk, the weights at which gradients were taken (empty if none were),
    and the gradient factors. With the delta rule also the scores h h^T of the last layer's inputs and the lower
    triangular matrix A of the system that its deltas solve, (N, C, C) each; None without the delta rule.
    """

    layers: list[ChunkLayer]
    anchor: tuple[Tensor, ...]
    factors: GradientFactors
    scores: Tensor | None
    system: Tensor | None


class GroupIntermediates(NamedTuple):
    """The gate products and gradient factors of a group, with which the reads and the backward start, and the state at
    the end of the group.

    inputs, layers: of the whole group. gates: of the whole group, one entry per layer of the memory network, all equal
    unless `inputs` has gates per layer. gate_intermediates: from `gate_products`. end_gates: as `gates`, but only one
    entry if all are equal. earlier_gates: of the last layer, with the delta rule.
    """

    inputs: MemoryInputs
    gates: tuple[GateProducts, ...]
    gate_intermediates: tuple[Tensor | None, ...]
    end_gates: list[EndGates]
    earlier_gates: EarlierGates | None
    norms: TokenNorms | None
    layers: tuple[ChunkLayer, ...]
    chunks: list[ChunkFactors]
    state: MemoryState


class GroupFunctions(NamedTuple):
    """The functions of one group of chunks: `group_forward`, `group_intermediates` and `group_backward`, as they are or
    compiled.
    """

    forward: Callable[..., MemorizeOutput]
    intermediates: Callable[..., GroupIntermediates]
    backward: Callable[..., tuple[MemoryInputs, MemoryState, list[Tensor]]]


def unstack(tree: Any, num_chunks: int) -> list[Any]:
    """Splits tensors of a group (P * N, ...) into views, one for each of its chunks (N, ...)."""
    if tree is None:
        return [None] * num_chunks
    if num_chunks == 1:
        return [tree]
    if isinstance(tree, Tensor):
        return tree.chunk(num_chunks)
    parts = zip(*(unstack(x, num_chunks) for x in tree), strict=True) if tree else [()] * num_chunks
    return [_like(tree, part) for part in parts]


def stack(parts: Sequence[Any]) -> Any:
    """Joins the tensors of consecutive chunks (N, ...), or trees of them: (P * N, ...)."""
    tree = parts[0]
    if tree is None or isinstance(tree, Tensor):
        return tree if tree is None or len(parts) == 1 else torch.cat(parts)
    return _like(tree, [stack(x) for x in zip(*parts, strict=True)])


def _like(tree: Any, children: Sequence[Any]) -> Any:
    """Returns a NamedTuple, tuple or list like `tree` with other children."""
    return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)


def with_anchor(state: MemoryState, starts: Tensor | None) -> MemoryState:
    """Returns the state at a chunk's start: where the chunk starts, its anchor is the current weights (eq. 16).

    starts: (N,) bool, False where the chunk started in an earlier call, or has no token; None for True everywhere.
    """
    if not state.anchor:
        return state
    if starts is None:
        return replace(state, anchor=state.weights)
    return replace(state, anchor=tuple(map(partial(where_rows, starts), state.weights, state.anchor)))


def group_forward(
    inputs: MemoryInputs,
    state: MemoryState,
    decay_target: Sequence[Tensor],
    starts: Tensor | None,
    rule: UpdateRule,
    needs_surprise: bool,
) -> MemorizeOutput:
    """Computes the retrieved values of a group's queries, the tokens' surprise if it is needed, both (P * N, C, ...),
    and the state at the group's end. The arguments are as in `group_intermediates`.
    """
    group = group_intermediates(inputs, state, decay_target, starts, rule)
    retrieved = apply_layers(group.inputs.queries, reads_of_layers(group), rule.network)
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
) -> GroupIntermediates:
    """Computes gate products and gradient factors from a group's inputs and the state at its start.

    inputs: (P, N, C, ...). state: its anchor is the first chunk's. starts: (P, N) bool, True where a chunk starts; None
    for everywhere.
    """
    num_chunks, depth = len(inputs.keys), len(state.weights)
    inputs = inputs.map(lambda x: x.flatten(0, 1))
    gates, gate_intermediates = _gates_of_layers(inputs, depth)
    shared = not inputs.has_gates_per_layer
    end_gates = [EndGates.of(gates[0])] if shared else [EndGates.of(x) for x in gates]
    earlier_gates = EarlierGates.of(gates[-1]) if rule.delta_rule else None
    norms = TokenNorms.of(inputs.keys, inputs.values, rule) if state.anchor else None
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
        state = _end_of_chunk(chunks[-1].layers, end, state.anchor)
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


def _gates_of_layers(inputs: MemoryInputs, depth: int) -> tuple[tuple[GateProducts, ...], tuple[Tensor | None, ...]]:
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
    scores = system = None
    if rule.delta_rule:
        last = ChunkLayer(offsets[-1], momentum[-1], factors.inputs[-1] if factors else keys, None, targets[-1])
        deltas, scores, system = token_deltas(last, values, earlier)
        factors = with_last_deltas(factors, deltas) if factors else single_layer_factors(keys, deltas)
    parts = (offsets, momentum, factors.inputs, factors.deltas, targets)
    layers = [ChunkLayer(*x) for x in zip(*parts, strict=True)]
    return ChunkFactors(layers, state.anchor, factors, scores, system)


def reads_of_layers(group: GroupIntermediates) -> list[Callable[[Tensor], Tensor]]:
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


def token_deltas(layer: ChunkLayer, values: Tensor, gates: EarlierGates) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the last layer's deltas of a chunk's tokens with values (N, C, d_out); the scores h h^T and the system A
    are for the backward.
    """
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
    return solve_triangular(system, error, upper=False), scores, system


def add_scaled_product(total: Tensor, inputs: Tensor, factor: Tensor, grad: Tensor, alpha: float = 1.0) -> Tensor:
    """Adds alpha x^T diag(factor) grad to the total (N, d_in, d_out) in place: x (N, C, d_in), factor (N, C, 1), grad
    (N, C, d_out). The factor is applied to the narrower of x and grad.
    """
    if inputs.shape[-1] > grad.shape[-1]:
        return total.baddbmm_(inputs.mT, factor * grad, alpha=alpha)  # (N, d_in, C) @ (N, C, d_out)
    return total.baddbmm_((factor * inputs).mT, grad, alpha=alpha)
