"""The memory as the paper states it, with every gradient by torch.autograd: token by token, and in chunks.

Slow; everything else is tested against it. It shares no mathematics with `memory_chunk.py` and `memory_ops.py`.
Shapes: B batch, H heads, T tokens, C tokens of a chunk, D head size; weights (B, H, d_in, d_out).
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from .memory_state import MemoryState


def _memory(weights: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """Computes M(x) for one vector per row and head: (..., D) -> (..., D)."""
    for layer, weight in enumerate(weights):
        x = torch.einsum("...i,...io->...o", x if layer == 0 else silu(x), weight)
    return x


def _loss(weights: tuple[Tensor, ...], key: Tensor, value: Tensor, error_clip: float | None) -> Tensor:
    """Computes l(M; k, v) = |M(k) - v|^2 (eq. 12), continued linearly where |M(k) - v| > kappa |v| (Huber's loss)."""
    error = _memory(weights, key) - value
    squared = error.square().sum(-1)
    if error_clip is None:
        return squared.sum()
    limit = error_clip * value.norm(dim=-1)
    outside = squared > limit.square()
    norm = torch.where(outside, squared, 1.0).sqrt()
    return torch.where(outside, 2 * limit * norm - limit.square(), squared).sum()


def _clip_gradient(gradient: Tensor, value: Tensor, error_clip: float | None) -> Tensor:
    """Clips the gradient of one layer at the norm 4 kappa |v|."""
    if error_clip is None:
        return gradient
    limit = 4 * error_clip * value.norm(dim=-1)
    squared = gradient.square().sum((-2, -1))
    outside = squared > limit.square()
    scale = torch.where(outside, limit / torch.where(outside, squared, 1.0).sqrt(), 1.0)
    return gradient * scale[..., None, None]


def memorize_reference(
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
    decay_target: tuple[Tensor, ...] = (),
) -> tuple[Tensor, MemoryState]:
    """Updates and reads the memory token by token; arguments and results are those of `memory_ops.memorize`.

    With a `decay_target` M_0, eq. 13 is stated for the weights less M_0.
    """
    weights, momentum, anchor, num_seen = state
    decay_target = decay_target or tuple(torch.zeros_like(w) for w in weights)
    gradient_of_loss = torch.func.grad(_loss)
    retrieved = []
    for t in range(keys.shape[2]):
        key, value, query = keys[:, :, t], values[:, :, t], queries[:, :, t]
        theta, eta, retain = (x[:, :, t, None, None] for x in (inner_lr, log_momentum_decay.exp(), log_retain.exp()))
        new_chunk = (num_seen % chunk_size == 0)[:, None, None, None]
        anchor = tuple(torch.where(new_chunk, w, a) for w, a in zip(weights, anchor, strict=True))  # eq. 16
        gradients = gradient_of_loss(anchor, key, value, error_clip)
        gradients = [_clip_gradient(g, value, error_clip) for g in gradients]
        momentum = tuple(eta * s - theta * g for s, g in zip(momentum, gradients, strict=True))  # eq. 10, 14
        parts = zip(weights, momentum, decay_target, strict=True)
        weights = tuple(retain * m + (1 - retain) * m_0 + s for m, s, m_0 in parts)  # eq. 13
        retrieved.append(_memory(weights, query))  # eq. 15
        num_seen = num_seen + 1
    return torch.stack(retrieved, dim=2), MemoryState(weights, momentum, anchor, num_seen)
