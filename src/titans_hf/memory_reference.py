"""The memory as the paper states it, token by token, with every gradient by torch.autograd.

It is slow; everything else is tested against it. It shares no mathematics with the forms in chunks.
Shapes: B batch, H heads, T tokens, D head size; weights (B, H, d_in, d_out).
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from .memory_network import UpdateRule
from .memory_state import MemorizeOutput, MemoryInputs, MemoryState


def _memory(weights: tuple[Tensor, ...], x: Tensor, network: str) -> Tensor:
    """Computes M(x) for one vector per row and head: (..., D) -> (..., D)."""
    h, activation = x, gelu if network == "residual" else silu
    for layer, weight in enumerate(weights):
        h = torch.einsum("...i,...io->...o", h if layer == 0 else activation(h), weight)
    if network == "mlp":
        return h
    centred = h - h.mean(-1, keepdim=True)
    return x + centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def _loss(
    weights: tuple[Tensor, ...], key: Tensor, value: Tensor, error_clip: float | None, network: str = "mlp"
) -> Tensor:
    """Computes l(M; k, v) = |M(k) - v|^2 (eq. 12), continued linearly where |M(k) - v| > kappa |v| (Huber's loss)."""
    error = _memory(weights, key, network) - value
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


def _last_layer_gradient(hidden: tuple[Tensor, ...], last: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes the gradient of |M(k) - v|^2 (eq. 12) with respect to the last layer, over max(1, |its input|^2)."""
    gradient = torch.func.grad(lambda last: _loss((*hidden, last), key, value, None))(last)
    inputs = silu(_memory(hidden, key, "mlp")) if hidden else key
    return gradient / inputs.square().sum(-1).clamp(min=1.0)[..., None, None]


def memorize_reference(
    inputs: MemoryInputs,
    state: MemoryState,
    rule: UpdateRule,
    *,
    chunk_size: int,
    decay_target: tuple[Tensor, ...] = (),
) -> MemorizeOutput:
    """Updates and reads the memory token by token; arguments and results are as in `memory_ops.memorize`, for inputs
    without empty slots.

    With a `decay_target` M_0, eq. 13 is stated for the weights minus M_0.
    """
    rule.check()
    queries, keys, values, inner_lr, log_momentum_decay, log_retain, _ = inputs
    error_clip, delta_rule, network, hidden_step = rule
    weights, momentum, anchor, num_seen = state.weights, state.momentum, state.anchor, state.num_seen
    decay_target = decay_target or tuple(torch.zeros_like(w) for w in weights)
    has_momentum = log_momentum_decay is not None
    if not has_momentum:
        log_momentum_decay, momentum = torch.full_like(inner_lr, -torch.inf), tuple(map(torch.zeros_like, weights))
    gates = _per_layer(len(weights), inner_lr, log_momentum_decay.exp(), log_retain.exp())
    gradient_of_loss = torch.func.grad(_loss)
    retrieved, surprise = [], []
    for t in range(keys.shape[2]):
        key, value, query = keys[:, :, t], values[:, :, t], queries[:, :, t]
        theta, eta, retain = ([x[..., None, None] for x in gate[:, :, t].unbind(-1)] for gate in gates)
        new_chunk = (num_seen % chunk_size == 0)[:, None, None, None]
        anchor = tuple(torch.where(new_chunk, w, a) for w, a in zip(weights, anchor, strict=True))  # eq. 16
        if rule.fixes_hidden_layers:
            anchor = (*weights[:-1], anchor[-1])
        gradients = gradient_of_loss(anchor, key, value, error_clip, network)
        gradients = [_clip_gradient(g, value, error_clip) for g in gradients]
        if delta_rule:
            gradients[-1] = _last_layer_gradient(anchor[:-1], weights[-1], key, value)
        surprise.append(_norm(gradients[-1:] if rule.fixes_hidden_layers else gradients))
        if delta_rule:
            gradients[:-1] = [hidden_step * g for g in gradients[:-1]]
        parts, before = zip(eta, momentum, theta, gradients, strict=True), (weights, momentum)
        momentum = tuple(eta * s - theta * g for eta, s, theta, g in parts)  # eq. 10, 14
        parts = zip(retain, weights, momentum, decay_target, strict=True)
        weights = tuple(retain * m + (1 - retain) * m_0 + s for retain, m, s, m_0 in parts)  # eq. 13
        if rule.fixes_hidden_layers:
            weights, momentum = ((*x[:-1], y[-1]) for x, y in zip(before, (weights, momentum), strict=True))
        retrieved.append(_memory(weights, query, network))  # eq. 15
        num_seen = num_seen + 1
    after = MemoryState(weights, momentum if has_momentum else (), anchor, num_seen)
    return MemorizeOutput(torch.stack(retrieved, dim=2), torch.stack(surprise, dim=2), after)


def _norm(gradients: list[Tensor]) -> Tensor:
    """Computes the norm over all layers (..., d_in, d_out)."""
    return sum(g.detach().square().sum((-2, -1)) for g in gradients).sqrt()


def _per_layer(depth: int, *gates: Tensor) -> list[Tensor]:
    """Expands gates (B, H, T) that all layers share to gates of each layer: (B, H, T, layers)."""
    return [x[..., None].expand(*x.shape, depth) if x.dim() == 3 else x for x in gates]
