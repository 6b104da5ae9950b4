"""The scan over chunks: the state at the end of one is the state at the start of the next.

For the backward, by hand or by autograd, the scan keeps the state at every `CHECKPOINT_INTERVAL`-th chunk; the others,
and everything within a chunk, are recomputed. Shapes: N batch and heads, T tokens, C tokens of a chunk; weights (N,
d_in, d_out).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .memory_chunk import CHUNK_FUNCTIONS, ChunkFunctions, ChunkIntermediates, end_of_chunk
from .memory_network import UpdateRule
from .memory_state import MemoryInputs, MemoryState, StateSizes, where_rows

CHECKPOINT_INTERVAL = 4  # chunks; docs/log.md: "States of every fourth chunk kept for the backward"


class ScanOptions(NamedTuple):
    """The options of a scan.

    chunk_starts: (number of chunks, N) bool, True where a non-empty chunk starts in this call; None for everywhere. A
    chunk that started in an earlier call keeps its anchor. Unused where the state has none.
    compiled: the functions for full chunks; None for those of `memory_chunk` as they are.
    """

    chunk_size: int
    rule: UpdateRule
    chunk_starts: Tensor | None
    compiled: ChunkFunctions | None

    def functions(self, inputs: MemoryInputs) -> ChunkFunctions:
        """Returns the functions for a chunk: compiled ones only for full chunks, whose shape is always the same."""
        full = inputs.keys.shape[1] == self.chunk_size
        return self.compiled if full and self.compiled is not None else CHUNK_FUNCTIONS


class ScanArguments(NamedTuple):
    """The tensors that a scan reads: the inputs (N, T, ...), the state before them, and one decay target per layer
    (none for 0).
    """

    inputs: MemoryInputs
    state: MemoryState
    decay_target: tuple[Tensor, ...]

    def flat(self) -> tuple[Tensor | None, ...]:
        """Returns all tensors, as an autograd.Function takes them."""
        return (*self.inputs, *self.state.flat(), *self.decay_target)

    @classmethod
    def from_flat(cls, tensors: Sequence[Tensor | None], sizes: StateSizes) -> "ScanArguments":
        """Returns the arguments of the tensors of `flat`."""
        remaining = iter(tensors)
        return cls(_next_inputs(remaining), _next_state(remaining, sizes), tuple(remaining))


class ScanOutput(NamedTuple):
    """retrieved (N, T, D), surprise (N, T), and the state after the last token."""

    retrieved: Tensor
    surprise: Tensor
    state: MemoryState


def _next_inputs(tensors: Iterator[Tensor | None]) -> MemoryInputs:
    return MemoryInputs(*islice(tensors, len(MemoryInputs._fields)))


def _next_state(tensors: Iterator[Tensor], sizes: StateSizes) -> MemoryState:
    return MemoryState.from_flat(islice(tensors, sum(sizes)), sizes)


def scan_chunks(
    options: ScanOptions, arguments: ScanArguments, checkpoints: list[MemoryState] | None = None
) -> ScanOutput:
    """Updates and reads the memory chunk after chunk. Appends the state at every `CHECKPOINT_INTERVAL`-th chunk to
    `checkpoints`.
    """
    state, retrieved, surprise = arguments.state, [], []
    for chunk, inputs in enumerate(_split_inputs(arguments.inputs, options.chunk_size)):
        state = _with_anchor(options, chunk, state)
        if checkpoints is not None and chunk % CHECKPOINT_INTERVAL == 0:
            checkpoints.append(state)
        forward = options.functions(inputs).forward
        output = forward(inputs, state, arguments.decay_target, options.rule)
        retrieved.append(output.retrieved)
        surprise.append(output.surprise)
        state = MemoryState(output.weights, output.momentum, state.anchor)
    return ScanOutput(torch.cat(retrieved, dim=1), torch.cat(surprise, dim=1), state)


def scan_chunks_differentiable(options: ScanOptions, arguments: ScanArguments) -> ScanOutput:
    """Runs `scan_chunks` with the hand-written backward."""
    # docs/log.md: "The backward by hand"
    sizes = arguments.state.sizes
    retrieved, surprise, *state = _ChunkScan.apply(options, sizes, *arguments.flat())
    return ScanOutput(retrieved, surprise, MemoryState.from_flat(state, sizes))


def scan_chunks_by_autograd(options: ScanOptions, arguments: ScanArguments) -> ScanOutput:
    """Runs `scan_chunks` with a backward by autograd: for forms of the memory whose backward is not written by hand."""
    # docs/log.md: "The residual network's backward"
    state, outputs = arguments.state, []
    groups = _split_inputs(arguments.inputs, CHECKPOINT_INTERVAL * options.chunk_size)
    starts = [None] * len(groups)
    if options.chunk_starts is not None:
        starts = options.chunk_starts.split(CHECKPOINT_INTERVAL)
    for inputs, chunk_starts in zip(groups, starts, strict=True):
        part, group = options._replace(chunk_starts=chunk_starts), ScanArguments(inputs, state, arguments.decay_target)
        outputs.append(checkpoint(scan_chunks, part, group, use_reentrant=False, preserve_rng_state=False))
        state = outputs[-1].state
    retrieved, surprise = (torch.cat([getattr(x, name) for x in outputs], dim=1) for name in ("retrieved", "surprise"))
    return ScanOutput(retrieved, surprise, state)


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options: ScanOptions, sizes: StateSizes, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        given = ScanArguments.from_flat(tensors, sizes)
        detached = ScanArguments.from_flat([None if x is None else x.detach() for x in tensors], sizes)
        checkpoints = []
        output = scan_chunks(options, detached, checkpoints)
        ctx.mark_non_differentiable(output.surprise)
        ctx.options, ctx.sizes = options, sizes
        ctx.save_for_backward(*given.inputs, *(x for state in checkpoints for x in state.flat()), *given.decay_target)
        return output.retrieved, output.surprise, *output.state.flat()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_retrieved: Tensor, _: Tensor, *grad_state: Tensor) -> tuple[Tensor | None, ...]:
        options, saved = ctx.options, iter(ctx.saved_tensors)  # read once: under checkpointing, reading recomputes
        chunks = _split_inputs(_next_inputs(saved), options.chunk_size)
        firsts = range(0, len(chunks), CHECKPOINT_INTERVAL)
        checkpoints = [_next_state(saved, ctx.sizes) for _ in firsts]
        decay_target = tuple(saved)
        grad_outputs = _split(grad_retrieved, options.chunk_size)
        grads, grad_inputs = MemoryState.from_flat(grad_state, ctx.sizes), []
        grad_target = [torch.zeros_like(x) for x in decay_target]
        with torch.autocast(grad_retrieved.device.type, enabled=False):
            for first, checkpoint in zip(reversed(firsts), reversed(checkpoints), strict=True):
                group = chunks[first : first + CHECKPOINT_INTERVAL]
                recomputed = _recompute(options, first, group, checkpoint, decay_target)
                for chunk in reversed(range(first, first + len(group))):
                    backward = options.functions(chunks[chunk]).backward
                    gradients = backward(grad_outputs[chunk], recomputed.pop(), grads.weights, grads.momentum)
                    grad_inputs.insert(0, gradients.inputs)
                    for total, gradient in zip(grad_target, gradients.decay_target, strict=True):
                        total.add_(gradient)
                    grads = _anchor_backward(options, chunk, gradients.state, grads.anchor)
        return None, None, *_join_inputs(grad_inputs), *grads.flat(), *grad_target


def _recompute(
    options: ScanOptions,
    first: int,
    group: Sequence[MemoryInputs],
    state: MemoryState,
    decay_target: Sequence[Tensor],
) -> list[ChunkIntermediates]:
    """Computes the intermediate results of consecutive chunks from the state at the start of the first."""
    chunks = []
    for chunk, inputs in enumerate(group, first):
        if chunks:
            state = _with_anchor(options, chunk, MemoryState(*end_of_chunk(chunks[-1]), state.anchor))
        intermediates = options.functions(inputs).intermediates
        chunks.append(intermediates(inputs, state, decay_target, options.rule))
    return chunks


def _split(x: Tensor, chunk_size: int) -> list[Tensor]:
    """Splits (N, T, ...) into chunks (N, C, ...), the last of which may be shorter.

    Contiguous, so that the strides do not depend on T: otherwise every length would be compiled anew.
    """
    # Not by indexing: the backward of an index is a tensor of the full size for every chunk.
    # docs/log.md: "MAC's training was quadratic in length, by indexing"
    return [part.contiguous() for part in x.split(chunk_size, dim=1)]


def _split_inputs(inputs: MemoryInputs, chunk_size: int) -> list[MemoryInputs]:
    parts = inputs.map(lambda x: _split(x, chunk_size))
    return [parts.map(itemgetter(chunk)) for chunk in range(len(parts.keys))]


def _join_inputs(chunks: Sequence[MemoryInputs]) -> MemoryInputs:
    """Concatenates the gradients of all chunks; `filled` has none."""
    return MemoryInputs(*(None if parts[0] is None else torch.cat(parts, dim=1) for parts in zip(*chunks, strict=True)))


def _where_chunk_starts(
    options: ScanOptions, chunk: int, new: Sequence[Tensor], old: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Selects `new` in the rows where the chunk starts, `old` in the others."""
    if options.chunk_starts is None:
        return tuple(new)
    return tuple(map(partial(where_rows, options.chunk_starts[chunk]), new, old))


def _with_anchor(options: ScanOptions, chunk: int, state: MemoryState) -> MemoryState:
    """Returns the state at a chunk's start: where the chunk starts, its anchor is the current weights (eq. 16)."""
    if not state.anchor:
        return state
    return replace(state, anchor=_where_chunk_starts(options, chunk, state.weights, state.anchor))


def _anchor_backward(
    options: ScanOptions, chunk: int, grads: MemoryState, grad_later_anchor: Sequence[Tensor]
) -> MemoryState:
    """Computes the backward of `_with_anchor`: the anchor's gradient, with that of later chunks, goes to the weights
    where the chunk starts, and to the previous anchor elsewhere.
    """
    if not grads.anchor:
        return grads
    grad_anchor = [x + y for x, y in zip(grads.anchor, grad_later_anchor, strict=True)]
    zeros = [torch.zeros_like(x) for x in grad_anchor]
    to_weights = _where_chunk_starts(options, chunk, grad_anchor, zeros)
    grad_weights = tuple(x + y for x, y in zip(grads.weights, to_weights, strict=True))
    return MemoryState(grad_weights, grads.momentum, _where_chunk_starts(options, chunk, zeros, grad_anchor))
