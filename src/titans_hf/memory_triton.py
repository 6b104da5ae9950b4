"""The memory by Triton on a GPU: the chain of chunks, and the step of one token.

Within a group, only the state goes from chunk to chunk, and in the backward its gradient (`memory_chunk`). Two kernels
compute the states at all chunks' starts, and the gradients at all chunks' ends, one program per row and head, in one
launch each. Everything else of a group follows from them for all chunks at once, by the functions of `memory_chunk` in
PyTorch, as if the group were one chunk of P * N rows.

A state is as large as a multiprocessor's registers and shared memory together. So both kernels keep it in global
memory, where the next chunk finds it in the second-level cache, and pass over it in tiles: `BLOCK` hidden units at a
time. `tl.debug_barrier` stands before a program reads the writes of its other threads. No loop is pipelined
(`num_stages=1`): Triton would load tiles of the next chunk before this chunk has written them.

The step of one token is a kernel of its own, without gradients: a program has one layer of its row and head's state in
registers at a time, and where it reads a tensor a second time, a cache has it.

On a GPU a memory of one layer is exact. A memory of two layers is exact in Triton's interpreter. On a GPU it stops with
an illegal access (docs/speed.md); `memory_ops.KERNEL_LAYERS` refuses it.

Shapes: N rows and heads, P chunks, C tokens of a chunk, D head size, F hidden size (D in a memory of one layer). The
last layer is (F, D), the hidden layer (D, F); a chunk is at `slot` p * N + n of a group's tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from .memory_chunk import (
    ChunkLayer,
    EarlierGates,
    EndGates,
    GroupFunctions,
    GroupIntermediates,
    group_forward,
    group_intermediates,
)
from .memory_chunk_backward import group_backward
from .memory_network import FactorsDerivatives, TokenNorms, UpdateRule
from .memory_state import MemorizeOutput, MemoryInputs, MemoryState

try:
    import triton
    import triton.language as tl
except ImportError:  # then `memory_kernel` says so; a model's folder on the Hub has this file wherever it is loaded
    triton = None


def jit(fn: Callable) -> Any:
    """Makes a function a kernel, if Triton is installed; one kernel for all numbers of chunks and rows."""
    numbers = {"num_chunks", "num_rows"} & set(inspect.signature(fn).parameters)
    return fn if triton is None else triton.jit(fn, do_not_specialize=sorted(numbers))


@jit
def multiply(a, b, PRECISION: tl.constexpr):
    """Computes a b."""
    return tl.dot(a, b, input_precision=PRECISION)


@jit
def places(ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Computes the places of a tile (ROWS, COLUMNS) in a matrix of WIDTH columns, from the tile's first entry on."""
    if WIDTH == COLUMNS:  # then a thread's places are its first one plus constants, and it needs one address
        return tl.reshape(tl.arange(0, ROWS * COLUMNS), (ROWS, COLUMNS))
    return tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, COLUMNS)[None, :]


@jit
def begins(scalars):
    """Returns True, which the compiler cannot know. So registers keep no addresses from one step of a kernel for a
    later one.
    """
    return tl.load(scalars + 3) >= 0


@jit
def factors(vectors, NUMBER: tl.constexpr, C: tl.constexpr):
    """Loads a factor of each token of a chunk: (C, 1)."""
    return tl.load(vectors + NUMBER * C + tl.arange(0, C))[:, None]


@jit
def clip_scale(norm, limit):
    """Computes min(1, limit / norm)."""
    return tl.minimum(1.0, limit / tl.maximum(norm, 1e-30))


@jit
def inverse_of_unit_lower(lower, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """Computes (I + L)^-1 of a strictly lower triangular L (C, C): the inverse of every block on the diagonal, of 1, 2,
    4, ... tokens, until the block is the chunk.

    Of a block [[X, 0], [Y, Z]], the inverse is [[X^-1, 0], [-Z^-1 Y X^-1, Z^-1]].
    """
    # Not as the product of I + (-L)^(2^i): if all keys are equal, its factors are binomials, up to 4e17 at 64 tokens.
    rows, columns = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    inverse = tl.where(rows == columns, 1.0, 0.0).to(lower.dtype)
    for level in tl.range(0, LEVELS, disable_licm=True):
        row, column = rows >> level, columns >> level
        below = tl.where((row == column + 1) & (row & 1 == 1), lower, 0.0)  # Y of every block
        inverse -= multiply(inverse, multiply(below, inverse, PRECISION), PRECISION)  # (C, C) @ (C, C)
    return inverse


@jit
def write_next_state(
    weights, momentum, anchor, target, start, end, of_target, tile, inputs, deltas, vectors, scalars,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes a tile of one layer's state at the next chunk's start: of the weights minus M_0, of the momentum, and of
    the anchor, which becomes the weights where the chunk starts (eq. 13-14, unrolled, 16 and 18).

    W_T = beta_T W + f_T S - h^T diag(G_T) delta        S_T = m_T S - h^T diag(E_T theta) delta

    start, end, of_target: where the tile begins in the states at this chunk's start, at its end, and in M_0. tile: its
    places. inputs: h^T.
    """
    steps = factors(vectors, 0, C) * deltas
    after = tl.load(scalars) * tl.load(weights + start + tile)
    after -= multiply(inputs, steps, PRECISION)  # (rows, C) @ (C, columns)
    if momentum is not None:
        before = tl.load(momentum + start + tile)
        after += tl.load(scalars + 1) * before
        steps = factors(vectors, 1, C) * deltas
        before = tl.load(scalars + 2) * before - multiply(inputs, steps, PRECISION)
        tl.store(momentum + end + tile, before)
    tl.store(weights + end + tile, after)
    if anchor is not None:
        if target is not None:
            after += tl.load(target + of_target + tile)
        before = tl.load(anchor + start + tile)
        tl.store(anchor + end + tile, tl.where(tl.load(scalars + 3) > 0, after, before))


@jit
def chunk_states_kernel(
    keys, values, vectors, scalars, system,
    weights_1, momentum_1, anchor_1, target_1, weights_2, momentum_2, anchor_2, target_2,
    hidden, slopes, errors, deltas, num_chunks, num_rows,
    C: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    DELTA_RULE: tl.constexpr, HIDDEN_STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the state at the start of every chunk but the first, and at the end, of one row and head.

    keys, values (P, N, C, D); vectors (P, N, 6, C): G_T, E_T theta, beta and f before each token, kappa |v|, |k|;
    scalars (P, N, 4): beta_T, f_T, m_T, and 1 where the next chunk starts; system (P, N, C, C): `EarlierGates.system`.
    States (P + 1, N, ...), the first given; targets M_0 (N, ...). None: the hidden layer's in a memory of one layer,
    momenta without momentum, targets without forgetting, anchors without gradients at the chunk's start.
    hidden, slopes (N, C, F), errors, deltas (N, C, D): scratch.
    """
    row = tl.program_id(0).to(tl.int64)
    hidden, slopes = hidden + row * C * F, slopes + row * C * F
    errors, deltas = errors + row * C * D, deltas + row * C * D
    for chunk in tl.range(0, num_chunks, disable_licm=True):
        slot = chunk * num_rows + row
        key, value, start, end = keys + slot * C * D, values + slot * C * D, slot * F * D, (slot + num_rows) * F * D
        vector, scalar = vectors + slot * 6 * C, scalars + slot * 4
        inputs = key if weights_1 is None else hidden  # of the last layer
        # 1. Through the network at the anchor: the last layer's inputs h, and M(k) - v, clipped and doubled
        if anchor_2 is not None and begins(scalar):
            limit = factors(vector, 4, C)
            error = -tl.load(value + places(C, D, D))
            h_square = tl.zeros((C,), error.dtype)
            for first in tl.range(0, F, BLOCK, disable_licm=True):
                if weights_1 is None:
                    h = tl.load(key + first + places(C, BLOCK, F))
                else:
                    w = tl.load(anchor_1 + start + first + places(D, BLOCK, F))
                    z = multiply(tl.load(key + places(C, D, D)), w, PRECISION)  # (C, D) @ (D, BLOCK)
                    sigmoid = 1 / (1 + tl.exp(-z))
                    h = z * sigmoid
                    tl.store(hidden + first + places(C, BLOCK, F), h)
                    tl.store(slopes + first + places(C, BLOCK, F), sigmoid + h * (1 - sigmoid))  # silu'(z)
                w = tl.load(anchor_2 + start + first * D + places(BLOCK, D, D))
                error += multiply(h, w, PRECISION)  # (C, BLOCK) @ (BLOCK, D)
                h_square += tl.sum(h * h, 1)
            error *= 2 * clip_scale(tl.sqrt(tl.sum(error * error, 1))[:, None], limit)
            tl.store(errors + places(C, D, D), error)
            if not DELTA_RULE:
                norm = tl.sqrt(h_square * tl.sum(error * error, 1))[:, None]
                tl.store(deltas + places(C, D, D), error * clip_scale(norm, 4 * limit))
            tl.debug_barrier()
        # 2. The delta rule: A delta = e_0 with e_0 = beta h W + f h S + h M_0 - v and A = (h h^T) o G
        if DELTA_RULE and begins(scalar):
            error = -tl.load(value + places(C, D, D))
            for first in tl.range(0, F, BLOCK, disable_licm=True):
                h, tile = tl.load(inputs + first + places(C, BLOCK, F)), first * D + places(BLOCK, D, D)
                w = tl.load(weights_2 + start + tile)
                error += multiply(factors(vector, 2, C) * h, w, PRECISION)  # (C, BLOCK) @ (BLOCK, D)
                if momentum_2 is not None:
                    s = tl.load(momentum_2 + start + tile)
                    error += multiply(factors(vector, 3, C) * h, s, PRECISION)
                if target_2 is not None:
                    error += multiply(h, tl.load(target_2 + row * F * D + tile), PRECISION)
            tl.store(deltas + places(C, D, D), error)
            scores = tl.zeros((C, C), error.dtype)
            for first in tl.range(0, F, BLOCK, disable_licm=True):
                h = tl.load(inputs + first + places(C, BLOCK, F))
                scores += multiply(h, tl.trans(h), PRECISION)
            a = scores * tl.load(system + slot * C * C + places(C, C, C))
            rows, columns = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
            diagonal = tl.maximum(tl.sum(tl.where(rows == columns, a, 0.0), 1), 0.5)[:, None]
            inverse = inverse_of_unit_lower(tl.where(rows > columns, a, 0.0) / diagonal, C, LEVELS, PRECISION)
            tl.debug_barrier()
            delta = tl.load(deltas + places(C, D, D)) / diagonal
            delta = multiply(inverse, delta, PRECISION)  # (C, C) @ (C, D)
            tl.debug_barrier()
            tl.store(deltas + places(C, D, D), delta)
            tl.debug_barrier()
        # 3. The hidden layer: its deltas before their clip are (delta_L W_L^T) o silu'(z), in place of silu'(z)
        if weights_1 is not None and begins(scalar):
            unclipped_square = tl.zeros((C,), slopes.dtype.element_ty)
            for first in tl.range(0, F, BLOCK, disable_licm=True):
                w = tl.load(anchor_2 + start + first * D + places(BLOCK, D, D))
                unclipped = multiply(tl.load(errors + places(C, D, D)), tl.trans(w), PRECISION)
                unclipped *= tl.load(slopes + first + places(C, BLOCK, F))  # (C, D) @ (D, BLOCK)
                unclipped_square += tl.sum(unclipped * unclipped, 1)
                tl.store(slopes + first + places(C, BLOCK, F), unclipped)
            tl.debug_barrier()
            norm = factors(vector, 5, C) * tl.sqrt(unclipped_square)[:, None]
            scale = HIDDEN_STEP * clip_scale(norm, 4 * factors(vector, 4, C))
            for first in tl.range(0, F, BLOCK, disable_licm=True):
                hidden_delta = scale * tl.load(slopes + first + places(C, BLOCK, F))
                write_next_state(
                    weights_1, momentum_1, anchor_1, target_1, start + first, end + first, row * D * F + first,
                    places(D, BLOCK, F), tl.trans(tl.load(key + places(C, D, D))), hidden_delta, vector, scalar,
                    C, PRECISION,
                )  # fmt: skip
        # 4. The last layer
        if begins(scalar):
            for first in tl.range(0, F, BLOCK, disable_licm=True):
                h = tl.trans(tl.load(inputs + first + places(C, BLOCK, F)))
                write_next_state(
                    weights_2, momentum_2, anchor_2, target_2, start + first * D, end + first * D,
                    (row * F + first) * D, places(BLOCK, D, D), h, tl.load(deltas + places(C, D, D)), vector, scalar,
                    C, PRECISION,
                )  # fmt: skip
            tl.debug_barrier()


@jit
def write_previous_gradients(
    grad_weights, grad_momentum, grad_anchor, start, end, of_anchors, tile, inputs, grad_start_error, of_anchor,
    vectors, scalars, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds gradients to a tile of the gradients with respect to one layer's state at a chunk's start. The tile holds
    the gradients by the reads; added are the gradients by the state at the chunk's end, by the delta rule and by the
    anchor.

    start, end, of_anchors: where the tile begins in the gradients at this chunk's start, at its end, and in the
    anchor's. tile: its places. inputs: h^T. grad_start_error: places of the gradient with respect to e_0, None without
    the delta rule in this layer. of_anchor: with respect to the anchor by this chunk, None without an anchor.
    """
    if grad_momentum is not None:
        grad_s = tl.load(grad_momentum + start + tile) + tl.load(scalars + 1) * tl.load(grad_weights + end + tile)
        grad_s += tl.load(scalars + 2) * tl.load(grad_momentum + end + tile)
        if grad_start_error is not None:  # (rows, C) @ (C, columns)
            grad_s += multiply(inputs, factors(vectors, 3, C) * tl.load(grad_start_error), PRECISION)
        tl.store(grad_momentum + start + tile, grad_s)
    grad = tl.load(grad_weights + start + tile) + tl.load(scalars) * tl.load(grad_weights + end + tile)
    if grad_start_error is not None:
        grad += multiply(inputs, factors(vectors, 2, C) * tl.load(grad_start_error), PRECISION)
    if of_anchor is not None:  # eq. 16: to the weights where the chunk starts, to the chunk before elsewhere
        starts = tl.load(scalars + 3) > 0
        of_anchor += tl.load(grad_anchor + of_anchors + tile)
        grad += tl.where(starts, of_anchor, 0.0)
        tl.store(grad_anchor + of_anchors + tile, tl.where(starts, 0.0, of_anchor))
    tl.store(grad_weights + start + tile, grad)


@jit
def chunk_gradients_kernel(
    keys, inputs, vectors, scalars, errors, deltas, inverse, system, slopes, grad_activations, curvatures,
    weights, momentum, anchor, target, grad_inputs, grad_hidden_deltas, grad_deltas,
    grad_weights_1, grad_momentum_1, grad_anchor_1, grad_weights_2, grad_momentum_2, grad_anchor_2,
    grad_h, grad_hidden, grad_start_error, grad_error, num_chunks, num_rows,
    C: tl.constexpr, D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the gradients with respect to the state at every chunk's start, from the last chunk to the first, of one
    row and head: the backward of `chunk_states_kernel`, step 3 of `memory_chunk_backward.group_backward`.

    inputs (P, N, C, F): h, of the last layer; vectors (P, N, 11, C): G_T, E_T theta, beta and f before each token; of
    the clips the last layer's scale, 1 / |delta|^2 and 1 / |h|^2 where it applies, the hidden layer's scale and
    1 / |delta|^2, the error's scale and 1 / |e|^2; scalars (P, N, 4): beta_T, f_T, m_T, and 1 where the chunk starts.
    errors (P, N, C, D): M(k) - v; None without an anchor. deltas, inverse A^-1 (P, N, C, C): of the delta rule, None
    without it. system: with 0 on the diagonal where A has 1/2. weights to target: of the last layer. grad_inputs,
    grad_hidden_deltas, grad_deltas: by the reads. Gradients with respect to states (P + 1, N, ...): by the reads, and
    at the end; grad_anchor (N, ...): at the end, then at the start. grad_h, grad_hidden (N, C, F), grad_start_error,
    grad_error (N, C, D): scratch.
    """
    for back in tl.range(0, num_chunks, disable_licm=True):
        slot = (num_chunks - 1 - back) * num_rows + tl.program_id(0)
        slot, row = slot.to(tl.int64), (slot % num_rows).to(tl.int64)  # here, not carried from chunk to chunk
        own, token, start, end = row * C, slot * C, slot * F * D, (slot + num_rows) * F * D
        vector, scalar = vectors + slot * 11 * C, scalars + slot * 4
        if begins(scalar):
            # 1. The last layer's deltas, by the reads and by the state at the chunk's end
            grad = tl.load(grad_deltas + token * D + places(C, D, D))
            for first in tl.range(0, F, BLOCK, disable_licm=True):
                h, tile = tl.load(inputs + token * F + first + places(C, BLOCK, F)), first * D + places(BLOCK, D, D)
                w = tl.load(grad_weights_2 + end + tile)
                grad -= multiply(factors(vector, 0, C) * h, w, PRECISION)  # (C, BLOCK) @ (BLOCK, D)
                if momentum is not None:
                    s = tl.load(grad_momentum_2 + end + tile)
                    grad -= multiply(factors(vector, 1, C) * h, s, PRECISION)
            # 2. The backward of A delta = e_0, or of the clip
            if inverse is not None:
                solver = tl.load(inverse + slot * C * C + places(C, C, C))
                grad = multiply(tl.trans(solver), grad, PRECISION)  # A^-T: (C, C) @ (C, D)
                tl.store(grad_start_error + own * D + places(C, D, D), grad)
            else:
                scale = factors(vector, 4, C)
                unclipped = factors(vector, 9, C) * tl.load(errors + token * D + places(C, D, D))
                log_limit = scale * tl.sum(grad * unclipped, 1)[:, None]
                grad = scale * grad - log_limit * factors(vector, 5, C) * unclipped
                tl.store(grad_error + own * D + places(C, D, D), grad)
            tl.debug_barrier()
            # 3. The last layer's inputs h, by the reads, by the state at the chunk's end and by e_0 or the clip
            if grad_weights_1 is not None:
                for first in tl.range(0, F, BLOCK, disable_licm=True):
                    units, tile = token * F + first + places(C, BLOCK, F), first * D + places(BLOCK, D, D)
                    delta = tl.load((errors if inverse is None else deltas) + token * D + places(C, D, D))
                    if inverse is None:
                        delta *= factors(vector, 4, C) * factors(vector, 9, C)
                    w = tl.load(grad_weights_2 + end + tile)
                    of_h = tl.load(grad_inputs + units)
                    of_h -= factors(vector, 0, C) * multiply(delta, tl.trans(w), PRECISION)  # (C, D) @ (D, BLOCK)
                    if momentum is not None:
                        s = tl.load(grad_momentum_2 + end + tile)
                        of_h -= factors(vector, 1, C) * multiply(delta, tl.trans(s), PRECISION)
                    if inverse is None:
                        of_h -= log_limit * factors(vector, 6, C) * tl.load(inputs + units)
                    else:
                        error = tl.load(grad_start_error + own * D + places(C, D, D))
                        w = tl.load(weights + start + tile)
                        of_h += factors(vector, 2, C) * multiply(error, tl.trans(w), PRECISION)
                        if momentum is not None:
                            s = tl.load(momentum + start + tile)
                            of_h += factors(vector, 3, C) * multiply(error, tl.trans(s), PRECISION)
                        if target is not None:
                            m_0 = tl.load(target + row * F * D + tile)
                            of_h += multiply(error, tl.trans(m_0), PRECISION)
                    tl.store(grad_h + own * F + first + places(C, BLOCK, F), of_h)
                tl.debug_barrier()
        if grad_weights_1 is not None and inverse is not None and begins(scalar):  # and by A
            delta = tl.load(deltas + token * D + places(C, D, D))
            error = tl.load(grad_start_error + own * D + places(C, D, D))
            scores = multiply(error, tl.trans(delta), PRECISION)  # (C, D) @ (D, C)
            scores *= -tl.load(system + slot * C * C + places(C, C, C))
            scores += tl.trans(scores)
            for first in tl.range(0, F, BLOCK, disable_licm=True):
                of_row = first + places(C, BLOCK, F)
                of_h = multiply(scores, tl.load(inputs + token * F + of_row), PRECISION)  # (C, C) @ (C, BLOCK)
                tl.store(grad_h + own * F + of_row, tl.load(grad_h + own * F + of_row) + of_h)
        if grad_weights_1 is not None and begins(scalar):
            # 4. The hidden layer's deltas, by the reads and the state at the chunk's end
            hidden_log_limit = tl.zeros((C,), grad_h.dtype.element_ty)
            for first in tl.range(0, F, BLOCK, disable_licm=True):
                units, tile = token * F + first + places(C, BLOCK, F), first + places(D, BLOCK, F)
                key = tl.load(keys + token * D + places(C, D, D))
                of_hidden = tl.load(grad_hidden_deltas + units)
                w = tl.load(grad_weights_1 + end + tile)
                of_hidden -= factors(vector, 0, C) * multiply(key, w, PRECISION)  # (C, D) @ (D, BLOCK)
                if momentum is not None:
                    s = tl.load(grad_momentum_1 + end + tile)
                    of_hidden -= factors(vector, 1, C) * multiply(key, s, PRECISION)
                hidden_delta = tl.load(slopes + units) * tl.load(grad_activations + units)
                hidden_log_limit += tl.sum(of_hidden * hidden_delta, 1)
                tl.store(grad_hidden + own * F + first + places(C, BLOCK, F), of_hidden)
            tl.debug_barrier()
            # 5. Their clip, and delta_1 = silu'(z) o (delta_2 W_2^T) with respect to delta_2
            hidden_clip = hidden_log_limit[:, None] * factors(vector, 7, C) * factors(vector, 8, C)
            of_delta = tl.zeros((C, D), grad_h.dtype.element_ty)
            for first in tl.range(0, F, BLOCK, disable_licm=True):
                units, of_row = token * F + first + places(C, BLOCK, F), first + places(C, BLOCK, F)
                slope = tl.load(slopes + units)
                of_hidden = factors(vector, 7, C) * tl.load(grad_hidden + own * F + of_row)
                of_hidden -= hidden_clip * slope * tl.load(grad_activations + units)
                tl.store(grad_hidden + own * F + of_row, of_hidden)
                w = tl.load(anchor + start + first * D + places(BLOCK, D, D))
                of_delta += multiply(of_hidden * slope, w, PRECISION)  # (C, BLOCK) @ (BLOCK, D)
                of_anchor = tl.load(grad_anchor_2 + row * F * D + first * D + places(BLOCK, D, D))
                unclipped = factors(vector, 9, C) * tl.load(errors + token * D + places(C, D, D))
                of_anchor += multiply(tl.trans(of_hidden * slope), unclipped, PRECISION)  # (BLOCK, C) @ (C, D)
                tl.store(grad_anchor_2 + row * F * D + first * D + places(BLOCK, D, D), of_anchor)
            if inverse is None:
                of_delta += tl.load(grad_error + own * D + places(C, D, D))
            tl.store(grad_error + own * D + places(C, D, D), of_delta)
            tl.debug_barrier()
        # 6. delta_L = 2 e with the clip of e = M(k) - v
        if errors is not None and begins(scalar):
            error = tl.load(errors + token * D + places(C, D, D))
            error_scale, of_error = factors(vector, 9, C), tl.load(grad_error + own * D + places(C, D, D))
            error_clip = error_scale * tl.sum(of_error * error, 1)[:, None] * factors(vector, 10, C)
            tl.debug_barrier()
            tl.store(grad_error + own * D + places(C, D, D), error_scale * of_error - error_clip * error)
            tl.debug_barrier()
        # 7. z = k W_1 and h = silu(z), and the gradients with respect to the anchor and to the state at the start
        if grad_weights_1 is not None and begins(scalar):
            for first in tl.range(0, F, BLOCK, disable_licm=True):
                units, of_row = token * F + first + places(C, BLOCK, F), first + places(C, BLOCK, F)
                w = tl.load(anchor + start + first * D + places(BLOCK, D, D))
                of_z = multiply(tl.load(grad_error + own * D + places(C, D, D)), tl.trans(w), PRECISION)
                of_z = tl.load(slopes + units) * (tl.load(grad_h + own * F + of_row) + of_z)  # (C, D) @ (D, BLOCK)
                curvature = tl.load(grad_activations + units) * tl.load(curvatures + units)
                of_z += tl.load(grad_hidden + own * F + of_row) * curvature
                key = tl.trans(tl.load(keys + token * D + places(C, D, D)))
                write_previous_gradients(
                    grad_weights_1, grad_momentum_1, grad_anchor_1, start + first, end + first, row * D * F + first,
                    places(D, BLOCK, F), key, None, multiply(key, of_z, PRECISION), vector, scalar, C, PRECISION,
                )  # fmt: skip
        if begins(scalar):
            for first in tl.range(0, F, BLOCK, disable_licm=True):
                h, of_error = tl.trans(tl.load(inputs + token * F + first + places(C, BLOCK, F))), grad_error + own * D
                of_start = None if inverse is None else grad_start_error + own * D + places(C, D, D)
                of_anchor = None
                if errors is not None:
                    of_anchor = multiply(h, tl.load(of_error + places(C, D, D)), PRECISION)  # (BLOCK, C) @ (C, D)
                write_previous_gradients(
                    grad_weights_2, grad_momentum_2, grad_anchor_2, start + first * D, end + first * D,
                    (row * F + first) * D, places(BLOCK, D, D), h, of_start, of_anchor, vector, scalar, C, PRECISION,
                )  # fmt: skip
            tl.debug_barrier()


@jit
def load_anchor(weights, anchor, new_anchor, starts, tile):
    """Loads a layer's anchor, the weights where a chunk starts (eq. 16), and writes it to the new state."""
    loaded = tl.load(weights + tile) if starts else tl.load(anchor + tile)
    tl.store(new_anchor + tile, loaded)
    return loaded


@jit
def write_step(
    weights, momentum, target, new_weights, new_momentum, tile, of_target, inputs, delta, theta, decay, retain
):  # fmt: skip
    """Writes a layer's weights and momentum after a token, and returns the weights (eq. 10, 13, 14).

    S_t = eta_t S_{t-1} - theta_t h (x) delta        M_t = (1 - alpha_t) (M_{t-1} - M_0) + M_0 + S_t
    """
    step = -theta * inputs[:, None] * delta[None, :]
    if momentum is not None:
        step += tl.exp(tl.load(decay)) * tl.load(momentum + tile)
        tl.store(new_momentum + tile, step)
    after = tl.load(weights + tile)
    if target is None:
        after = retain * after + step
    else:
        m_0 = tl.load(target + of_target)
        after = retain * (after - m_0) + m_0 + step
    tl.store(new_weights + tile, after)
    return after


@jit
def token_kernel(
    queries, keys, values, inner_lr, log_momentum_decay, log_retain, num_seen,
    weights_1, momentum_1, anchor_1, target_1, weights_2, momentum_2, anchor_2, target_2,
    new_weights_1, new_momentum_1, new_anchor_1, new_weights_2, new_momentum_2, new_anchor_2, retrieved, surprise,
    CHUNK: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, F: tl.constexpr, DELTA_RULE: tl.constexpr,
    HIDDEN_STEP: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Updates and reads the memory of one row and head with one token: `memory_ops._memorize_token`.

    queries, keys, values, retrieved (N, D); gates, surprise (N,); num_seen (N / HEADS,); states (N, ...), targets M_0
    (HEADS, ...). None as in `chunk_states_kernel`. CLIP: kappa, None without a clip.
    """
    row = tl.program_id(0).to(tl.int64)
    first, last = row * D * F + places(D, F, F), row * F * D + places(F, D, D)
    m_first, m_last = (row % HEADS) * D * F + places(D, F, F), (row % HEADS) * F * D + places(F, D, D)
    theta, retain, decay = tl.load(inner_lr + row), tl.exp(tl.load(log_retain + row)), None
    if log_momentum_decay is not None:
        decay = log_momentum_decay + row
    starts = tl.load(num_seen + row // HEADS) % CHUNK == 0
    key, value = tl.load(keys + row * D + tl.arange(0, D)), tl.load(values + row * D + tl.arange(0, D))
    limit = float("inf") if CLIP is None else CLIP * tl.sqrt(tl.sum(value * value, 0))
    inputs, hidden_square = key, 0.0
    # 1. The gradient at the anchor, from the first layer to the last and back
    if weights_1 is not None:
        z = tl.sum(key[:, None] * load_anchor(weights_1, anchor_1, new_anchor_1, starts, first), 0)
        sigmoid = 1 / (1 + tl.exp(-z))
        inputs = z * sigmoid
    square = tl.sum(inputs * inputs, 0)
    if anchor_2 is not None:
        w = load_anchor(weights_2, anchor_2, new_anchor_2, starts, last)
        error = tl.sum(inputs[:, None] * w, 0) - value
        error *= 2 * clip_scale(tl.sqrt(tl.sum(error * error, 0)), limit)
        if weights_1 is not None:
            hidden_delta = (sigmoid + inputs * (1 - sigmoid)) * tl.sum(w * error[None, :], 1)
            key_square = tl.sum(key * key, 0)
            hidden_delta *= clip_scale(tl.sqrt(key_square * tl.sum(hidden_delta * hidden_delta, 0)), 4 * limit)
            hidden_square = key_square * tl.sum(hidden_delta * hidden_delta, 0)
        delta = error * clip_scale(tl.sqrt(square * tl.sum(error * error, 0)), 4 * limit)
    # 2. The delta rule: the last layer's error at the weights before the token
    if DELTA_RULE:
        error = tl.sum(inputs[:, None] * tl.load(weights_2 + last), 0) - value
        delta = 2 / tl.maximum(square, 1.0) * error
    tl.store(surprise + row, tl.sqrt(hidden_square + square * tl.sum(delta * delta, 0)))
    # 3. The step, and the value that the query then retrieves (eq. 15)
    x = tl.load(queries + row * D + tl.arange(0, D))
    if weights_1 is not None:
        w = write_step(
            weights_1, momentum_1, target_1, new_weights_1, new_momentum_1, first, m_first, key,
            HIDDEN_STEP * hidden_delta, theta, decay, retain,
        )  # fmt: skip
        z = tl.sum(x[:, None] * w, 0)
        x = z / (1 + tl.exp(-z))
    w = write_step(
        weights_2, momentum_2, target_2, new_weights_2, new_momentum_2, last, m_last, inputs, delta, theta, decay,
        retain,
    )  # fmt: skip
    tl.store(retrieved + row * D + tl.arange(0, D), tl.sum(x[:, None] * w, 0))


def by_layer(depth: int, *fields: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the hidden layer's tensors, then the last layer's, from fields of one tensor per layer; None for an empty
    field, and for the hidden layer of a memory without one.
    """
    of_layers = zip(*(x or [None] * depth for x in fields), strict=True)
    return [None] * len(fields) * (2 - depth) + [x for layer in of_layers for x in layer]


def per_slot(tensors: Sequence[Tensor | float | None], like: Tensor) -> Tensor:
    """Stacks factors of tokens (P * N, C), or of chunks (P * N), each with any dimensions of 1 after them. A number
    stands for equal factors, None for 0. Returns (P * N, number of factors, ...).
    """
    stacked = [x.reshape_as(like) if isinstance(x, Tensor) else torch.full_like(like, x or 0.0) for x in tensors]
    return torch.stack(stacked, 1)


def launch(
    kernel: Any, arguments: Sequence[Tensor | None], num_rows: int, keys: Tensor, hidden: int, **options: Any
) -> None:
    """Runs a kernel with one program per row and head, on the device of the keys (P * N, C, D). Tensors that the kernel
    writes are contiguous.
    """
    arguments = [x if x is None else x.contiguous() for x in arguments]
    (_, tokens, size), num_chunks = keys.shape, len(keys) // num_rows
    # With TF32 products off, each product is three of TF32, as exact as float32.
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
    scratch = (*keys.new_empty(2, num_rows, tokens, hidden), *keys.new_empty(2, num_rows, tokens, size))
    sizes = dict(C=tokens, D=size, F=hidden, **tile(size), PRECISION=precision)
    with torch.cuda.device_of(keys):
        kernel[(num_rows,)](*arguments, *scratch, num_chunks, num_rows, **sizes, **options, num_stages=1)


def tile(head_dim: int) -> dict[str, int]:
    """Returns the hidden units of a tile and the warps of a program: without spilled registers (docs/speed.md)."""
    return dict(BLOCK=16, num_warps=4 if head_dim <= 32 else 8)


def chunk_states(
    inputs: MemoryInputs,
    norms: TokenNorms | None,
    end: EndGates,
    earlier: EarlierGates | None,
    state: MemoryState,
    decay_target: Sequence[Tensor],
    starts: Tensor | None,
    rule: UpdateRule,
) -> tuple[MemoryState, MemoryState]:
    """Computes the states at the starts of all chunks of a group (P * N, ...), and at its end (N, ...)."""
    keys, num_rows, hidden = inputs.keys, len(state.weights[0]), state.weights[-1].shape[-2]
    num_chunks = len(keys) // num_rows
    offsets = [w - m for w, m in zip(state.weights, decay_target, strict=True)] if decay_target else state.weights

    def slots(first: Sequence[Tensor]) -> list[Tensor]:
        """Makes room for a layer's states at all chunks' starts and at the end: (P + 1, N, ...)."""
        return [torch.cat([x[None], x.new_empty(num_chunks, *x.shape)]) for x in first]

    weights, momentum, anchor = slots(offsets), slots(state.momentum), slots(state.anchor)
    # Whether the next chunk starts: the anchor at the group's end is the last chunk's.
    next_starts = keys.new_ones(num_chunks, num_rows) if starts is None else starts.to(keys.dtype)
    next_starts = torch.cat([next_starts[1:], torch.zeros_like(next_starts[:1])])
    before = (earlier.weights_decay, earlier.momentum_to_weights) if earlier else (None, None)
    key_norm, limit = norms or (None, torch.finfo(keys.dtype).max)
    vectors = [end.gradient_to_weights, end.gradient_to_momentum, *before, limit, key_norm]
    scalars = [end.weights_decay, end.momentum_to_weights, end.momentum_decay, next_starts]
    layers = by_layer(len(weights), weights, momentum, anchor, decay_target)
    arguments = [keys, inputs.values, per_slot(vectors, keys[..., 0]), per_slot(scalars, keys[:, 0, 0])]
    arguments += [earlier.system if earlier else None, *layers]
    options = dict(LEVELS=keys.shape[1].bit_length() - 1, DELTA_RULE=rule.delta_rule, HIDDEN_STEP=rule.hidden_factor)
    launch(chunk_states_kernel, arguments, num_rows, keys, hidden, **options)
    for x, m in zip(weights, decay_target, strict=False):
        x.add_(m)
    of_chunks = (tuple(x[:-1].flatten(0, 1) for x in layers) for layers in (weights, momentum, anchor))
    at_end = (tuple(x[-1].clone() for x in layers) for layers in (weights, momentum, anchor))
    return MemoryState(*of_chunks), MemoryState(*at_end)


def chunk_gradients(
    group: GroupIntermediates,
    reads: Sequence[ChunkLayer],
    derivatives: FactorsDerivatives | None,
    grads: MemoryState,
    starts: Tensor | None,
) -> tuple[MemoryState, MemoryState]:
    """Computes the gradients with respect to the states at the ends of all chunks of a group (P * N, ...), without
    the anchors' gradients, and to the state at its start (N, ...).

    reads: the gradients by the group's reads. grads: with respect to the state at the group's end.
    """
    (chunk,), last, num_rows = group.chunks, group.layers[-1], len(grads.weights[0])
    keys, is_deep = group.inputs.keys, len(group.layers) > 1

    def slots(of_reads: Sequence[Tensor], at_end: Sequence[Tensor]) -> list[Tensor]:
        """Puts a layer's gradients at the end after its gradients by the reads: (P + 1, N, ...)."""
        pairs = zip(of_reads, at_end, strict=True)
        return [torch.cat([x.unflatten(0, (-1, num_rows)), end[None]]) for x, end in pairs]

    weights = slots([x.offset for x in reads], grads.weights)
    momentum = slots([x.momentum for x in reads], grads.momentum) if grads.momentum else []
    anchor = [x.clone() for x in grads.anchor or map(torch.zeros_like, grads.weights)] if chunk.anchor else []
    layers = by_layer(len(weights), weights, momentum, anchor)
    end, earlier = group.end_gates[0], group.earlier_gates
    starts = keys.new_ones(len(keys) // num_rows, num_rows) if starts is None else starts.to(keys.dtype, copy=True)
    starts[0] = 0  # the gradient of the first chunk's anchor leaves the group as it is
    scalars = [end.weights_decay, end.momentum_to_weights, end.momentum_decay, starts]
    before = (earlier.weights_decay, earlier.momentum_to_weights) if earlier else (None, None)
    vectors = [end.gradient_to_weights, end.gradient_to_momentum, *before, *_clip_factors(group, derivatives)]
    deltas = inverse = system = None
    if chunk.system is not None:
        a, deltas = chunk.system, last.deltas
        identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
        inverse, system = solve_triangular(a, identity, upper=False), earlier.system.clone()
        system.diagonal(dim1=-2, dim2=-1).mul_(a.diagonal(dim1=-2, dim2=-1) > 0.5)
    kept = chunk.factors.intermediates
    of_hidden = [kept.slopes[0], kept.grad_activations[0], derivatives.curvatures[0]] if is_deep else [None] * 3
    target = None if last.decay_target is None else last.decay_target[:num_rows]
    arguments = [keys, last.inputs, per_slot(vectors, keys[..., 0]), per_slot(scalars, keys[:, 0, 0])]
    arguments += [kept.error if chunk.anchor else None, deltas, inverse, system, *of_hidden]
    arguments += [last.offset, last.momentum, chunk.anchor[-1] if chunk.anchor else None, target]
    arguments += [reads[-1].inputs, reads[0].deltas if is_deep else None, reads[-1].deltas, *layers]
    launch(chunk_gradients_kernel, arguments, num_rows, keys, last.inputs.shape[-1])
    at_ends = (tuple(x[1:].flatten(0, 1) for x in layers) for layers in (weights, momentum))
    at_start = (tuple(x[0].clone() for x in layers) for layers in (weights, momentum))
    return MemoryState(*at_ends, ()), MemoryState(*at_start, tuple(anchor))


def _clip_factors(group: GroupIntermediates, derivatives: FactorsDerivatives | None) -> list[Tensor | float | None]:
    """Returns factors 4 to 10 of `chunk_gradients_kernel`'s vectors, from the clips and from `hidden_step`."""
    if derivatives is None:
        return [None] * 7
    (chunk,), depth = group.chunks, len(group.layers)
    kept, has_clip = chunk.factors.intermediates, bool(derivatives.clipped)
    scales = kept.delta_scales if has_clip else [chunk.factors.hidden_step] * (depth - 1) + [1.0]
    over_square = derivatives.over_square if has_clip else [None] * (depth + 1)
    over_input_square = derivatives.over_input_square if has_clip else [None] * depth
    of_last = [None] * 3  # with the delta rule, the last layer's gradient is not clipped
    if chunk.system is None:
        of_last = [scales[-1], over_square[depth - 1], over_input_square[depth - 1]]
    of_hidden = [scales[0], over_square[0]] if depth > 1 else [None] * 2
    return [*of_last, *of_hidden, kept.error_scale if has_clip else 2.0, over_square[-1]]


def memorize_token(
    inputs: MemoryInputs, state: MemoryState, decay_target: tuple[Tensor, ...], chunk_size: int, rule: UpdateRule
) -> MemorizeOutput:
    """Updates with one token per row and reads its query, as `memory_ops._memorize_token`, without gradients."""
    (rows, heads, _, size), depth, hidden = inputs.keys.shape, len(state.weights), state.weights[-1].shape[-2]
    after = replace(state.map(lambda x: x.new_empty(x.shape)), num_seen=state.num_seen + 1)
    output = MemorizeOutput(*(x.new_empty(x.shape) for x in (inputs.queries, inputs.inner_lr)), after)
    arguments = [*inputs[:6], state.num_seen]
    arguments += by_layer(depth, state.weights, state.momentum, state.anchor, decay_target)
    arguments += [*by_layer(depth, after.weights, after.momentum, after.anchor), output.retrieved, output.surprise]
    options = dict(CHUNK=chunk_size, HEADS=heads, D=size, F=hidden, CLIP=rule.error_clip, DELTA_RULE=rule.delta_rule)
    options["HIDDEN_STEP"] = rule.hidden_factor
    arguments = [x if x is None else x.contiguous() for x in arguments]
    with torch.cuda.device_of(inputs.keys):
        token_kernel[(rows * heads,)](*arguments, **options, num_warps=tile(size)["num_warps"])
    return output


KERNEL_FUNCTIONS = GroupFunctions(
    partial(group_forward, chunk_states=chunk_states),
    partial(group_intermediates, chunk_states=chunk_states),
    partial(group_backward, chunk_gradients=chunk_gradients),
    memorize_token,
)
