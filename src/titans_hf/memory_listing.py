"""The two rules of the memory in chunks, a page of plain PyTorch each, with autograd's backward.

`torch_chunk_comba` is the delta form: one linear layer, the delta rule, forgetting to the initial weights.
`torch_chunk_titans` is the deep form: an MLP of any depth with the gradients of a chunk at the weights of its start
(the last layer's by the delta rule), momentum, clipping and forgetting to the initial weights.

`memory_ops.memorize` computes the same results faster or in less memory, also with padding, documents and rows that
start within a chunk. Equation numbers are the paper's (arXiv 2501.00663).
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import silu


def torch_chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Computes a linear memory with the delta rule; names and layout as in `fla.ops.comba.chunk_comba`.

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - p_t S_{t-1})        o_t = scale q_t S_t

    The memory of `memorize` with one layer, M_0 as the decay target and no momentum is M = M_0 + S (eq. 10, 13). Its
    values are v + k M_0, g = log(1 - alpha), beta = 2 theta / max(1, |k|^2), p = k, scale = 1; it retrieves o + q M_0.

    Args:
        q, k, p: (B, T, H, K); queries, keys, and the keys by which the state is read before it is written.
        v: (B, T, H, V).
        g, beta: (B, T, H); g is at most 0.
        scale: factor of the queries; K^-0.5 by default.
        initial_state: S_0, (B, H, K, V); 0 by default.

    Returns o (B, T, H, V) in the dtype of q, and the state after the last token, or None.
    """
    dtype, num_tokens = q.dtype, q.shape[1]
    scale = k.shape[-1] ** -0.5 if scale is None else scale

    # In float32 at least, as (B, H, chunks, C, ...). Slots that pad the last chunk write and forget nothing.
    q, k, v, p, g, beta = (
        F.pad(x.movedim(1, -1), (0, -num_tokens % chunk_size))
        .movedim(-1, 2)
        .unflatten(2, (-1, chunk_size))
        .to(torch.promote_types(dtype, torch.float32))
        for x in (q, k, v, p, g, beta)
    )

    # First phase: all chunks at once. decay[t, j] = prod_{j<l<=t} exp(g_l), 0 for j > t, from sums of logarithms.
    decay = g[..., None, :].expand(*g.shape, chunk_size).triu(1).cumsum(-1).exp().triu().mT  # (C, C)
    from_start = g.cumsum(-1).exp()[..., None]  # (C, 1), of S_0 after token t
    # Row i holds the factors before token i, which are the factors after token i - 1.
    decay_before, from_start_before = F.pad(decay, (0, 0, 1, -1)), F.pad(from_start, (0, 0, 1, -1), value=1.0)

    # Token i writes u_i = beta_i (v_i - p_i S_{i-1}). S_{i-1} holds the writes of the tokens j < i, so u solves
    # (I + A) u = beta (v - from_start_before p S_0), A_ij = beta_i decay_before_ij (p_i . k_j).
    beta = beta[..., None]
    system = beta * decay_before * (p @ k.mT)  # (C, K) @ (K, C), strictly lower triangular
    right_sides = torch.cat([beta * v, beta * from_start_before * p], dim=-1)  # (C, V + K)
    solved = torch.linalg.solve_triangular(system, right_sides, upper=False, unitriangular=True)
    written, reads_of_start = solved.split([v.shape[-1], p.shape[-1]], dim=-1)  # u = written - reads_of_start S_0

    scores = decay * (q @ k.mT) * scale  # (C, K) @ (K, C): token t's reads of the chunk's tokens
    q, k = scale * from_start * q, decay[..., -1, :, None] * k
    state = v.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]) if initial_state is None else initial_state.to(v)

    # Second phase: from chunk to chunk.
    outputs = []
    for c in range(q.shape[2]):
        u = written[:, :, c] - reads_of_start[:, :, c] @ state  # (C, K) @ (K, V)
        outputs.append(q[:, :, c] @ state + scores[:, :, c] @ u)  # (C, K) @ (K, V) + (C, C) @ (C, V): eq. 15
        state = from_start[:, :, c, -1:] * state + k[:, :, c].mT @ u  # (K, C) @ (C, V): eq. 13

    outputs = torch.cat(outputs, dim=2)[:, :, :num_tokens].transpose(1, 2).to(dtype)
    return outputs, state if output_final_state else None


def torch_chunk_titans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    log_eta: Tensor,
    log_retain: Tensor,
    initial_weights: list[Tensor],
    weights: list[Tensor],
    momentum: list[Tensor],
    error_clip: float | None = None,
    hidden_step: float | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Computes a memory M(x) = W_L silu(... silu(W_1 x)) with the gradients of a chunk at the weights of its start.

        S_t = eta_t S_{t-1} - theta_t u_t        M_t = (1 - alpha_t) (M_{t-1} - M_0) + S_t + M_0        o_t = M_t(q_t)

    u_t is the gradient of |M(k_t) - v_t|^2 (eq. 12) at the weights of the chunk's start (eq. 16). In every layer it is
    a product of two vectors, h_t (x) delta_t, so that no weights of a single token are formed.

    Args:
        q, k, v: (B, T, H, D).
        theta, log_eta, log_retain: (B, T, H); log_retain is log(1 - alpha).
        initial_weights: M_0 of each layer, (H, d_in, d_out) or (B, H, d_in, d_out); forgetting leads to it.
        weights, momentum: M and S before the first token, which starts a chunk: (B, H, d_in, d_out) of each layer.
        error_clip: kappa; None for no clip. The error M(k) - v is clipped at kappa |v|, a layer's gradient at
            4 kappa |v|.
        hidden_step: with the delta rule, the factor of the hidden layers' steps. The last layer's error is
            taken at M_{t-1} (eq. 10) and is not clipped. None: no delta rule, so all layers' errors are taken at the
            chunk's start.

    Returns o (B, T, H, D), and weights and momentum after the last token.
    """
    outputs = []
    tokens = (x.transpose(1, 2).split(chunk_size, dim=2) for x in (q, k, v, theta, log_eta, log_retain))
    for q_c, k_c, v_c, theta_c, log_eta_c, log_retain_c in zip(*tokens, strict=True):  # (B, H, C, D) and (B, H, C)
        # 1. h: the inputs of the layers for the keys, at the chunk's start. slope = silu'(z)
        h, slopes = [k_c], []
        for w in weights[:-1]:
            z = h[-1] @ w  # (C, d_in) @ (d_in, d_out)
            h.append(silu(z))
            slopes.append(torch.sigmoid(z) + h[-1] * torch.sigmoid(-z))

        # 2. delta: the gradient of the loss behind each layer, from the last layer to the first (eq. 12, 16)
        limit = torch.inf if error_clip is None else error_clip * v_c.norm(dim=-1, keepdim=True)
        error = h[-1] @ weights[-1] - v_c  # (C, d_in) @ (d_in, D)
        delta = [2 * _clip(error.norm(dim=-1, keepdim=True), limit) * error]
        for w, slope in zip(weights[:0:-1], slopes[::-1], strict=True):
            delta.insert(0, slope * (delta[0] @ w.mT))  # (C, d_out) @ (d_out, d_in)
        norms = [x.norm(dim=-1, keepdim=True) * d.norm(dim=-1, keepdim=True) for x, d in zip(h, delta, strict=True)]
        delta = [_clip(norm, 4 * limit) * d for norm, d in zip(norms, delta, strict=True)]

        # 3. The gates multiplied up: R and E over j < l <= t at [t, j], beta and m from the chunk's start
        retain, decay = _products(log_retain_c), _products(log_eta_c)  # R, E (C, C)
        beta, m = (x.cumsum(-1).exp()[..., None] for x in (log_retain_c, log_eta_c))  # (C, 1)
        steps = (retain @ decay) * theta_c[..., None, :]  # G: of u_i in M_t, (C, C) @ (C, C) (eq. 13 and 14, unrolled)
        from_momentum = retain @ m  # f: of S_0 in M_t, (C, C) @ (C, 1)

        # 4. The delta rule: the last layer's errors at the weights before each token contain the writes of the chunk's
        #    earlier tokens, so its deltas solve a triangular system. Row i of a factor is its row after token i - 1.
        if hidden_step is not None:
            x, w, s, m_0 = h[-1], weights[-1], momentum[-1], initial_weights[-1]
            beta_before, f_before = F.pad(beta, (0, 0, 1, -1), value=1.0), F.pad(from_momentum, (0, 0, 1, -1))
            error = beta_before * (x @ (w - m_0)) + f_before * (x @ s) + x @ m_0 - v_c  # (C, d_in) @ (d_in, D)
            scale = 2 / x.square().sum(-1, keepdim=True).clamp(min=1.0)
            system = scale * F.pad(steps, (0, 0, 1, -1)) * (x @ x.mT)  # strictly lower triangular
            solved = torch.linalg.solve_triangular(system, scale * error, upper=False, unitriangular=True)
            delta = [*(hidden_step * d for d in delta[:-1]), solved]

        # 5. o_t = M_t(q_t) (eq. 15), layer by layer:
        #    x M_t = beta_t x (W - M_0) + f_t x S + x M_0 - sum_{i<=t} G_ti (x . h_i) delta_i
        x = q_c
        for layer, (w, s, m_0) in enumerate(zip(weights, momentum, initial_weights, strict=True)):
            x = silu(x) if layer > 0 else x
            scores = steps * (x @ h[layer].mT)  # (C, d_in) @ (d_in, C)
            start = beta * (x @ (w - m_0)) + from_momentum * (x @ s) + x @ m_0  # (C, d_in) @ (d_in, d_out)
            x = start - scores @ delta[layer]  # (C, C) @ (C, d_out)
        outputs.append(x)

        # 6. M and S at the chunk's end, where the last rows of the factors apply (eq. 13, 14)
        to_weights, to_momentum = steps[..., -1, :, None], decay[..., -1, :, None] * theta_c[..., None]  # (C, 1)
        end, m_end, f_end = beta[..., -1:, :], m[..., -1:, :], from_momentum[..., -1:, :]
        new = [
            (
                end * (w - m_0) + f_end * s + m_0 - (to_weights * x).mT @ d,  # (d_in, C) @ (C, d_out)
                m_end * s - (to_momentum * x).mT @ d,
            )
            for w, s, m_0, x, d in zip(weights, momentum, initial_weights, h, delta, strict=True)
        ]
        weights, momentum = map(list, zip(*new, strict=True))
    return torch.cat(outputs, dim=2).transpose(1, 2), weights, momentum


def _products(log_gate: Tensor) -> Tensor:
    """Multiplies gates over j < l <= t at [t, j], 0 for j > t: (..., C) -> (..., C, C)."""
    return log_gate[..., None, :].expand(*log_gate.shape, log_gate.shape[-1]).triu(1).cumsum(-1).exp().triu().mT


def _clip(norm: Tensor, limit: Tensor | float) -> Tensor:
    """Computes min(1, limit / norm), 1 where the norm is 0."""
    return torch.where(norm > limit, limit / torch.where(norm > limit, norm, 1.0), 1.0)
