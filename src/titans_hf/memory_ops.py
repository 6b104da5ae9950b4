"""The update and the read of the memory, `memorize`: in chunks by the dual form, or one token by the equations.

The scan over groups of chunks: the state at the end of a group is the state at the start of the next group. For the
backward by hand, the scan keeps the states at the starts of all chunks where they are small (`KEPT_BYTES`), otherwise,
and for autograd, the state at the start of each group. Everything else within a group is computed again.

Shapes: B batch, H heads, T tokens, D head size; weights (B, H, d_in, d_out). Within the scan: N batch and heads, T
tokens, C tokens of a chunk; weights (N, d_in, d_out).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

from .memory_chunk import GroupFunctions, GroupStates, group_forward, unstack, with_anchor
from .memory_chunk_backward import group_backward, with_anchor_backward
from .memory_graphs import RECORDINGS, Recorded
from .memory_network import UpdateRule, gradient_factors, layer_inputs, read, token_surprise
from .memory_state import (
    Gates,
    MemorizeOutput,
    MemoryInputs,
    MemoryState,
    map_tensors,
    tensors_of,
    with_tensors,
    zero_of,
)
from .token_grid import TokenGrid

# Chunks of a group, whose products are computed together: on a CPU more of them leave the cache, on a GPU every group
# costs the host some launches more. A product (C, C) of all chunks, rows and heads of a group takes at most
# `GROUP_BYTES` if the group has more than four chunks.
GROUP_SIZES = {"cpu": 4, "cuda": 32}
GROUP_BYTES = 1 << 26
# The states of all chunks are kept for the backward where they take at most this many times the bytes of the tokens'
# queries, keys and values; elsewhere that of each group's start, from which the others are computed again.
KEPT_BYTES = 4

logger = logging.get_logger(f"transformers.{__name__}")  # `transformers.logging.set_verbosity_info()` shows its lines

LARGEST_KEY = 256  # of fla's chunk kernels
SMALLEST_LOG_RETAIN = -30.0  # fla returns nan for -inf; exp(-30) is 1e-13


def _factors_at(
    inputs: MemoryInputs, anchor: tuple[Tensor, ...], weights: tuple[Tensor, ...], rule: UpdateRule
) -> tuple[list[Tensor], list[Tensor]]:
    """Computes the gradient of the memory's loss at the anchor A, grad l(A; k, v) (eq. 12, 16), as inputs and deltas of
    each layer. With the delta rule, the last layer's is taken at the weights before the token, grad l(M_{t-1}; k, v)
    (eq. 10); without an anchor (), only this one is computed.
    """
    h, deltas = [inputs.keys], []
    if anchor:
        factors = gradient_factors(inputs.keys, inputs.values, anchor, rule)
        h, deltas = list(factors.inputs), list(factors.deltas)
    if rule.delta_rule:
        # 2 / max(1, |h|^2) (h M - v)
        squares = torch.linalg.vecdot(h[-1], h[-1]).clamp(min=1.0)[..., None]
        deltas[len(weights) - 1 :] = [(h[-1] @ weights[-1]).sub_(inputs.values).mul_(2).div_(squares)]
    return h, deltas


def token_forward(
    inputs: MemoryInputs,
    state: MemoryState,
    decay_target: Sequence[Tensor],
    starts: Tensor | None,
    rule: UpdateRule,
    needs_surprise: bool,
) -> MemorizeOutput:
    """Updates and reads the memory with one token per row by eq. 13-15, without a branch on data.

    starts: (B,) bool, True in rows whose chunk starts with this token; None without an anchor.
    """
    # In place on new tensors: a step takes as long as reading and writing the state.
    anchor = with_anchor(state, starts).anchor
    h, deltas = _factors_at(inputs, anchor, state.weights, rule)
    theta, retain = (_of_layers(x, inputs, len(state.weights)) for x in (inputs.inner_lr, inputs.log_retain.exp()))
    # (1 - alpha_t) M_{t-1} + alpha_t M_0 (eq. 13)
    if decay_target:
        weights = tuple(map(torch.lerp, decay_target, state.weights, retain))
    else:
        weights = tuple(x * w for x, w in zip(retain, state.weights, strict=True))
    # S_t = eta_t S_{t-1} - theta_t h (x) delta (eq. 10, 14)
    gradients, momentum = zip(theta, h, deltas, strict=True), ()
    if state.momentum:
        eta = _of_layers(inputs.log_momentum_decay.exp(), inputs, len(weights))
        momentum = tuple(eta * s for eta, s in zip(eta, state.momentum, strict=True))
    for step, (theta, x, delta) in zip(momentum or weights, gradients, strict=True):
        step.addcmul_(x.mT, theta * delta, value=-1)
    if momentum:
        for w, s in zip(weights, momentum, strict=True):
            w.add_(s)  # M_t = ... + S_t: eq. 13
    retrieved = read(weights, inputs.queries, rule.network)  # y_t: eq. 15
    surprise = token_surprise(h, deltas, rule) if needs_surprise else None
    return MemorizeOutput(retrieved, surprise, MemoryState(weights, momentum, anchor))


def _of_layers(gate: Tensor, inputs: MemoryInputs, depth: int) -> tuple[Tensor, ...]:
    """Returns a gate of one token for each layer of the memory network, (B, H, 1, 1)."""
    return gate.split(1, dim=-1) if inputs.has_gates_per_layer else (gate[..., None],) * depth


GROUP_FUNCTIONS = GroupFunctions(group_forward, group_backward, token_forward)
GRAPHS = GroupFunctions(*(Recorded(function, n) for function, n in zip(GROUP_FUNCTIONS, (4, 6, 4), strict=True)))
_compiled: GroupFunctions | None = None


def compile_chunks(**options) -> None:
    """Compiles the functions of full chunks for the whole process: see `TitansPreTrainedModel.compile_memory`."""
    global _compiled
    compiled = (torch.compile(fn, dynamic=False, **options) for fn in (group_forward, group_backward))
    _compiled = GroupFunctions(*compiled, token_forward)


# The inputs of a scan, the state before them, and one decay target per layer (none for 0).
ScanArguments = tuple[MemoryInputs, MemoryState, tuple[Tensor, ...]]
Way = Literal["features", "read", "token", "kernel", "chunks", "chunks by hand", "chunks by autograd"]
# A group of consecutive chunks of equal size: their number, their tokens, the functions that compute them, and (number
# of chunks, N) bool, True where a non-empty chunk starts in this call; None for everywhere. A chunk that started in an
# earlier call keeps its anchor.
Group = tuple[int, int, GroupFunctions, Tensor | None]


def choose_way(arguments: ScanArguments, rule: UpdateRule, grid: TokenGrid, kernel: str, updates: bool) -> Way:
    """Returns how `memorize_on_grid` computes its results: as a linear memory of features, without an update, by the
    equations of one token, by fla's kernel, or in chunks. Chunks have no backward, or a compiler's; a backward by hand;
    or autograd's, which computes each group again.
    """
    inputs, state, _ = arguments
    if rule.fixes_hidden_layers and len(state.weights) > 1:
        return "features"
    if not updates:
        return "read"
    if grid.is_single_token:
        return "token"
    if not grid.needs_surprise and choose_kernel(kernel, inputs, state, rule) is not None:
        return "kernel"
    needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors_of(arguments))
    if torch.compiler.is_compiling() or not needs_gradients:
        return "chunks"
    return "chunks by autograd" if rule.network == "residual" or inputs.has_gates_per_layer else "chunks by hand"


def choose_functions(way: Way, device: torch.device, kernel: str) -> GroupFunctions:
    """Returns the functions of full chunks and of a token: as they are, compiled, or as graphs."""
    if torch.compiler.is_compiling() or way == "chunks by autograd":
        return GROUP_FUNCTIONS
    if _compiled is not None:
        return _compiled
    return GRAPHS if kernel == "auto" and device.type in RECORDINGS else GROUP_FUNCTIONS


def groups_of_chunks(
    inputs: MemoryInputs, chunk_size: int, chunk_starts: Tensor | None, functions: GroupFunctions
) -> list[Group]:
    """Returns the groups of chunks in which T tokens are read: groups of equal size, a group of the remaining full
    chunks, and the last chunk if it is shorter.

    functions: for groups of full chunks. So that few shapes are compiled, a compiled group of the remaining chunks has
    one of them; so that few are recorded, one that is recorded has a power of two.
    """
    size, is_compiled = GROUP_SIZES.get(inputs.keys.device.type, 4), functions is _compiled
    num_chunks, rest = inputs.keys.shape[1] // chunk_size, inputs.keys.shape[1] % chunk_size
    if size > 4 and not torch.compiler.is_compiling():
        bytes_of_chunk = len(inputs.keys) * chunk_size**2 * inputs.keys.element_size()
        size = min(size, max(4, GROUP_BYTES // max(1, bytes_of_chunk)))
    left, numbers = num_chunks % size, [size] * (num_chunks // size)
    if is_compiled:
        numbers += [1] * left
    elif functions is GRAPHS:
        numbers += [1 << i for i in reversed(range(left.bit_length())) if left >> i & 1]
    elif left:
        numbers.append(left)
    groups = [(number, chunk_size, functions) for number in numbers]
    groups += [(1, rest, GROUP_FUNCTIONS if is_compiled else functions)] if rest else []
    starts = [None] * len(groups)
    if chunk_starts is not None:
        starts = chunk_starts.split([number for number, *_ in groups])
    return [(*group, of_group) for group, of_group in zip(groups, starts, strict=True)]


def memorize(
    inputs: MemoryInputs,
    state: MemoryState,
    rule: UpdateRule,
    *,
    chunk_size: int,
    decay_target: tuple[Tensor, ...] = (),
) -> MemorizeOutput:
    """Updates the memory with T tokens and reads each token's query right after its own update (eq. 13-16).

    A single token per row is computed by the equations, anything else in chunks.

    Args:
        inputs: of the T tokens, in any floating dtype; all is computed in the state's dtype.
        state: the state before the first of these tokens; rows may be at different positions in their chunk.
        rule: form of the memory network and of its update.
        chunk_size: number of tokens whose gradients are taken at the same weights.
        decay_target: weights (H, d_in, d_out) of each layer that forgetting decays to; empty for 0, as in eq. 13.

    Raises ValueError for an impossible rule, for `inputs.filled`, for a state without the anchor that the rule needs,
    and if only one of the state's momentum and `inputs.log_momentum_decay` is given.
    """
    grid = replace(TokenGrid.build(state.num_seen, inputs.keys.shape[2], chunk_size), needs_surprise=True)
    dtype = state.weights[0].dtype
    slots = inputs.map(lambda x: grid.scatter(x.to(dtype).transpose(1, 2)).transpose(1, 2))
    output = memorize_on_grid(slots, state, rule, grid, chunk_size=chunk_size, decay_target=decay_target)
    retrieved, surprise = (grid.gather(x.transpose(1, 2)).transpose(1, 2) for x in (output.retrieved, output.surprise))
    return MemorizeOutput(retrieved, surprise, output.state)


def memorize_on_grid(
    inputs: MemoryInputs,
    state: MemoryState,
    rule: UpdateRule,
    grid: TokenGrid,
    *,
    chunk_size: int,
    decay_target: tuple[Tensor, ...] = (),
    kernel: str = "torch",
    updates: bool = True,
) -> MemorizeOutput:
    """Computes `memorize` for tokens on the slots of a grid whose size is a multiple of `chunk_size`, in the state's
    dtype. The results at empty slots are undefined. The surprise may be None unless the grid asks for it.

    kernel: a value of `TitansConfig.memory_kernel`. fla's kernel reads only several tokens without surprise. With
        "auto", PyTorch's functions on CUDA are replayed as graphs (`memory_graphs`).
    updates: False to read the memory only.
    """
    _check(inputs, state, rule)
    if not rule.needs_anchor(len(state.weights)):
        state = replace(state, anchor=())
    way, device = choose_way((inputs, state, decay_target), rule, grid, kernel, updates), inputs.keys.device
    functions, constants = choose_functions(way, device, kernel), (rule, grid.needs_surprise)
    match way:
        case "features":
            options = dict(decay_target=decay_target[-1:], chunk_size=chunk_size, kernel=kernel, updates=updates)
            return _memorize_features(inputs, state, rule, grid, **options)
        case "read":
            return read_constant_memory(inputs, state, rule, chunk_size, grid)
        case "kernel":
            return memorize_by_kernel(choose_kernel(kernel, inputs, state, rule), inputs, state, grid, decay_target)
        case "token":
            starts = grid.once("starts", lambda: state.num_seen % chunk_size == 0, device) if state.anchor else None
            output = functions.token(inputs, replace(state, num_seen=None), decay_target, starts, *constants)
        case "chunks" | "chunks by hand" | "chunks by autograd":
            arguments, chunk_starts = _scan_arguments(inputs, state, decay_target, grid, chunk_size)
            groups = groups_of_chunks(arguments[0], chunk_size, chunk_starts, functions)
            scan = ChunkScan.apply if way == "chunks by hand" else ChunkScan.forward
            results = scan(groups, way, [], *constants, _form(arguments), *tensors_of(arguments))
            results = [None if x is None else x.unflatten(0, inputs.inner_lr.shape[:2]) for x in results]
            output = MemorizeOutput(*results[:2], with_tensors(arguments[1], results[2:]))
    num_seen = state.num_seen + 1 if grid.is_single_token else state.num_seen + grid.row_ends - grid.row_starts
    after = replace(output.state, num_seen=num_seen)
    return MemorizeOutput(output.retrieved, None if output.surprise is None else output.surprise.detach(), after)


def _memorize_features(
    inputs: MemoryInputs, state: MemoryState, rule: UpdateRule, grid: TokenGrid, **options
) -> MemorizeOutput:
    """Computes `memorize_on_grid` with constant hidden layers, as a linear memory of their outputs."""
    layers = [partial(torch.matmul, other=weight) for weight in state.weights]
    queries, keys = (layer_inputs(x, layers)[0][-1] for x in (inputs.queries, inputs.keys))
    inputs = inputs._replace(queries=queries, keys=keys)
    if inputs.has_gates_per_layer:
        of_last = {name: getattr(inputs, name) for name in Gates._fields}
        inputs = inputs._replace(**{name: None if x is None else x[..., -1] for name, x in of_last.items()})
    last = MemoryState(state.weights[-1:], state.momentum[-1:], (), state.num_seen)
    output = memorize_on_grid(inputs, last, rule, grid, **options)
    weights = (*state.weights[:-1], *output.state.weights)
    return output._replace(
        state=MemoryState(weights, (*state.momentum[:-1], *output.state.momentum), (), output.state.num_seen)
    )


def _scan_arguments(
    slots: MemoryInputs, state: MemoryState, decay_target: tuple[Tensor, ...], grid: TokenGrid, chunk_size: int
) -> tuple[ScanArguments, Tensor | None]:
    """Returns the arguments of a scan over the slots of a grid, and its `chunk_starts`; chunks of every row start at
    multiples of `chunk_size`.
    """
    rows_and_heads = slots.inner_lr.shape[:2]
    chunk_starts, filled = None, grid.filled
    if filled is not None:
        slots = slots._replace(filled=filled[:, None].expand(*rows_and_heads, -1))
    if filled is not None and state.anchor:
        first = torch.arange(0, grid.num_slots, chunk_size, device=filled.device)[:, None]
        starts = (grid.row_starts <= first) & (grid.row_ends > first)
        chunk_starts = starts.repeat_interleave(rows_and_heads[1], dim=1)
    decay_target = tuple(m.expand_as(w) for m, w in zip(decay_target, state.weights, strict=False))
    arguments = (slots, replace(state, num_seen=None), decay_target)
    return map_tensors(lambda x: x.flatten(0, 1), arguments), chunk_starts


def _check(inputs: MemoryInputs, state: MemoryState, rule: UpdateRule) -> None:
    """Raises ValueError for inputs, a state and a rule that `memorize` does not take."""
    rule.check()
    if inputs.filled is not None:
        raise ValueError("`inputs.filled` must be None: `grid` says which slots have a token.")
    if bool(state.momentum) != (inputs.log_momentum_decay is not None):
        raise ValueError(
            f"`state` has {len(state.momentum)} tensors of momentum, but `inputs.log_momentum_decay` is "
            f"{'None' if inputs.log_momentum_decay is None else 'given'}: both or none."
        )
    if rule.needs_anchor(len(state.weights)) and not state.anchor:
        raise ValueError(f"`state` must have an anchor for {rule}, but has none: it belongs to another memory.")


def read_constant_memory(
    inputs: MemoryInputs, state: MemoryState, rule: UpdateRule, chunk_size: int, grid: TokenGrid
) -> MemorizeOutput:
    """Reads each token's query without an update: weights and momentum do not change, and the tokens are counted. The
    surprise is measured at these weights.
    """
    inputs = inputs.map(lambda x: x.to(state.weights[0].dtype))
    after, num_tokens = state, grid.row_ends - grid.row_starts
    if state.anchor:
        after = with_anchor(state, -state.num_seen % chunk_size < num_tokens)  # one that began before keeps its anchor
    with torch.no_grad():
        factors = _factors_at(inputs, state.weights if state.anchor else (), state.weights, rule)
        surprise = token_surprise(*factors, rule)
    after = replace(after, num_seen=state.num_seen + num_tokens)
    retrieved = read(state.weights, inputs.queries, rule.network)
    # DistributedDataParallel waits for a gradient of every parameter, the gates' included.
    for gate in (inputs.inner_lr, inputs.log_momentum_decay, inputs.log_retain):
        retrieved = retrieved if gate is None else retrieved + zero_of(gate)
    return MemorizeOutput(retrieved, surprise, after)


def _form(tree: Any) -> Any:
    """Returns a tree of the same form that holds no memory."""
    nothing = torch.empty(0)
    return map_tensors(lambda _: nothing, tree)


class ChunkScan(torch.autograd.Function):
    """The scan over groups of chunks, with its backward by hand; `forward` alone has none, or autograd's."""

    @staticmethod
    def forward(
        groups: Sequence[Group],
        way: Way,
        kept: list[tuple[MemoryInputs, MemoryState | GroupStates]],
        rule: UpdateRule,
        needs_surprise: bool,
        form: ScanArguments,
        *tensors: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Updates and reads the memory, group of chunks after group, with the arguments of a scan as their form and
        their tensors. Returns the retrieved values, the surprise (None unless it is needed), and the tensors of the
        state. For a backward by hand, appends to `kept` what that of each group starts with: its inputs, and the states
        at the starts of its chunks, or at its own start.
        """
        by_hand, recomputes = (way == x for x in ("chunks by hand", "chunks by autograd"))
        tensors = map(Tensor.detach, tensors) if by_hand else tensors
        (inputs, state, decay_target), retrieved, surprise = with_tensors(form, tensors), [], []
        of_states = sum(x.numel() for x in (*state.weights, *state.momentum)) * inputs.keys.shape[1] / groups[0][1]
        keeps_all = of_states <= KEPT_BYTES * 3 * inputs.keys.numel()
        parts = zip(*(_split(x, groups) for x in tensors_of(inputs)), strict=True)
        for (num_chunks, _, functions, starts), part in zip(groups, parts, strict=True):
            tokens = with_tensors(inputs, part)
            state = with_anchor(state, None if starts is None else starts[0])
            forward = functions.forward
            if recomputes:
                forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
            output, states = forward(tokens, state, decay_target, starts, rule, needs_surprise)
            if by_hand:
                kept.append((tokens, states if keeps_all else state))
            retrieved += unstack(output.retrieved, num_chunks)
            surprise += unstack(output.surprise, num_chunks)
            state = output.state
        return _join(retrieved), _join(surprise) if needs_surprise else None, *tensors_of(state)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        ctx.groups, _, kept, ctx.rule, _, form, *tensors = inputs
        _, state, decay_target = with_tensors(form, tensors)
        if output[1] is not None:
            ctx.mark_non_differentiable(output[1])
        saved = (tuple(kept), decay_target)
        ctx.form, ctx.of_state = _form(saved), map_tensors(partial(torch.empty_like, device="meta"), state)
        ctx.save_for_backward(*tensors_of(saved))
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_retrieved: Tensor | None, _: None, *grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: under checkpointing, reading `saved_tensors` recomputes them.
        # Detached, and the gradients contiguous, so that a compiled function fits every call.
        kept, decay_target = with_tensors(ctx.form, map(Tensor.detach, ctx.saved_tensors))
        groups, (inputs, _), grad_inputs, grad_target = ctx.groups, kept[0], [], None
        zeros = tuple(torch.zeros_like(x, device=inputs.keys.device) for x in ctx.of_state.weights)
        parts = zip(grad_state, cycle(zeros), strict=False)  # weights, momentum and anchor have equal shapes
        grads = with_tensors(ctx.of_state, (zero if x is None else x.contiguous() for x, zero in parts))
        if grad_retrieved is None:
            grad_outputs = [torch.zeros_like(tokens.values) for tokens, _ in kept]
        else:
            grad_outputs = _split(grad_retrieved, groups)
        with torch.autocast(inputs.keys.device.type, enabled=False):
            for (num_chunks, _, functions, starts), (tokens, start) in zip(groups[::-1], kept[::-1], strict=True):
                grad_output = grad_outputs.pop().flatten(0, 1)
                arguments = (grad_output, tokens, start, decay_target, starts, grads, ctx.rule)
                of_inputs, of_state, of_target = functions.backward(*arguments)
                grad_inputs = unstack(of_inputs, num_chunks) + grad_inputs
                grad_target = of_target if grad_target is None else list(map(torch.add, grad_target, of_target))
                grads = with_anchor_backward(of_state, None if starts is None else starts[0])
                if ctx.of_state.anchor and not grads.anchor:
                    grads = replace(grads, anchor=zeros)
        joined = zip(inputs, zip(*grad_inputs, strict=True), strict=True)
        joined = [None if parts[0] is None else _join(parts) for x, parts in joined if x is not None]
        return *(None,) * 6, *joined, *tensors_of(grads), *grad_target


def _split(x: Tensor, groups: Sequence[Group]) -> list[Tensor]:
    """Splits (N, T, ...) into the chunks of each group (P, N, C, ...).

    They are contiguous, so that their strides do not depend on T: a compiled function then fits every length.
    """
    # Not by indexing: the backward of an index is a tensor of the full size for every chunk, which is quadratic.
    sizes = [(num_chunks, chunk_size) for num_chunks, chunk_size, *_ in groups]
    parts = x.split([num_chunks * chunk_size for num_chunks, chunk_size in sizes], dim=1)
    return [part.unflatten(1, size).transpose(0, 1).contiguous() for part, size in zip(parts, sizes, strict=True)]


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Joins the tokens of consecutive chunks (N, C, ...): (N, T, ...)."""
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def choose_kernel(
    requested: str, inputs: MemoryInputs, state: MemoryState, rule: UpdateRule
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Returns fla's `chunk_comba` if it is to compute an update, None if PyTorch is; logs the choice and its reason
    once.

    requested: `TitansConfig.memory_kernel`. "auto" takes the kernel where it can compute the update, but not in a
    compiled model, whose graph it would break.

    Raises ValueError for "fla" if the kernel cannot compute the update, naming every misfit.
    """
    if requested == "torch" or (requested == "auto" and torch.compiler.is_compiling()):
        return None
    misfits = _misfits(inputs, state, rule)
    # fla is imported on a GPU only: with fla installed, nothing changes on a CPU.
    kernel, failure = (None, None) if misfits else _import_chunk_comba()
    if kernel is not None:
        logger.info_once("The memory is updated by fla's chunk_comba.")
        return kernel
    reason = "; ".join(misfits) or f"{failure}. The kernel needs pip install 'titans_hf[gpu]'"
    if requested == "fla":
        raise ValueError(f"`memory_kernel` must be 'auto' or 'torch' here, but is 'fla': {reason}.")
    log_once = logger.info_once if misfits else logger.warning_once
    log_once(f"The memory is updated by PyTorch, not by fla's kernel: {reason}.")
    return None


def _misfits(inputs: MemoryInputs, state: MemoryState, rule: UpdateRule) -> list[str]:
    """Returns the reasons why `chunk_comba` cannot compute an update; none if it can."""
    weights, key_size = state.weights[0], inputs.keys.shape[-1]
    misfits = [
        weights.device.type != "cuda" and f"the memory is on the device {weights.device.type!r}, not 'cuda'",
        weights.dtype != torch.float32 and f"the memory is in {weights.dtype}, not torch.float32",
        len(state.weights) != 1 and f"the memory has {len(state.weights)} layers, not 1",
        bool(state.momentum) and "the memory has momentum",
        not rule.delta_rule and "the update rule is 'chunk', not 'delta'",
        key_size > LARGEST_KEY and f"the keys have {key_size} entries, more than {LARGEST_KEY}",
    ]
    return [reason for reason in misfits if reason]


@cache
def _import_chunk_comba() -> tuple[Callable[..., tuple[Tensor, Tensor]] | None, str | None]:
    """Returns fla's `chunk_comba`, or None and why it cannot be imported."""
    try:
        from fla.ops.comba import chunk_comba
    except Exception as error:  # an fla that does not fit torch or Triton can raise any error
        return None, f"fla cannot be imported ({error})"
    return chunk_comba, None


def memorize_by_kernel(
    chunk_comba: Callable[..., tuple[Tensor, Tensor]],
    inputs: MemoryInputs,
    state: MemoryState,
    grid: TokenGrid,
    decay_target: tuple[Tensor, ...] = (),
) -> MemorizeOutput:
    """Computes `memorize` of a linear memory with the delta rule by `chunk_comba`, for tokens on the slots of a grid.

    Of S = M - M_0, with v' = v - M_0 k and b = 2 theta / max(1, |k|^2):

        S_t = (1 - alpha_t) S_{t-1} + b_t (v'_t - S_{t-1} k_t) k_t^T    y_t = (S_t + M_0) q_t    (eq. 10, 13, 15)

    The surprise of the output is None.
    """
    inputs, (weights,) = inputs.map(lambda x: x.to(state.weights[0].dtype)), state.weights
    queries, keys, values = inputs.queries, inputs.keys, inputs.values
    # With gates per layer, (R, H, G, 1)
    inner_lr, log_retain = (x.reshape(keys.shape[:3]) for x in (inputs.inner_lr, inputs.log_retain))
    beta = 2 * inner_lr / keys.square().sum(-1).clamp(min=1.0)
    g = log_retain.clamp(min=SMALLEST_LOG_RETAIN)
    if (filled := grid.filled) is not None:  # an empty slot writes nothing and forgets nothing
        beta, g = (x.masked_fill(~filled[:, None], 0.0) for x in (beta, g))
    target = decay_target[0] if decay_target else None  # M_0 (H, D, D)
    if target is not None:
        values, weights = values - keys @ target, weights - target  # (G, D) @ (D, D)
    q, k, v, g, beta = (x.transpose(1, 2) for x in (queries, keys, values, g, beta))  # (R, G, H, ...)
    retrieved, weights = chunk_comba(
        q, k, v, p=k, g=g, beta=beta, scale=1.0, initial_state=weights, output_final_state=True
    )
    retrieved = retrieved.transpose(1, 2)
    if target is not None:
        retrieved, weights = retrieved + queries @ target, weights + target  # (G, D) @ (D, D)
    num_seen = state.num_seen + grid.row_ends - grid.row_starts
    return MemorizeOutput(retrieved, None, MemoryState((weights,), (), (), num_seen))
