"""The dual form of chunked gradient descent (paper section 3.2), chunk after chunk.

Within a chunk every gradient is taken at the weights of the chunk's start, so a token's gradient is rank one in each
layer and all weights after all tokens follow from a few matrix products (`memory_gates`), exactly. No per-token weights
exist. What every token scales is scaled where it is narrow, before a matrix product or after it. Shapes: N batch and
heads, T tokens, C tokens of a chunk; weights (N, d_in, d_out).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .memory_gates import GateParts, GateProducts, gate_products
from .memory_network import Factors, apply_layers, gradient_factors, token_surprise
from .memory_state import where_rows

COMPILED: dict[Callable, Callable] = {}  # filled by `memory_chunk.compile_chunks`
KEPT_EVERY = 4  # chunks, from one state that is kept for the backward to the next


class Tokens(NamedTuple):
    """What `memorize` is told about T tokens, in the state's dtype; or the gradients with respect to it."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    inner_lr: Tensor
    log_momentum_decay: Tensor
    log_retain: Tensor


class Plan(NamedTuple):
    """What a sweep is told beside its tensors.

    depth: layers of the memory network. filled: (N, T) bool, False where no token lies; None if all are filled. begins:
    (number of chunks, N) bool, where the chunk begins, and neither goes on nor holds no token; None if it always does.
    """

    depth: int
    chunk_size: int
    error_clip: float | None
    filled: Tensor | None
    begins: Tensor | None

    def work(self, work: Callable, piece: Sequence[Tensor]) -> Callable:
        """`work` compiled, if it is and the piece is a full chunk."""
        full = piece[0].shape[1] == self.chunk_size
        return COMPILED.get(work, work) if full and not torch.compiler.is_compiling() else work


class Layers(NamedTuple):
    """The state, one tensor (N, d_in, d_out) per layer; or the gradients with respect to it."""

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    anchor: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Layers":
        """From all tensors, one after the other."""
        depth = len(tensors) // 3
        return cls(*(tuple(tensors[i * depth : (i + 1) * depth]) for i in range(3)))


class Layer(NamedTuple):
    """A layer of the memory in a chunk, or the gradients with respect to it.

    learnt, momentum (N, d_in, d_out): at the chunk's start; `learnt` is what the weights have beyond `initial`, which
    is None for 0. inputs h (N, C, d_in), deltas (N, C, d_out): the factors of its tokens' gradients.
    """

    learnt: Tensor
    momentum: Tensor
    inputs: Tensor
    deltas: Tensor
    initial: Tensor | None


class Prepared(NamedTuple):
    """What forward and backward of a chunk begin with: what its gates and its gradients come to."""

    tokens: Tokens
    gates: GateProducts
    gate_parts: GateParts
    factors: Factors
    layers: list[Layer]
    anchor: tuple[Tensor, ...]


def sweep(plan: Plan, tensors: Sequence[Tensor], starts: list[Layers] | None = None) -> tuple[Tensor, ...]:
    """All chunks, one after the other: the six `Tokens`, then those of `Layers`, then the weights that forgetting leads
    back to, if not to 0 -> what is retrieved, the surprise of each token (N, T), those of `Layers` after.

    Appends to `starts` what every `KEPT_EVERY`-th chunk starts with.
    """
    state, initial = split_state(plan, tensors[6:])
    retrieved, surprise = [], []
    for chunk, tokens in enumerate(pieces(plan, tensors[:6])):
        state = with_anchor(plan, chunk, state)
        if starts is not None and chunk % KEPT_EVERY == 0:
            starts.append(state)
        work = plan.work(chunk_forward, tokens)
        read, surprise_here, weights, momentum = work(tokens, state, initial, plan.error_clip)
        retrieved.append(read)
        surprise.append(surprise_here)
        state = Layers(weights, momentum, state.anchor)
    return torch.cat(retrieved, dim=1), torch.cat(surprise, dim=1), *state.weights, *state.momentum, *state.anchor


def split_state(plan: Plan, tensors: Sequence[Tensor]) -> tuple[Layers, tuple[Tensor, ...]]:
    """The state, and the initial weights or nothing."""
    return Layers.of(tensors[: 3 * plan.depth]), tuple(tensors[3 * plan.depth :])


def pieces(plan: Plan, per_token: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Of tensors (N, T, ...), those of every chunk, and which of its slots are filled, unless all are.

    The last chunk may be shorter. The strides of the others do not depend on T, else they would be compiled anew.
    """
    if plan.filled is not None:
        per_token = (*per_token, plan.filled)
    # split, not indexing: the backward of an index into one tensor is a tensor of its full size for every chunk
    chunks = zip(*(x.split(plan.chunk_size, dim=1) for x in per_token), strict=True)
    return [tuple(x.contiguous() for x in chunk) for chunk in chunks]


def where_begins(plan: Plan, chunk: int, new: Sequence[Tensor], old: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`new` in the rows in which the chunk begins, `old` in the others."""
    if plan.begins is None:
        return tuple(new)
    return tuple(map(partial(where_rows, plan.begins[chunk]), new, old))


def with_anchor(plan: Plan, chunk: int, state: Layers) -> Layers:
    """The state before a chunk, its anchor the weights in the rows in which the chunk begins."""
    return state._replace(anchor=where_begins(plan, chunk, state.weights, state.anchor))


def chunk_forward(
    piece: Sequence[Tensor], start: Layers, initial: Sequence[Tensor], error_clip: float | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """One of the `pieces` -> what it retrieves (N, C, D), its surprise (N, C), weights and momentum after it."""
    prepared = prepare(piece, start, initial, error_clip)
    layers = [partial(read_layer, layer=layer, gates=prepared.gates) for layer in prepared.layers]
    return apply_layers(prepared.tokens.queries, layers), token_surprise(prepared.factors), *step(prepared)


def prepare(piece: Sequence[Tensor], start: Layers, initial: Sequence[Tensor], error_clip: float | None) -> Prepared:
    tokens, gates = Tokens(*piece[:6]), gate_products(*piece[3:])
    factors = gradient_factors(tokens.keys, tokens.values, start.anchor, error_clip)
    learnt = [w - m for w, m in zip(start.weights, initial, strict=True)] if initial else start.weights
    parts = (learnt, start.momentum, factors.inputs, factors.deltas, initial or [None] * len(learnt))
    return Prepared(tokens, *gates, factors, [Layer(*x) for x in zip(*parts, strict=True)], start.anchor)


def read_layer(x: Tensor, layer: Layer, gates: GateProducts) -> Tensor:
    """x_t M_t = beta_t x_t W + f_t x_t S - sum_{i<=t} G_ti (x_t . h_i) delta_i + x_t I: (N, C, d_in) -> (N, C, d_out)

    W is what is learnt: the weights at the chunk's start less the initial ones I.
    """
    scores = (x @ layer.inputs.mT) * gates.write
    if x.shape[-1] > layer.learnt.shape[-1]:
        read = gates.retain[..., None] * (x @ layer.learnt)
        read.addcmul_(gates.carry[..., None], x @ layer.momentum)
    else:
        read = (gates.retain[..., None] * x) @ layer.learnt
        read.baddbmm_(gates.carry[..., None] * x, layer.momentum)
    if layer.initial is not None:
        read.baddbmm_(x, layer.initial)
    return read.baddbmm_(scores, layer.deltas, alpha=-1)


def step(prepared: Prepared) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Weights and momentum at the chunk's end, a tensor a layer."""
    weights, momentum = zip(*(step_layer(layer, prepared.gates) for layer in prepared.layers), strict=True)
    return weights, momentum


def step_layer(layer: Layer, gates: GateProducts) -> tuple[Tensor, Tensor]:
    """Weights and momentum at the chunk's end."""
    share, momentum_share = gates.write[..., -1, :, None], gates.momentum_write[..., None]
    weights = gates.retain[..., -1, None, None] * layer.learnt
    if layer.initial is not None:
        weights.add_(layer.initial)
    weights.addcmul_(gates.carry[..., -1, None, None], layer.momentum)
    momentum = gates.momentum_carry[..., None, None] * layer.momentum
    if layer.inputs.shape[-1] > layer.deltas.shape[-1]:
        weights.baddbmm_(layer.inputs.mT, share * layer.deltas, alpha=-1)
        momentum.baddbmm_(layer.inputs.mT, momentum_share * layer.deltas, alpha=-1)
    else:
        weights.baddbmm_((share * layer.inputs).mT, layer.deltas, alpha=-1)
        momentum.baddbmm_((momentum_share * layer.inputs).mT, layer.deltas, alpha=-1)
    return weights, momentum
