"""The update and the read of the memory, `memorize`: in chunks by the dual form, or one token by the equations.

Shapes: B batch, H heads, T tokens, D head size; weights (B, H, d_in, d_out).
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .memory_chunk import CHUNK_FUNCTIONS, ChunkFunctions
from .memory_delta_rule import single_token_delta
from .memory_network import (
    GradientFactors,
    UpdateRule,
    gradient_factors,
    read,
    single_layer_factors,
    token_surprise,
    with_last_deltas,
)
from .memory_scan import (
    ScanArguments,
    ScanOptions,
    scan_chunks,
    scan_chunks_by_autograd,
    scan_chunks_differentiable,
)
from .memory_state import MemorizeOutput, MemoryInputs, MemoryState, where_rows
from .token_grid import TokenGrid

_compiled: ChunkFunctions | None = None


def compile_chunks(**options) -> None:
    """Compiles the functions of a full chunk for the whole process: see `TitansPreTrainedModel.compile_memory`."""
    # docs/log.md: "Compiling the chunk: larger chunks gain"
    global _compiled
    _compiled = ChunkFunctions(*(torch.compile(fn, dynamic=False, **options) for fn in CHUNK_FUNCTIONS))


def memorize(
    inputs: MemoryInputs,
    state: MemoryState,
    rule: UpdateRule,
    *,
    chunk_size: int,
    decay_target: tuple[Tensor, ...] = (),
    grid: TokenGrid | None = None,
) -> MemorizeOutput:
    """Updates the memory with T tokens and reads each token's query right after its own update (eq. 13-16).

    A single token per row is computed by the equations, anything else in chunks.

    Args:
        inputs: of the T tokens, in any floating dtype; all is computed in the state's dtype.
        state: the state before the first of these tokens; rows may be at different positions in their chunk.
        rule: form of the memory network and of its update.
        chunk_size: number of tokens whose gradients are taken at the same weights.
        decay_target: weights (H, d_in, d_out) of each layer that forgetting decays to; empty for 0, as in eq. 13.
        grid: where given, the tokens are already on its slots (T = grid.num_slots), of a grid for a multiple of
            `chunk_size`. What is returned is undefined at empty slots.

    Raises ValueError for a rule that cannot be, for `inputs.filled`, which the grid has, and for a state without the
    anchor that the rule needs, or with a momentum where the inputs have no `log_momentum_decay` and the other way
    round.
    """
    rule.check()
    _check_inputs(inputs, state)
    dtype = state.weights[0].dtype
    inputs = inputs.map(lambda x: x.to(dtype))
    if not rule.needs_anchor(len(state.weights)):
        state = replace(state, anchor=())
    elif not state.anchor:
        raise ValueError(f"`state` must have an anchor for {rule}, but has none: it is of another memory.")
    num_tokens = inputs.keys.shape[2]
    if num_tokens == 1 and (grid is None or grid.is_single_token):
        return _memorize_token(inputs, state, decay_target, chunk_size, rule)
    if grid is not None:
        return _memorize_grid(inputs, state, decay_target, grid, chunk_size, rule)
    grid = TokenGrid.build(state.num_seen, num_tokens, chunk_size)
    slots = inputs.map(lambda x: grid.scatter(x.transpose(1, 2)).transpose(1, 2))
    output = _memorize_grid(slots, state, decay_target, grid, chunk_size, rule)
    retrieved, surprise = (grid.gather(x.transpose(1, 2)).transpose(1, 2) for x in (output.retrieved, output.surprise))
    return MemorizeOutput(retrieved, surprise, output.state)


def _check_inputs(inputs: MemoryInputs, state: MemoryState) -> None:
    """Raises ValueError for a mask of slots, and for a momentum without its gate or the other way round."""
    if inputs.filled is not None:
        raise ValueError("`inputs.filled` must be None: `grid` says which slots have a token.")
    if bool(state.momentum) != (inputs.log_momentum_decay is not None):
        raise ValueError(
            f"`state` has {len(state.momentum)} tensors of momentum, but `inputs.log_momentum_decay` is "
            f"{'None' if inputs.log_momentum_decay is None else 'given'}: both or none."
        )


def read_constant_memory(inputs: MemoryInputs, state: MemoryState, rule: UpdateRule, grid: TokenGrid) -> MemorizeOutput:
    """Computes `memorize` for step sizes of 0 and no forgetting: reads without an update."""
    inputs = inputs.map(lambda x: x.to(state.weights[0].dtype))
    anchor = state.weights if rule.needs_anchor(len(state.weights)) else ()
    with torch.no_grad():
        surprise = token_surprise(_factors_at(inputs, anchor, state.weights, rule))
    num_seen = state.num_seen + grid.row_ends - grid.row_starts
    after = MemoryState(state.weights, tuple(map(torch.zeros_like, state.momentum)), anchor, num_seen)
    return MemorizeOutput(read(state.weights, inputs.queries, rule.network), surprise, after)


def _factors_at(
    inputs: MemoryInputs, anchor: tuple[Tensor, ...], weights: tuple[Tensor, ...], rule: UpdateRule
) -> GradientFactors:
    """Computes the gradient of the memory's loss at the anchor A, grad l(A; k, v) (eq. 12, 16), by the delta rule in
    the last layer at the weights before the token, grad l(M_{t-1}; k, v) (eq. 10); without an anchor (), there only.
    """
    if not anchor:
        return single_layer_factors(inputs.keys, single_token_delta(inputs.keys, inputs.values, weights[0]))
    factors = gradient_factors(inputs.keys, inputs.values, anchor, rule)
    if rule.delta_rule:
        factors = with_last_deltas(factors, single_token_delta(factors.inputs[-1], inputs.values, weights[-1]))
    return factors


def _memorize_token(
    inputs: MemoryInputs,
    state: MemoryState,
    decay_target: tuple[Tensor, ...],
    chunk_size: int,
    rule: UpdateRule,
) -> MemorizeOutput:
    """Updates with one token per row by eq. 13-15, without a branch on data."""
    # In place on new tensors: a step takes as long as reading and writing the state.
    # docs/log.md: "Fewer passes over the state in a decoding step"
    anchor = ()
    if state.anchor:
        at_chunk_start = partial(where_rows, state.num_seen % chunk_size == 0)
        anchor = tuple(map(at_chunk_start, state.weights, state.anchor))
    factors = _factors_at(inputs, anchor, state.weights, rule)
    theta, retain = (_of_layers(x, inputs, len(state.weights)) for x in (inputs.inner_lr, inputs.log_retain.exp()))
    # (1 - alpha_t) M_{t-1} + alpha_t M_0 (eq. 13)
    if decay_target:
        weights = tuple(map(torch.lerp, decay_target, state.weights, retain))
    else:
        weights = tuple(x * w for x, w in zip(retain, state.weights, strict=True))
    # S_t = eta_t S_{t-1} - theta_t h (x) delta (eq. 10, 14)
    gradients, momentum = zip(theta, factors.inputs, factors.deltas, strict=True), ()
    if state.momentum:
        eta = _of_layers(inputs.log_momentum_decay.exp(), inputs, len(weights))
        momentum = tuple(eta * s for eta, s in zip(eta, state.momentum, strict=True))
    for step, (theta, h, delta) in zip(momentum or weights, gradients, strict=True):
        step.addcmul_(h.mT, theta * delta, value=-1)
    if momentum:
        for w, s in zip(weights, momentum, strict=True):
            w.add_(s)  # M_t = ... + S_t: eq. 13
    state = MemoryState(weights, momentum, anchor, state.num_seen + 1)
    retrieved = read(weights, inputs.queries, rule.network)  # y_t: eq. 15
    return MemorizeOutput(retrieved, token_surprise(factors).detach(), state)


def _of_layers(gate: Tensor, inputs: MemoryInputs, depth: int) -> tuple[Tensor, ...]:
    """Returns a gate of one token for each layer of the memory network, (B, H, 1, 1)."""
    return gate.split(1, dim=-1) if inputs.has_gates_per_layer else (gate[..., None],) * depth


def _memorize_grid(
    slots: MemoryInputs,
    state: MemoryState,
    decay_target: tuple[Tensor, ...],
    grid: TokenGrid,
    chunk_size: int,
    rule: UpdateRule,
) -> MemorizeOutput:
    """Updates with the tokens on the slots of a grid; chunks of every row start at multiples of `chunk_size`."""
    rows_and_heads = slots.inner_lr.shape[:2]
    chunk_starts, filled = None, grid.filled
    if filled is not None:
        slots = slots._replace(filled=filled[:, None].expand(*rows_and_heads, -1))
    if filled is not None and state.anchor:
        first = torch.arange(0, grid.num_slots, chunk_size, device=filled.device)[:, None]
        starts = (grid.row_starts <= first) & (grid.row_ends > first)
        chunk_starts = starts.repeat_interleave(rows_and_heads[1], dim=1)
    decay_target = [m.expand_as(w) for m, w in zip(decay_target, state.weights, strict=False)]
    arguments = ScanArguments(
        slots.map(lambda x: x.flatten(0, 1)),
        MemoryState.from_flat([x.flatten(0, 1) for x in state.flat()], state.sizes),
        tuple(x.flatten(0, 1) for x in decay_target),
    )
    by_hand = rule.network == "mlp" and not slots.has_gates_per_layer  # the backward
    compiling = torch.compiler.is_compiling()  # then the compiler makes the backward
    options = ScanOptions(chunk_size, rule, chunk_starts, _compiled if by_hand and not compiling else None)
    scan = scan_chunks
    if not compiling and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arguments.flat()):
        scan = scan_chunks_differentiable if by_hand else scan_chunks_by_autograd
    output = scan(options, arguments)
    after = MemoryState.from_flat([x.unflatten(0, rows_and_heads) for x in output.state.flat()], state.sizes)
    return MemorizeOutput(
        output.retrieved.unflatten(0, rows_and_heads),
        output.surprise.unflatten(0, rows_and_heads).detach(),
        replace(after, num_seen=state.num_seen + grid.row_ends - grid.row_starts),
    )
