"""The memory, fast: the dual form of chunked gradient descent (paper section 3.2), its backward, and the single step.

Within a chunk every gradient is taken at the weights of the chunk's start, so a token's gradient is rank one in each
layer and all weights after all tokens follow from a few matrix products (`memory_gates`), exactly. No per-token weights
exist. For the backward, only the state at the start of every chunk is kept; what happens within a chunk is computed
again, but for its longest part, the step of the state. Shapes: B batch, H heads, T tokens, C tokens of a chunk, D head
size; weights (B, H, d_in, d_out).
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .memory_gates import GateProducts, gate_products
from .memory_network import apply_layers, gradient_factors, read
from .memory_state import MemoryState, where_rows
from .token_grid import TokenGrid


class Tokens(NamedTuple):
    """What `memorize` is told about T tokens, in the state's dtype; or the gradients with respect to it."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    inner_lr: Tensor
    log_momentum_decay: Tensor
    log_retain: Tensor


def memorize(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    inner_lr: Tensor,
    log_momentum_decay: Tensor,
    log_retain: Tensor,
    state: MemoryState,
    *,
    chunk_size: int,
    error_clip: float | None,
    grid: TokenGrid | None = None,
) -> tuple[Tensor, MemoryState]:
    """Writes T tokens into the memory and reads each one's query right after its own write (eq. 13-16).

    queries, keys, values: (B, H, T, D), any floating dtype; the work is done in the state's.
    inner_lr (theta), log_momentum_decay (log eta), log_retain (log(1 - alpha)): (B, H, T); -inf is a gate of 0.
    state: where to go on from; rows may be at different positions in their chunk.
    chunk_size: tokens that share the weights at which their gradients are taken.
    error_clip: kappa of `memory_network.gradient_factors`; None for the paper's plain loss.
    grid: given, the tokens already lie on its slots (T = grid.num_slots), made for a multiple of `chunk_size`.
    Returns the retrieved values (B, H, T, D) in the state's dtype (undefined at unfilled slots) and the state after.
    """
    dtype = state.weights[0].dtype
    tokens = Tokens(*(x.to(dtype) for x in (queries, keys, values, inner_lr, log_momentum_decay, log_retain)))
    if keys.shape[2] == 1 and (grid is None or grid.is_step):
        return _memorize_step(tokens, state, chunk_size, error_clip)
    if grid is not None:
        return _memorize_grid(tokens, state, grid, chunk_size, error_clip)
    grid = TokenGrid.build(state.num_seen, keys.shape[2], chunk_size)
    slots = Tokens(*(grid.place(x.transpose(1, 2)).transpose(1, 2) for x in tokens))
    retrieved, state = _memorize_grid(slots, state, grid, chunk_size, error_clip)
    return grid.take(retrieved.transpose(1, 2)).transpose(1, 2), state


def _memorize_step(
    token: Tokens, state: MemoryState, chunk_size: int, error_clip: float | None
) -> tuple[Tensor, MemoryState]:
    """One token: eq. 13-15 as they stand, without a branch on data."""
    begins = partial(where_rows, state.num_seen % chunk_size == 0)
    anchor = tuple(map(begins, state.weights, state.anchor))
    inputs, deltas = gradient_factors(token.keys, token.values, anchor, error_clip)
    theta, eta, retain = (
        x[..., None] for x in (token.inner_lr, token.log_momentum_decay.exp(), token.log_retain.exp())
    )
    momentum = tuple(eta * s - x.mT * (theta * d) for s, x, d in zip(state.momentum, inputs, deltas, strict=True))
    weights = tuple(retain * w + s for w, s in zip(state.weights, momentum, strict=True))
    return read(weights, token.queries), MemoryState(weights, momentum, anchor, state.num_seen + 1)


class Plan(NamedTuple):
    """What a sweep is told beside its tensors.

    filled: (B, H, T) bool, False where no token lies; None if all are filled. begins: (N, B) bool, the rows in which
    of the N chunks begins, and neither goes on nor holds no token; None if all do.
    """

    chunk_size: int
    error_clip: float | None
    filled: Tensor | None
    begins: Tensor | None


class Layers(NamedTuple):
    """The state, one tensor (B, H, d_in, d_out) per layer; or the gradients with respect to it."""

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

    weights, momentum (B, H, d_in, d_out): at the chunk's start. inputs h (B, H, C, d_in), deltas (B, H, C, d_out): the
    factors of its tokens' gradients.
    """

    weights: Tensor
    momentum: Tensor
    inputs: Tensor
    deltas: Tensor


def _memorize_grid(
    slots: Tokens, state: MemoryState, grid: TokenGrid, chunk_size: int, error_clip: float | None
) -> tuple[Tensor, MemoryState]:
    """All chunks of the grid; every row's chunk begins at a multiple of `chunk_size`."""
    filled = begins = None
    if grid.filled is not None:
        filled = grid.filled[:, None].expand_as(slots.inner_lr)
        first = torch.arange(0, grid.num_slots, chunk_size, device=filled.device)[:, None]
        begins = (grid.start <= first) & (grid.end > first)
    plan = Plan(chunk_size, error_clip, filled, begins)
    tensors = (*slots, *state.weights, *state.momentum, *state.anchor)
    by_hand = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if by_hand and not torch.compiler.is_compiling():  # a compiler makes the backward itself
        retrieved, *after = Sweep.apply(plan, *tensors)
    else:
        retrieved, *after = _sweep(plan, tensors)
    return retrieved, MemoryState(*Layers.of(after), state.num_seen + grid.end - grid.start)


def _sweep(plan: Plan, tensors: Sequence[Tensor], starts: list[Layers] | None = None) -> tuple[Tensor, ...]:
    """All chunks, one after the other: the six `Tokens`, then those of `Layers` -> what is retrieved, those after.

    Appends to `starts` what each chunk starts with.
    """
    tokens, state = Tokens(*tensors[:6]), Layers.of(tensors[6:])
    # split, not indexing: the backward of an index into one tensor is a tensor of its full size for every chunk
    pieces = zip(*(x.split(plan.chunk_size, dim=2) for x in tokens[:3]), _chunk_gates(plan, tokens), strict=True)
    retrieved = []
    for chunk, (queries, keys, values, gates) in enumerate(pieces):
        state = state._replace(anchor=_where_begins(plan, chunk, state.weights, state.anchor))
        if starts is not None:
            starts.append(state)
        factors = gradient_factors(keys, values, state.anchor, plan.error_clip)
        layers = [Layer(*parts) for parts in zip(state.weights, state.momentum, *factors, strict=True)]
        retrieved.append(apply_layers(queries, [partial(_read_layer, layer=layer, gates=gates) for layer in layers]))
        state = Layers(*zip(*(_step_layer(layer, gates) for layer in layers), strict=True), state.anchor)
    return torch.cat(retrieved, dim=2), *state.weights, *state.momentum, *state.anchor


def _where_begins(plan: Plan, chunk: int, new: Sequence[Tensor], old: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`new` in the rows in which the chunk begins, `old` in the others."""
    if plan.begins is None:
        return tuple(new)
    return tuple(map(partial(where_rows, plan.begins[chunk]), new, old))


def _chunk_gates(plan: Plan, tokens: Tokens) -> list[GateProducts]:
    """The gate products of every chunk, all full chunks at once; the last chunk may be shorter."""
    gates = [*tokens[3:], *([] if plan.filled is None else [plan.filled])]
    num_slots = tokens.inner_lr.shape[-1]
    end_of_full = num_slots // plan.chunk_size * plan.chunk_size
    chunks = []
    for begin, end in ((0, end_of_full), (end_of_full, num_slots)):
        if begin < end:
            size = min(plan.chunk_size, end - begin)
            products = gate_products(*(x[..., begin:end].unflatten(-1, (-1, size)) for x in gates))
            chunks += [GateProducts(*parts) for parts in zip(*(x.unbind(2) for x in products), strict=True)]
    return chunks


def _add_product(x: Tensor, a: Tensor, b: Tensor, factor: int = 1) -> Tensor:
    """x + factor a @ b, in one pass."""
    flat = torch.baddbmm(*(y.flatten(0, 1) for y in (x, a, b)), alpha=factor)
    return flat.unflatten(0, x.shape[:2])


def _read_layer(x: Tensor, layer: Layer, gates: GateProducts) -> Tensor:
    """x_t M_t = beta_t x_t W + f_t x_t S - sum_{i<=t} G_ti (x_t . h_i) delta_i: (B, H, C, d_in) -> (B, H, C, d_out)"""
    beta, carry = gates.retain[..., None], gates.carry[..., None]
    scores = (x @ layer.inputs.mT) * gates.write
    unwritten = torch.addcmul(beta * (x @ layer.weights), carry, x @ layer.momentum)
    return _add_product(unwritten, scores, layer.deltas, -1)


def _step_layer(layer: Layer, gates: GateProducts) -> tuple[Tensor, Tensor]:
    """Weights and momentum at the chunk's end."""
    beta, carry = gates.retain[..., -1, None, None], gates.carry[..., -1, None, None]
    share, momentum_share = gates.write[..., -1, :, None], gates.momentum_write[..., None]
    unwritten = torch.addcmul(beta * layer.weights, carry, layer.momentum)
    momentum = gates.momentum_carry[..., None, None] * layer.momentum
    return (
        _add_product(unwritten, layer.inputs.mT, share * layer.deltas, -1),
        _add_product(momentum, layer.inputs.mT, momentum_share * layer.deltas, -1),
    )


class Sweep(torch.autograd.Function):
    """`_sweep`, which keeps for its backward the states that the chunks start with, and nothing else."""

    @staticmethod
    def forward(ctx, plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        starts = []
        results = _sweep(plan, tensors, starts)
        kept = 3 if plan.begins is not None else 2  # where every chunk begins, the anchor is the weights
        ctx.plan, ctx.depth = plan, len(starts[0].weights)
        ctx.save_for_backward(*tensors[:6], *(x for start in starts for part in start[:kept] for x in part))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_retrieved: Tensor, *grad_after: Tensor) -> tuple[Tensor | None, ...]:
        plan, tokens = ctx.plan, ctx.saved_tensors[:6]
        pieces = list(zip(*(x.split(plan.chunk_size, dim=2) for x in (*tokens, grad_retrieved)), strict=True))
        filled = None if plan.filled is None else plan.filled.split(plan.chunk_size, dim=2)
        saved = ctx.saved_tensors[6:]
        saved = [saved[i : i + ctx.depth] for i in range(0, len(saved), ctx.depth)]
        kept = len(saved) // len(pieces)
        grads, grad_tokens = Layers.of(grad_after), []
        with torch.autocast(grad_retrieved.device.type, enabled=False):
            for chunk in reversed(range(len(pieces))):
                *piece, grad = pieces[chunk]
                parts = saved[chunk * kept : (chunk + 1) * kept]
                start = Layers(*parts, *(parts[:1] if kept == 2 else ()))
                where = filled and filled[chunk]
                grads, grad_piece = _chunk_backward(Tokens(*piece), where, start, plan.error_clip, grad, grads)
                # the anchor was taken from the weights where the chunk began, else from the chunk before
                to_weights, to_anchor = grads.anchor, ()
                if plan.begins is not None:
                    nothing = [torch.zeros_like(x) for x in grads.anchor]
                    to_weights = _where_begins(plan, chunk, grads.anchor, nothing)
                    to_anchor = _where_begins(plan, chunk, nothing, grads.anchor)
                weights = tuple(a.add_(b) for a, b in zip(grads.weights, to_weights, strict=True))
                grads = Layers(weights, grads.momentum, to_anchor)
                grad_tokens.append(grad_piece)
        grad_tokens = (torch.cat(parts[::-1], dim=2) for parts in zip(*grad_tokens, strict=True))
        return None, *grad_tokens, *grads.weights, *grads.momentum, *(grads.anchor or [None] * ctx.depth)


def _chunk_backward(
    tokens: Tokens, filled: Tensor | None, start: Layers, error_clip: float | None, grad: Tensor, grad_after: Layers
) -> tuple[Layers, Tokens]:
    """Gradients with respect to what a chunk retrieves and the state after it -> those to the state it starts with and
    to its tokens.

    What is not linear, the factors and the gate products, is computed again and left to autograd.
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (*tokens[1:], *start.anchor)]
        gates = gate_products(*leaves[2:5], *([] if filled is None else [filled]))
        inputs, deltas = gradient_factors(*leaves[:2], leaves[5:], error_clip)
    layers = [Layer(*parts) for parts in zip(start.weights, start.momentum, inputs, deltas, strict=True)]
    reads, sigmoids = [tokens.queries], []
    for layer in layers[:-1]:
        pre_activation = _read_layer(reads[-1], layer, gates)
        sigmoids.append(torch.sigmoid(pre_activation))
        reads.append(pre_activation * sigmoids[-1])
    grad_layers, grad_gates = [], []
    for i in reversed(range(len(layers))):
        after = grad_after.weights[i], grad_after.momentum[i]
        grad, grad_layer, grad_of_gates = _layer_backward(grad, *after, reads[i], layers[i], gates)
        grad_layers.insert(0, grad_layer)
        grad_gates.append(grad_of_gates)
        if i > 0:
            grad = grad * (sigmoids[i - 1] + reads[i] * (1 - sigmoids[i - 1]))
    grad_weights, grad_momentum, grad_inputs, grad_deltas = zip(*grad_layers, strict=True)
    grad_gates = [sum(parts) for parts in zip(*grad_gates, strict=True)]
    grad_keys, *found = torch.autograd.grad(
        [*gates, *inputs[1:], *deltas], leaves, [*grad_gates, *grad_inputs[1:], *grad_deltas]
    )
    grad_anchor = [a + b for a, b in zip(found[4:], grad_after.anchor, strict=True)] if grad_after.anchor else found[4:]
    grad_tokens = Tokens(grad, grad_keys + grad_inputs[0], *found[:4])
    return Layers(grad_weights, grad_momentum, grad_anchor), grad_tokens


def _layer_backward(
    grad: Tensor, grad_weights: Tensor, grad_momentum: Tensor, x: Tensor, layer: Layer, gates: GateProducts
) -> tuple[Tensor, Layer, GateProducts]:
    """Of `_read_layer` and `_step_layer`: gradients with respect to what they return -> to x, the layer and the gates."""
    weights, momentum, inputs, deltas = layer
    beta, carry = gates.retain[..., None], gates.carry[..., None]
    last_beta, last_carry = beta[..., -1:, :], carry[..., -1:, :]
    share, momentum_share = gates.write[..., -1, :, None], gates.momentum_write[..., None]
    momentum_carry = gates.momentum_carry[..., None, None]
    # the read
    to_weights, to_momentum = grad @ weights.mT, grad @ momentum.mT
    scores, grad_scores = x @ inputs.mT, grad @ deltas.mT
    written = grad_scores * gates.write
    grad_x = _add_product(torch.addcmul(beta * to_weights, carry, to_momentum), written, inputs, -1)
    grad_write = -(scores * grad_scores)
    grad_retain, grad_carry = (x * to_weights).sum(-1), (x * to_momentum).sum(-1)
    # the step
    from_weights, from_momentum = inputs @ grad_weights, inputs @ grad_momentum
    grad_inputs = _add_product((share * deltas) @ grad_weights.mT, momentum_share * deltas, grad_momentum.mT)
    grad_inputs = _add_product(grad_inputs, written.mT, x).neg_()
    grad_deltas = torch.addcmul(share * from_weights, momentum_share, from_momentum)
    grad_deltas = _add_product(grad_deltas, (scores * gates.write).mT, grad).neg_()
    grad_write[..., -1, :] -= (deltas * from_weights).sum(-1)
    grad_retain[..., -1] += (grad_weights * weights).sum((-2, -1))
    grad_carry[..., -1] += (grad_weights * momentum).sum((-2, -1))
    grad_gates = GateProducts(
        grad_write,
        grad_retain,
        grad_carry,
        momentum_write=-(deltas * from_momentum).sum(-1),
        momentum_carry=(grad_momentum * momentum).sum((-2, -1)),
    )
    grad_layer = Layer(
        _add_product(last_beta * grad_weights, x.mT, beta * grad),
        _add_product(torch.addcmul(last_carry * grad_weights, momentum_carry, grad_momentum), x.mT, carry * grad),
        grad_inputs,
        grad_deltas,
    )
    return grad_x, grad_layer, grad_gates
