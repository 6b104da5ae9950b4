"""The memory, fast: the dual form of chunked gradient descent (paper section 3.2), and the single step.

Within a chunk every gradient is taken at the weights of the chunk's start, so a token's gradient is rank one in each
layer and all weights after all tokens follow from a few matrix products (`memory_gates`), exactly. No per-token weights
exist. Shapes: B batch, H heads, T tokens, C tokens of a chunk, D head size; weights (B, H, d_in, d_out).
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .memory_gates import GateProducts, gate_products
from .memory_network import apply_layers, gradient_factors, read
from .memory_state import MemoryState, where_rows
from .token_grid import TokenGrid


class Tokens(NamedTuple):
    """What `memorize` is told about T tokens, in the state's dtype."""

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


def _memorize_grid(
    slots: Tokens, state: MemoryState, grid: TokenGrid, chunk_size: int, error_clip: float | None
) -> tuple[Tensor, MemoryState]:
    """All chunks of the grid, one after the other; every row's chunk begins at a multiple of `chunk_size`."""
    filled = None if grid.filled is None else grid.filled[:, None].expand_as(slots.inner_lr)
    chunk_gates = _chunk_gates(slots, filled, chunk_size)
    # split, not indexing: the backward of an index into one tensor is a tensor of its full size for every chunk
    chunks = zip(*(x.split(chunk_size, dim=2) for x in slots[:3]), chunk_gates, strict=True)
    weights, momentum, anchor = state.weights, state.momentum, state.anchor
    retrieved = []
    for chunk, (queries, keys, values, gates) in enumerate(chunks):
        if filled is None:
            anchor = weights
        else:
            first = chunk * chunk_size
            begins = partial(where_rows, (grid.start <= first) & (grid.end > first))
            anchor = tuple(map(begins, weights, anchor))
        y, weights, momentum = _memorize_chunk(queries, keys, values, gates, weights, momentum, anchor, error_clip)
        retrieved.append(y)
    num_seen = state.num_seen + grid.end - grid.start
    return torch.cat(retrieved, dim=2), MemoryState(weights, momentum, anchor, num_seen)


def _chunk_gates(slots: Tokens, filled: Tensor | None, chunk_size: int) -> list[GateProducts]:
    """The gate products of every chunk, all full chunks at once; the last chunk may be shorter."""
    gates = [*slots[3:], *([] if filled is None else [filled])]
    num_slots = slots.inner_lr.shape[-1]
    end_of_full = num_slots // chunk_size * chunk_size
    chunks = []
    for begin, end in ((0, end_of_full), (end_of_full, num_slots)):
        if begin < end:
            size = min(chunk_size, end - begin)
            products = gate_products(*(x[..., begin:end].unflatten(-1, (-1, size)) for x in gates))
            chunks += [GateProducts(*parts) for parts in zip(*(x.unbind(2) for x in products), strict=True)]
    return chunks


def _memorize_chunk(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    gates: GateProducts,
    weights: tuple[Tensor, ...],
    momentum: tuple[Tensor, ...],
    anchor: tuple[Tensor, ...],
    error_clip: float | None,
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """One chunk (B, H, C, D) -> what its queries retrieve, and the weights and momentum at its end."""
    inputs, deltas = gradient_factors(keys, values, anchor, error_clip)

    def layer_after_each_token(w: Tensor, s: Tensor, inputs: Tensor, delta: Tensor):
        """x_t -> x_t M_t = beta_t x_t W + f_t x_t S - sum_{i<=t} G_ti (x_t . h_i) delta_i, for x (B, H, C, d_in)."""
        beta, carry = gates.retain[..., None], gates.carry[..., None]
        return lambda x: beta * (x @ w) + carry * (x @ s) - ((x @ inputs.mT) * gates.write) @ delta

    layers = list(zip(weights, momentum, inputs, deltas, strict=True))
    retrieved = apply_layers(queries, [layer_after_each_token(*layer) for layer in layers])
    beta, carry = gates.retain[..., -1, None, None], gates.carry[..., -1, None, None]
    share, momentum_share = gates.write[..., -1, :, None], gates.momentum_write[..., None]
    momentum_carry = gates.momentum_carry[..., None, None]
    new_weights = tuple(beta * w + carry * s - h.mT @ (share * d) for w, s, h, d in layers)
    new_momentum = tuple(momentum_carry * s - h.mT @ (momentum_share * d) for _, s, h, d in layers)
    return retrieved, new_weights, new_momentum
