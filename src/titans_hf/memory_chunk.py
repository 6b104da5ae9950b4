"""The memory, fast: chunks of tokens in the dual form (`memory_sweep`), or one token as the equations stand.

Shapes: B batch, H heads, T tokens, D head size; weights (B, H, d_in, d_out).
"""

from functools import partial

import torch
from torch import Tensor

from .memory_backward import Sweep, chunk_backward
from .memory_network import gradient_factors, read, token_surprise
from .memory_state import MemoryState, where_rows
from .memory_sweep import COMPILED, Layers, Plan, Tokens, chunk_forward, prepare, sweep
from .token_grid import TokenGrid


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
    initial: tuple[Tensor, ...] = (),
    grid: TokenGrid | None = None,
) -> tuple[Tensor, MemoryState]:
    """Writes T tokens into the memory and reads each one's query right after its own write (eq. 13-16).

    queries, keys, values: (B, H, T, D), any floating dtype; the work is done in the state's.
    inner_lr (theta), log_momentum_decay (log eta), log_retain (log(1 - alpha)): (B, H, T); -inf is a gate of 0.
    state: where to go on from; rows may be at different positions in their chunk.
    chunk_size: tokens that share the weights at which their gradients are taken.
    error_clip: kappa of `memory_network.gradient_factors`; None for the paper's plain loss.
    initial: weights (H, d_in, d_out) of each layer that forgetting leads back to; none for 0, as in eq. 13.
    grid: given, the tokens already lie on its slots (T = grid.num_slots), made for a multiple of `chunk_size`.
    Returns the retrieved values (B, H, T, D) in the state's dtype (undefined at unfilled slots) and the state after.
    """
    tokens = Tokens(queries, keys, values, inner_lr, log_momentum_decay, log_retain)
    options = dict(chunk_size=chunk_size, error_clip=error_clip, initial=initial, grid=grid)
    retrieved, _, state = memorize_surprised(tokens, state, **options)
    return retrieved, state


def memorize_surprised(
    tokens: Tokens,
    state: MemoryState,
    *,
    chunk_size: int,
    error_clip: float | None,
    initial: tuple[Tensor, ...] = (),
    grid: TokenGrid | None = None,
) -> tuple[Tensor, Tensor, MemoryState]:
    """`memorize`, which also returns the surprise of each token (B, H, T), the norm of its gradient as it is written.
    No gradient flows through it.
    """
    dtype = state.weights[0].dtype
    tokens = Tokens(*(x.to(dtype) for x in tokens))
    num_tokens = tokens.keys.shape[2]
    if num_tokens == 1 and (grid is None or grid.is_step):
        return _memorize_step(tokens, state, initial, chunk_size, error_clip)
    if grid is not None:
        return _memorize_grid(tokens, state, initial, grid, chunk_size, error_clip)
    grid = TokenGrid.build(state.num_seen, num_tokens, chunk_size)
    slots = Tokens(*(grid.place(x.transpose(1, 2)).transpose(1, 2) for x in tokens))
    *found, state = _memorize_grid(slots, state, initial, grid, chunk_size, error_clip)
    return *(grid.take(x.transpose(1, 2)).transpose(1, 2) for x in found), state


def _memorize_step(
    token: Tokens, state: MemoryState, initial: tuple[Tensor, ...], chunk_size: int, error_clip: float | None
) -> tuple[Tensor, Tensor, MemoryState]:
    """One token: eq. 13-15 as they stand, without a branch on data."""
    begins = partial(where_rows, state.num_seen % chunk_size == 0)
    anchor = tuple(map(begins, state.weights, state.anchor))
    factors = gradient_factors(token.keys, token.values, anchor, error_clip)
    theta, eta, retain = (
        x[..., None] for x in (token.inner_lr, token.log_momentum_decay.exp(), token.log_retain.exp())
    )
    # in place where a tensor is new: a step takes as long as it takes to pass over the state
    gradients = zip(state.momentum, factors.inputs, factors.deltas, strict=True)
    momentum = tuple((eta * s).addcmul_(x.mT, theta * d, value=-1) for s, x, d in gradients)
    if initial:
        kept = [torch.lerp(m, w, retain) for m, w in zip(initial, state.weights, strict=True)]
    else:
        kept = [retain * w for w in state.weights]
    weights = tuple(w.add_(s) for w, s in zip(kept, momentum, strict=True))
    state = MemoryState(weights, momentum, anchor, state.num_seen + 1)
    return read(weights, token.queries), token_surprise(factors).detach(), state


def _memorize_grid(
    slots: Tokens,
    state: MemoryState,
    initial: tuple[Tensor, ...],
    grid: TokenGrid,
    chunk_size: int,
    error_clip: float | None,
) -> tuple[Tensor, Tensor, MemoryState]:
    """All chunks of the grid; every row's chunk begins at a multiple of `chunk_size`."""
    filled = begins = None
    if grid.filled is not None:
        filled = grid.filled[:, None].expand_as(slots.inner_lr).flatten(0, 1)
        first = torch.arange(0, grid.num_slots, chunk_size, device=filled.device)[:, None]
        begins = ((grid.start <= first) & (grid.end > first)).repeat_interleave(slots.inner_lr.shape[1], dim=1)
    plan = Plan(len(state.weights), chunk_size, error_clip, filled, begins)
    initial = [m.expand_as(w) for m, w in zip(initial, state.weights, strict=False)]
    tensors = [x.flatten(0, 1) for x in (*slots, *state.weights, *state.momentum, *state.anchor, *initial)]
    by_hand = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    by_hand = by_hand and not torch.compiler.is_compiling()  # a compiler makes the backward itself
    results = Sweep.apply(plan, *tensors) if by_hand else sweep(plan, tensors)
    retrieved, surprise, *after = (x.unflatten(0, slots.inner_lr.shape[:2]) for x in results)
    return retrieved, surprise.detach(), MemoryState(*Layers.of(after), state.num_seen + grid.end - grid.start)


def compile_chunks(**options) -> None:
    """Compiles what is done with a full chunk, forward and backward: `TitansPreTrainedModel.compile_memory`."""
    for work in (chunk_forward, prepare, chunk_backward):
        COMPILED[work] = torch.compile(work, dynamic=False, **options)
