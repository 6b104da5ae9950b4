"""The memory as the paper states it, with every gradient by torch.autograd: token by token, and in chunks.

Slow; everything else is tested against it. It shares no mathematics with `memory_chunk.py` and `memory_ops.py`.
Shapes: B batch, H heads, T tokens, C tokens of a chunk, D head size; weights (B, H, d_in, d_out).
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
    """Updates and reads the memory token by token; arguments and results are those of `memory_ops.memorize`, for inputs
    without empty slots.

    With a `decay_target` M_0, eq. 13 is stated for the weights less M_0.
    """
    rule.check()
    queries, keys, values, inner_lr, log_momentum_decay, log_retain, _ = inputs
    error_clip, delta_rule, network = rule
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
        gradients = gradient_of_loss(anchor, key, value, error_clip, network)
        gradients = [_clip_gradient(g, value, error_clip) for g in gradients]
        if delta_rule:
            gradients[-1] = _last_layer_gradient(anchor[:-1], weights[-1], key, value)
        surprise.append(_norm(gradients))
        parts = zip(eta, momentum, theta, gradients, strict=True)
        momentum = tuple(eta * s - theta * g for eta, s, theta, g in parts)  # eq. 10, 14
        parts = zip(retain, weights, momentum, decay_target, strict=True)
        weights = tuple(retain * m + (1 - retain) * m_0 + s for retain, m, s, m_0 in parts)  # eq. 13
        retrieved.append(_memory(weights, query, network))  # eq. 15
        num_seen = num_seen + 1
    after = MemoryState(weights, momentum if has_momentum else (), anchor, num_seen)
    return MemorizeOutput(torch.stack(retrieved, dim=2), torch.stack(surprise, dim=2), after)


def _norm(gradients: list[Tensor]) -> Tensor:
    """Computes the norm over all layers (..., d_in, d_out)."""
    return sum(g.detach().square().sum((-2, -1)) for g in gradients).sqrt()


def _per_layer(depth: int, *gates: Tensor) -> list[Tensor]:
    """Expands gates (B, H, T) of all layers to those of each: (B, H, T, layers)."""
    return [x[..., None].expand(*x.shape, depth) if x.dim() == 3 else x for x in gates]


def memorize_chunks_reference(
    inputs: MemoryInputs,
    state: MemoryState,
    rule: UpdateRule,
    *,
    chunk_size: int,
    decay_target: tuple[Tensor, ...] = (),
) -> MemorizeOutput:
    """Updates and reads the memory chunk by chunk (paper section 3.2), with per-token weights; arguments and results
    are those of `memory_ops.memorize`, with momentum, without the delta rule, for rows of whole chunks.
    """
    queries, keys, values, *gates, _ = inputs
    gates = _per_layer(len(state.weights), *gates)
    if keys.shape[2] % chunk_size or (state.num_seen % chunk_size).any():
        raise ValueError(f"`keys` must be whole chunks of `chunk_size` ({chunk_size}), but has {keys.shape[2]} tokens.")
    if rule.delta_rule:
        raise ValueError("`rule.delta_rule` must be False: errors are taken at the weights of the chunk's start.")
    weights, momentum, retrieved, surprise = state.weights, state.momentum, [], []
    decay_target = decay_target or tuple(torch.zeros_like(w) for w in weights)
    for q, k, v, theta, log_eta, log_retain in zip(
        *(x.split(chunk_size, dim=2) for x in (queries, keys, values, *gates)), strict=True
    ):
        # 1. Every token's gradient, at the weights A of the chunk's start (eq. 16): u (B, H, C, d_in, d_out)
        anchor = weights
        per_token = tuple(w[:, :, None].expand(-1, -1, chunk_size, -1, -1) for w in anchor)
        gradients = torch.func.grad(_loss)(per_token, k, v, rule.error_clip, rule.network)
        gradients = [_clip_gradient(u, v, rule.error_clip) for u in gradients]
        surprise.append(_norm(gradients))
        new_weights, new_momentum = [], []
        for layer, (w, s, u, target) in enumerate(zip(weights, momentum, gradients, decay_target, strict=True)):
            # 2. Products of the gates: m_t = prod_{l<=t} eta_l, beta_t = prod_{l<=t} (1 - alpha_l) (B, H, C), and the
            #    same products over j < l <= t at [t, j], E and R (B, H, C, C)
            (m, decays), (beta, retains) = (_products(x[..., layer].exp()) for x in (log_eta, log_retain))
            # 3. S_t = m_t S_0 - sum_{i<=t} E_ti theta_i u_i (eq. 18: eq. 14 unrolled)
            # 4. M_t = beta_t (M_0 - target) + sum_{i<=t} R_ti S_i + target (eq. 13 unrolled)
            s_0 = torch.einsum("bht,bhio->bhtio", m, s)  # (B, H, C) x (B, H, d_in, d_out)
            steps = torch.einsum("bhj,bhjio->bhjio", theta[..., layer], u)  # (B, H, C) x (B, H, C, d_in, d_out)
            s_t = s_0 - torch.einsum("bhtj,bhjio->bhtio", decays, steps)  # (B, H, C, C) x (B, H, C, d_in, d_out)
            w_0 = torch.einsum("bht,bhio->bhtio", beta, w - target)  # (B, H, C) x (B, H, d_in, d_out)
            w_t = w_0 + torch.einsum("bhtj,bhjio->bhtio", retains, s_t)  # (B, H, C, C) x (B, H, C, d_in, d_out)
            new_weights.append(w_t + target[..., None, :, :])
            new_momentum.append(s_t)
        # 5. y_t = M_t(q_t) (eq. 15), and the state at the chunk's end
        retrieved.append(_memory(tuple(new_weights), q, rule.network))  # (B, H, C, d_in) x (B, H, C, d_in, d_out)
        weights = tuple(w[:, :, -1] for w in new_weights)
        momentum = tuple(s[:, :, -1] for s in new_momentum)
    after = MemoryState(weights, momentum, anchor, state.num_seen + keys.shape[2])
    return MemorizeOutput(torch.cat(retrieved, dim=2), torch.cat(surprise, dim=2), after)


def _products(gate: Tensor) -> tuple[Tensor, Tensor]:
    """Multiplies gates (B, H, C) over l <= t, (B, H, C), and over j < l <= t at [t, j], (B, H, C, C); 0 for j > t."""
    rows = [
        torch.cat(
            [torch.zeros_like(gate[..., :j]), torch.ones_like(gate[..., j : j + 1]), gate[..., j + 1 :].cumprod(-1)],
            dim=-1,
        )
        for j in range(gate.shape[-1])
    ]
    return gate.cumprod(-1), torch.stack(rows, dim=-1)
