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
are known by then. W and S of a layer are parts of one tensor, so that one product serves both.

By eq. 16, all errors of a chunk are taken at the weights of its start: where the keys of several tokens agree, each of
their steps corrects the whole error, and the sum of the steps overshoots. The delta rule (`UpdateRule.delta_rule`)
takes the last layer's error e_i = h_i M_{i-1} - v_i at the weights before token i, as in eq. 10. The inputs h_i of that
layer are still computed at the chunk's start. M_{i-1} contains the deltas of the chunk's earlier tokens, so the deltas
solve a triangular system of C equations,

    delta_i = c_i (beta h_i W + f h_i S + h_i M_0 - v_i - sum_{j<i} G_{i-1,j} (h_i . h_j) delta_j)

with beta, f and G after token i-1, and c_i = 2 / max(1, |h_i|^2). Divided by c_i, the system has the matrix (h h^T) o G
with 1 / c_i on its diagonal. A step of theta = 1/2 makes the memory return v_i for h_i (if |h_i| >= 1); smaller steps
do not overshoot. With one layer and without momentum, this is the gated delta rule (arXiv 2412.06464).

Shapes: ... or N batch and heads, P chunks of the group, C tokens of a chunk; weights (N, d_in, d_out); M parts of a
layer's state, its weights and, with momentum, its momentum. Tensors of the whole group have P * N in the place of N,
chunk after chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import solve_triangular
from torch.nn.functional import pad

from .memory_network import Limits, UpdateRule, apply_layers, gradient_factors, token_surprise
from .memory_state import MemorizeOutput, MemoryInputs, MemoryState, map_tensors, where_rows

# cuBLAS takes 240 to 300 us for a small triangular system (H200), products take less. On a CPU LAPACK is faster.
SOLVED_BY_HALVES = {"cuda"}


class GateProducts(NamedTuple):
    """Factors by which the start of a chunk and its tokens' gradients enter later weights and momenta."""

    gradient_to_weights: Tensor  # G (..., C, C): share of token i's gradient in the weights after token t
    start_to_weights: Tensor  # beta, f (..., C, M): shares of the chunk's start in the weights after token t
    # None without momentum:
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
        products = GateProducts(retain_products * inner_lr[..., None, :], weights_decay[..., None], None, None)
        return products, (retain_products, retain_products, None, None)
    momentum_products = segment_products(log_momentum_decay)  # E
    first_decay = log_momentum_decay[..., :1].exp()  # times the first column of E it is m, and of R E it is f
    combined_products = retain_products @ momentum_products  # R E: (..., C, C) @ (..., C, C)
    products = GateProducts(
        gradient_to_weights=combined_products * inner_lr[..., None, :],  # G = (R E) diag(theta)
        start_to_weights=torch.stack([weights_decay, combined_products[..., 0] * first_decay], -1),  # f = R m
        gradient_to_momentum=momentum_products[..., -1, :] * inner_lr,  # E_T diag(theta)
        momentum_decay=momentum_products[..., -1, 0] * first_decay[..., 0],  # m_T
    )
    return products, (retain_products, combined_products, momentum_products, first_decay)


class EndGates(NamedTuple):
    """The gate products after a chunk's last token: shares of the chunk's start and of the gradients in the end."""

    decay: Tensor  # beta_T, m_T (N, M, 1, 1)
    momentum_to_weights: Tensor | None  # f_T (N, 1, 1); None without momentum
    steps: Tensor  # G_T, E_T theta (N, C, M, 1)

    @classmethod
    def of(cls, gates: GateProducts) -> "EndGates":
        """Selects the products after the last token."""
        decay, steps = gates.start_to_weights[..., -1, :1], gates.gradient_to_weights[..., -1, :, None]
        if gates.momentum_decay is None:
            return cls(decay[..., None, None], None, steps[..., None])
        decay = torch.cat([decay, gates.momentum_decay[..., None]], -1)
        steps = torch.cat([steps, gates.gradient_to_momentum[..., None]], -1)
        return cls(decay[..., None, None], gates.start_to_weights[..., -1, 1, None, None], steps[..., None])


class EarlierGates(NamedTuple):
    """The gate products before each token, which are the products after the token before it."""

    system: Tensor  # row i: G_{i-1} (N, C, C), 1/2 at column i and 0 from there on
    start: Tensor  # beta, f (N, C, M, 1); before the first token 1 and 0

    @classmethod
    def of(cls, gates: GateProducts) -> "EarlierGates":
        """Shifts the products after each token by one token."""
        system = pad(gates.gradient_to_weights, (0, 0, 1, -1))
        system.diagonal(dim1=-2, dim2=-1).fill_(0.5)
        start = pad(gates.start_to_weights, (0, 0, 1, -1))
        start[..., 0, 0].fill_(1.0)
        return cls(system, start[..., None])


class GroupGates(NamedTuple):
    """The gate products of a group, one entry per layer of the memory network, all the same unless the inputs have
    gates per layer; what their backward needs; and of the last layer, with the delta rule, `EarlierGates`.
    """

    products: tuple[GateProducts, ...]
    intermediates: tuple[Tensor | None, ...]
    ends: tuple[EndGates, ...]
    earlier: EarlierGates | None

    @classmethod
    def of(cls, inputs: MemoryInputs, depth: int, rule: UpdateRule) -> "GroupGates":
        """Computes the products from inputs (P * N, C, ...)."""
        gates, filled = (inputs.inner_lr, inputs.log_momentum_decay, inputs.log_retain), inputs.filled
        if inputs.has_gates_per_layer:
            filled = None if filled is None else filled[:, None]
            joined, kept = gate_products(*(None if x is None else x.mT for x in gates), filled)  # (N, L, C)
            layers = [map_tensors(lambda x, i=i: x.select(1, i), joined) for i in range(depth)]
            ends = tuple(map(EndGates.of, layers))
        else:
            products, kept = gate_products(*gates, filled)
            layers, ends = [products] * depth, (EndGates.of(products),) * depth
        return cls(tuple(layers), kept, ends, EarlierGates.of(layers[-1]) if rule.delta_rule else None)

    def factors_of_inputs(self, layer: int) -> Tensor:
        """Returns the factors (P * N, C, K, 1) with which a layer's inputs enter the products of a chunk: `steps`, and
        before them, in the last layer with the delta rule, `EarlierGates.start`.
        """
        is_last = self.earlier is not None and layer == len(self.ends) - 1
        return torch.cat([self.earlier.start, self.ends[layer].steps], 2) if is_last else self.ends[layer].steps


class GroupStates(NamedTuple):
    """The states at the starts of a group's chunks: for each layer W and S, (P * N, M, d_in, d_out), where W is the
    weights minus the decay target; and the anchors (P * N, d_in, d_out), None where all chunks start in this call, so
    that the anchors are the weights.
    """

    layers: tuple[Tensor, ...]
    anchors: tuple[Tensor, ...] | None


def weights_of(layer: Tensor, target: Tensor | None) -> Tensor:
    """Returns the weights (N, d_in, d_out) from W and S (N, M, d_in, d_out)."""
    return layer[:, 0] if target is None else layer[:, 0] + target


def unstack(tree: Any, num_chunks: int) -> Sequence[Any]:
    """Splits tensors of a group (P * N, ...) into views, one for each of its chunks (N, ...)."""
    if num_chunks == 1:
        return [tree]
    if isinstance(tree, Tensor):
        return tree.chunk(num_chunks)
    if not tree:
        return [tree] * num_chunks
    parts = zip(*(unstack(x, num_chunks) for x in tree), strict=True)
    return [type(tree)(*part) if hasattr(tree, "_fields") else part for part in parts]


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Joins the tensors of consecutive chunks (N, ...): (P * N, ...)."""
    return torch.cat(parts) if len(parts) > 1 else parts[0]


class ChunkLayer(NamedTuple):
    """One layer of the memory network in the chunks of a group, or the gradients with respect to it.

    states (P * N, M, d_in, d_out): W and S at the chunks' starts. inputs h (P * N, C, d_in), deltas (P * N, C, d_out):
    the factors of the tokens' gradients. decay_target (P * N, d_in, d_out): M_0; None for 0.
    """

    states: Tensor
    inputs: Tensor
    deltas: Tensor
    decay_target: Tensor | None


class GroupFunctions(NamedTuple):
    """The functions of one group of chunks, `group_forward` and `group_backward`, and of one token, `token_forward` of
    `memory_ops`: as they are, compiled, or as graphs.
    """

    forward: Callable[..., tuple[MemorizeOutput, GroupStates]]
    backward: Callable[..., tuple[MemoryInputs, MemoryState, list[Tensor]]]
    token: Callable[..., MemorizeOutput]


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
) -> tuple[MemorizeOutput, GroupStates]:
    """Computes the retrieved values of a group's queries, the tokens' surprise if it is needed, both (P * N, C, ...),
    and the state at the group's end; and the states at its chunks' starts, with which the backward begins.

    inputs: (P, N, C, ...). state: its anchor is the first chunk's. starts: (P, N) bool, True where a chunk starts; None
    for everywhere.
    """
    num_chunks, depth = len(inputs.keys), len(state.weights)
    inputs = inputs.map(lambda x: x.flatten(0, 1))
    gates = GroupGates.of(inputs, depth, rule)
    states, h, deltas, after = scan_group(inputs, state, decay_target, starts, rule, gates, num_chunks)
    layers = list(map(ChunkLayer, states.layers, h, deltas, repeated(decay_target, num_chunks, depth)))
    retrieved = apply_layers(inputs.queries, reads_of_layers(layers, gates), rule.network)
    surprise = token_surprise(h, deltas, rule) if needs_surprise else None
    return MemorizeOutput(retrieved, surprise, after), states


def scan_group(
    inputs: MemoryInputs,
    state: MemoryState,
    decay_target: Sequence[Tensor],
    starts: Tensor | None,
    rule: UpdateRule,
    gates: GroupGates,
    num_chunks: int,
) -> tuple[GroupStates, list[Tensor], list[Tensor], MemoryState]:
    """Computes what goes from chunk to chunk of a group whose inputs are (P * N, C, ...): the states at the chunks'
    starts, each layer's inputs (P * N, C, d_in) and deltas (P * N, C, d_out), and the state at the group's end.
    """
    depth, anchor = len(state.weights), state.anchor
    targets, momentum = decay_target or [None] * depth, [[x] for x in state.momentum] or [[]] * depth
    offsets = [w if m is None else w - m for w, m in zip(state.weights, targets, strict=True)]
    layers = [torch.stack([w, *s], 1) for w, s in zip(offsets, momentum, strict=True)]
    limits = Limits.of(inputs.keys, inputs.values, rule) if anchor else None
    factors = tuple(map(gates.factors_of_inputs, range(depth)))
    scaled_keys = scaled(inputs.keys, factors[0])
    ends = gates.ends if inputs.has_gates_per_layer else gates.ends[:1]
    of_chunks = (inputs.keys, inputs.values, scaled_keys, limits, ends, gates.earlier, factors[1:])
    all_layers, anchors, all_h, all_deltas = [], [], [], []
    chunks = unstack(of_chunks, num_chunks)
    for p, (keys, values, scaled_h, of_clips, ends, earlier, factors_of_chunk) in enumerate(chunks):
        if p > 0 and anchor:
            weights = tuple(map(weights_of, layers, targets))
            anchor = weights if starts is None else tuple(map(partial(where_rows, starts[p]), weights, anchor))
        all_layers.append(layers)
        anchors.append(anchor)
        h, deltas = [keys], []
        if anchor:
            of_gradients = gradient_factors(keys, values, anchor, rule, of_clips)
            h, deltas = list(of_gradients.inputs), list(of_gradients.deltas)
        scaled_inputs = [scaled_h, *map(scaled, h[1:], factors_of_chunk)]
        if earlier is not None:
            last = layers[-1]
            of_start = scaled_inputs[-1][..., : last.shape[1] * last.shape[2]]
            deltas[depth - 1 :] = [token_deltas(h[-1], of_start, last, targets[-1], values, earlier)]
        layers = list(map(next_state, layers, ends if len(ends) == depth else ends * depth, scaled_inputs, deltas))
        all_h.append(h)
        all_deltas.append(deltas)
    joined = [[stack(x) for x in zip(*parts, strict=True)] for parts in (all_layers, all_deltas)]
    all_h = [inputs.keys, *(stack(x) for x in list(zip(*all_h, strict=True))[1:])]
    kept = None if starts is None else tuple(stack(x) for x in zip(*anchors, strict=True))
    after = tuple(map(weights_of, layers, targets)), tuple(x[:, 1] for x in layers if state.momentum)
    after = MemoryState(*(tuple(x.contiguous() for x in part) for part in after), anchor)
    return GroupStates(tuple(joined[0]), kept), all_h, joined[1], after


def scaled(x: Tensor, factors: Tensor) -> Tensor:
    """Multiplies each token by K factors (N, C, K, 1), side by side: (N, C, d) -> (N, C, K * d)."""
    return (x[:, :, None] * factors).flatten(2)


def next_state(layer: Tensor, gates: EndGates, scaled_inputs: Tensor, deltas: Tensor) -> Tensor:
    """Computes a layer's W and S at a chunk's end (eq. 13-14, unrolled, and 18); scaled_inputs (N, C, K * d_in): at its
    end [G_T h | E_T theta h].

    W_T = beta_T W + f_T S - h^T diag(G_T) delta        S_T = m_T S - h^T diag(E_T theta) delta
    """
    after = gates.decay * layer
    if gates.momentum_to_weights is not None:
        after[:, 0].addcmul_(gates.momentum_to_weights, layer[:, 1])
    joined = after.flatten(1, 2)  # (N, M * d_in, d_out), a view
    joined.baddbmm_(scaled_inputs[..., -joined.shape[1] :].mT, deltas, alpha=-1)  # (N, M * d_in, C) @ (N, C, d_out)
    return after


def token_deltas(
    h: Tensor, scaled_inputs: Tensor, layer: Tensor, target: Tensor | None, values: Tensor, gates: EarlierGates
) -> Tensor:
    """Computes the last layer's deltas of a chunk's tokens with values (N, C, d_out) by the delta rule; scaled_inputs:
    [beta h | f h] (N, C, M * d_in).
    """
    error = start_error(h, scaled_inputs, layer, target, values)
    return solve(delta_system(h, gates)[1], error)


def solve(system: Tensor, right: Tensor) -> Tensor:
    """Solves A x = right (N, C, d) for a lower triangular A (N, C, C).

    By halves: the inverse of each block of 2, 4, 8, .. tokens on the diagonal is [[X, 0], [-Y B X, Y]], of the inverses
    X and Y of its halves and the block B below X.
    """
    if system.device.type not in SOLVED_BY_HALVES:
        return solve_triangular(system, right, upper=False)
    size, diagonal = system.shape[-1], system.diagonal(dim1=-2, dim2=-1)[..., None]
    token, levels = (torch.arange(n, device=system.device) for n in (size, max(1, (size - 1).bit_length())))
    # The level of an entry below the diagonal is the highest bit in which its row and its column differ.
    is_of_level = (token[:, None] ^ token) >> levels[:, None, None] == 1
    below, *larger = (system / diagonal * is_of_level[:, None]).unbind()  # B of each level, (N, C, C)
    inverse = torch.eye(size, dtype=system.dtype, device=system.device) - below
    for below in larger:
        inverse = torch.baddbmm(inverse, torch.bmm(inverse, below), inverse, alpha=-1)
    return torch.bmm(inverse, right / diagonal)


def start_error(h: Tensor, scaled_inputs: Tensor, layer: Tensor, target: Tensor | None, values: Tensor) -> Tensor:
    """Computes e_0 = beta h W + f h S + h M_0 - v (N, C, d_out)."""
    error = torch.bmm(scaled_inputs, layer.flatten(1, 2))  # (N, C, M * d_in) @ (N, M * d_in, d_out)
    return (error if target is None else error.baddbmm_(h, target)).sub_(values)


def delta_system(h: Tensor, gates: EarlierGates) -> tuple[Tensor, Tensor]:
    """Computes the scores h h^T and the matrix A of A delta = e_0, (N, C, C); on A's diagonal max(1, |h|^2) / 2."""
    scores = torch.bmm(h, h.mT)
    system = scores * gates.system
    system.diagonal(dim1=-2, dim2=-1).clamp_(min=0.5)
    return scores, system


def reads_of_layers(layers: Sequence[ChunkLayer], gates: GroupGates) -> list[Callable[[Tensor], Tensor]]:
    """Returns each layer as a function that multiplies every token by the layer's weights after that token."""
    return [partial(read_layer, layer=x, gates=y) for x, y in zip(layers, gates.products, strict=True)]


def read_layer(x: Tensor, layer: ChunkLayer, gates: GateProducts) -> Tensor:
    """Multiplies every token by the layer's weights after that token: (N, C, d_in) -> (N, C, d_out).

    x_t M_t = beta_t x_t W + f_t x_t S - sum_{i<=t} G_ti (x_t . h_i) delta_i + x_t M_0    (eq. 13-16, unrolled)
    """
    scores = torch.bmm(x, layer.inputs.mT) * gates.gradient_to_weights  # (N, C, d_in) @ (N, d_in, C): (x h^T) o G
    output = torch.bmm(scaled(x, gates.start_to_weights[..., None]), layer.states.flatten(1, 2))
    if layer.decay_target is not None:
        output.baddbmm_(x, layer.decay_target)  # + x M_0
    return output.baddbmm_(scores, layer.deltas, alpha=-1)  # - ((x h^T) o G) delta: (N, C, C) @ (N, C, d_out)


def repeated(decay_target: Sequence[Tensor], num_chunks: int, depth: int) -> list[Tensor | None]:
    """Repeats each layer's M_0 (N, d_in, d_out) for all chunks, (P * N, d_in, d_out); None for 0."""
    return [x if num_chunks == 1 else x.repeat(num_chunks, 1, 1) for x in decay_target] or [None] * depth
