"""The two rules of the memory as the paper states them, token by token, with every gradient by autograd.

The loops are slow; everything else is tested against them. They share no mathematics with the forms in chunks.
Shapes: B rows, H heads, T tokens, D head size; weights (B, H, d_in, d_out).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .memory_deep import Loss, Network


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    log_eta: Tensor | None,
    log_retain: Tensor,
    m_0: Tensor,
    m: Tensor,
    s: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Computes `memory_rule.delta_rule`, without empty slots: arguments and results are the same."""

    def loss(m: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (torch.einsum("bhk,bhkv->bhv", key, m) - value).square().sum()  # eq. 12

    outputs, deltas = [], []
    for t in range(q.shape[2]):
        query, key, value = q[:, :, t], k[:, :, t], v[:, :, t]
        length = key.square().sum(-1).clamp(min=1.0)[..., None]
        gradient = torch.func.grad(loss)(m, key, value) / length[..., None]
        deltas.append(2 / length * (torch.einsum("bhk,bhkv->bhv", key, m) - value))
        step = -theta[:, :, t, None, None] * gradient
        if s is not None:
            step = s = log_eta[:, :, t, None, None].exp() * s + step  # eq. 10, 14
        m = log_retain[:, :, t, None, None].exp() * (m - m_0) + m_0 + step  # eq. 13
        outputs.append(torch.einsum("bhk,bhkv->bhv", query, m))  # eq. 15
    return torch.stack(outputs, 2), torch.stack(deltas, 2), m, s


def deep_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    log_eta: Tensor | None,
    log_retain: Tensor,
    m_0: Sequence[Tensor] | None,
    weights: Sequence[Tensor],
    momentum: Sequence[Tensor],
    anchor: Sequence[Tensor],
    num_seen: Tensor,
    *,
    network: Network,
    loss: Loss,
    clips: bool = False,
    chunk_size: int = 16,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Computes `memory_deep.deep_rule`, without empty slots: arguments and results are the same, but for `num_seen`
    (B,), the number of tokens that each row has read, which says where its chunks start.
    """

    def apply(weights: Sequence[Tensor], x: Tensor) -> Tensor:
        layers = [lambda x, w=w: torch.einsum("bhi,bhio->bho", x, w) for w in weights]
        return network(x, layers)

    def total_loss(weights: Sequence[Tensor], key: Tensor, value: Tensor) -> Tensor:
        return loss(apply(weights, key), value).sum()

    gates = [_of_layers(x, len(weights)) for x in (theta, log_eta, log_retain)]
    weights, momentum, anchor = list(weights), list(momentum), list(anchor)
    m_0 = [torch.zeros_like(w) for w in weights] if m_0 is None else m_0
    outputs, norms = [], []
    for t in range(q.shape[2]):
        query, key, value = q[:, :, t], k[:, :, t], v[:, :, t]
        starts = (num_seen % chunk_size == 0)[:, None, None, None]
        anchor = [torch.where(starts, w, a) for w, a in zip(weights, anchor, strict=True)]  # eq. 16
        gradients = torch.func.grad(total_loss)(anchor, key, value)
        if clips:
            gradients = [_clip(g, 4 * value.norm(dim=-1)) for g in gradients]
        norms.append(sum(g.square().sum((-2, -1)) for g in gradients).sqrt())
        for i, gradient in enumerate(gradients):
            step_size, eta, retain = (None if x is None else x[:, :, t, i, None, None] for x in gates)
            step = -step_size * gradient
            if momentum:
                step = momentum[i] = eta.exp() * momentum[i] + step  # eq. 10, 14
            weights[i] = retain.exp() * (weights[i] - m_0[i]) + m_0[i] + step  # eq. 13
        outputs.append(apply(weights, query))  # eq. 15
        num_seen = num_seen + 1
    return torch.stack(outputs, 2), torch.stack(norms, 2), weights, momentum, anchor


def _of_layers(gate: Tensor | None, depth: int) -> Tensor | None:
    """Expands a gate (B, H, T) that all layers share to the gates of each layer, (B, H, T, L)."""
    return gate[..., None].expand(*gate.shape, depth) if gate is not None and gate.dim() == 3 else gate


def _clip(gradient: Tensor, limit: Tensor) -> Tensor:
    """Clips the gradient of one layer (B, H, d_in, d_out) at the norm `limit` (B, H)."""
    squared = gradient.square().sum((-2, -1))
    outside = squared > limit.square()
    scale = torch.where(outside, limit / torch.where(outside, squared, 1.0).sqrt(), 1.0)
    return gradient * scale[..., None, None]
