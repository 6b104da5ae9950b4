"""The rule of the memory on a page: a matrix of features that learns by the delta rule while it reads.

    delta_t = 2 / max(1, |k_t|^2) (k_t M_{t-1} - v_t)       gradient of |k M - v|^2 at the weights before (eq. 10, 12)
    S_t = eta_t S_{t-1} - theta_t k_t (x) delta_t           momentum (eq. 10, 14)
    M_t = (1 - alpha_t) (M_{t-1} - M_0) + M_0 + S_t         forgetting, to the learned M_0 (eq. 13)
    o_t = q_t M_t                                           reading (eq. 15)

k_t and q_t are the features of a key and of a query. `token` is these equations. `piece` computes many tokens at once
and exactly: the deltas of a chunk solve a triangular system, and only the states at the starts of the chunks are
computed one after the other. The backward is autograd's. `memory_reference` is the loop that tests compare with.

Shapes: B rows, H heads, T tokens, K features, V entries of a value, P chunks of C tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import gelu, relu, silu
from torch.utils.checkpoint import checkpoint

# Tokens that are computed at once: on a CPU their products stay in its cache, on a GPU fewer kernels are started.
PIECE = {"cpu": 512, "cuda": 4096}
SMALLEST_SQUARE = 1e-6  # added to the square of the length of a product of features
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu": gelu, "relu": relu, "identity": lambda x: x}

# o and delta (B, H, T, V), and the state after the last token, M and S (B, H, K, V); S is None without momentum.
Results = tuple[Tensor, Tensor, Tensor, Tensor | None]


def features(x: Tensor, hidden: Sequence[Tensor], activation: str) -> Tensor:
    """Computes the features of keys or queries (B, H, T, D) by the hidden layers, which are fixed while reading.

    hidden: (H, d_in, d_out) of each hidden layer. activation: a name of `ACTIVATIONS`, or "product": the halves of a
    layer's output (..., 2 K) are multiplied and the result is divided by its length. Returns (B, H, T, K).
    """
    for weight in hidden:
        x = x @ weight  # (T, d_in) @ (d_in, d_out)
        if activation == "product":
            one, other = x.chunk(2, dim=-1)
            x = one * other
            x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + SMALLEST_SQUARE)
        else:
            x = ACTIVATIONS[activation](x)
    return x


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    log_eta: Tensor | None,
    log_retain: Tensor,
    m_0: Tensor,
    m: Tensor,
    s: Tensor | None,
    filled: Tensor | None = None,
    *,
    chunk_size: int = 64,
    recompute: bool = False,
) -> Results:
    """Updates the memory with T tokens and reads the query of each token after the update by this token.

    Args:
        q, k: (B, H, T, K), features of queries and keys. v: (B, H, T, V). All tensors have the dtype of the state.
        theta, log_eta, log_retain: (B, H, T); log_retain is log(1 - alpha). log_eta is None without momentum.
        m_0: (H, K, V), the weights to which forgetting leads.
        m, s: (B, H, K, V), weights and momentum before the first token. s is None without momentum.
        filled: (B, T) bool, False at slots without a token, where results are undefined; None if all slots have one.
        chunk_size: tokens whose deltas are one system. The results do not depend on it.
        recompute: keep only the inputs of a piece for the backward, which computes the piece again.
    """
    if q.shape[2] == 1 and filled is None:
        return token(q, k, v, theta, log_eta, log_retain, m_0, m, s)
    compute: Callable[..., Results] = piece
    if recompute:
        compute = partial(checkpoint, piece, use_reentrant=False, preserve_rng_state=False)
    outputs, deltas, size = [], [], PIECE.get(q.device.type, PIECE["cpu"])
    for begin in range(0, q.shape[2], size):
        of_tokens = (
            None if x is None else x[:, :, begin : begin + size] for x in (q, k, v, theta, log_eta, log_retain)
        )
        slots = None if filled is None else filled[:, begin : begin + size]
        o, delta, m, s = compute(*of_tokens, m_0, m, s, slots, chunk_size)
        outputs.append(o)
        deltas.append(delta)
    return torch.cat(outputs, 2), torch.cat(deltas, 2), m, s


def token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    log_eta: Tensor | None,
    log_retain: Tensor,
    m_0: Tensor,
    m: Tensor,
    s: Tensor | None,
) -> Results:
    """Computes `delta_rule` for one token, T = 1, by the equations."""
    delta = error_of(k, v, m)
    kept = torch.lerp(m_0, m, log_retain.exp()[..., None])  # (1 - alpha) (M - M_0) + M_0
    if s is None or log_eta is None:
        m = kept.addcmul_(k.mT, theta[..., None] * delta, value=-1)
    else:
        s = (log_eta.exp()[..., None] * s).addcmul_(k.mT, theta[..., None] * delta, value=-1)
        m = kept.add_(s)
    return q @ m, delta, m, s


def error_of(k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """Computes delta = 2 / max(1, |k|^2) (k M - v): (B, H, T, V)."""
    return 2 / k.square().sum(-1, keepdim=True).clamp(min=1.0) * (k @ m - v)  # (T, K) @ (K, V)


def piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    log_eta: Tensor | None,
    log_retain: Tensor,
    m_0: Tensor,
    m: Tensor,
    s: Tensor | None,
    filled: Tensor | None,
    chunk_size: int,
) -> Results:
    """Computes `delta_rule` in chunks.

    From the start of a chunk, where the weights are M and the momentum is S:

        M_t = beta_t (M - M_0) + f_t S + M_0 - sum_{i<=t} G_ti k_i (x) delta_i       G = (R E) diag(theta),  f = R eta'
        S_T = eta'_T S - sum_i E_Ti theta_i k_i (x) delta_i

    R_tj and E_tj are the products of 1 - alpha and of eta over j < l <= t, beta_t and eta'_t the products from the
    chunk's start. Row t of a factor belongs to the weights after token t, so the row above it to the weights before.
    """
    length, features, values = q.shape[2], k.shape[-1], v.shape[-1]
    padding = -length % chunk_size
    if padding and filled is None:
        filled = torch.ones(len(q), length, dtype=torch.bool, device=q.device)

    def chunks(x: Tensor, dim: int = 2) -> Tensor:  # (B, H, T, ...) -> (B, H, P, C, ...)
        return F.pad(x, (0, 0) * (x.dim() - dim - 1) + (0, padding)).unflatten(dim, (-1, chunk_size))

    q, k, v, theta, log_retain = map(chunks, (q, k, v, theta, log_retain))
    log_eta = None if log_eta is None else chunks(log_eta)
    m_0 = m_0[:, None]  # the same in every chunk

    # 1. All chunks at once: the gates multiplied up.
    steps, starts, decayed, to_momentum = unroll(
        theta, log_eta, log_retain, None if filled is None else chunks(filled, 1)[:, None]
    )

    # 2. All chunks at once: delta_i contains the earlier writes of its chunk. So the deltas are solved for, as a
    #    constant plus a matrix that the start of the chunk is multiplied by.
    before = F.pad(starts, (0, 0, 1, -1))
    before[..., 0, 0] = 1.0
    scale = 2 / k.square().sum(-1, keepdim=True).clamp(min=1.0)
    system = F.pad(steps, (0, 0, 1, -1)) * (scale * k @ k.mT)  # (C, K) @ (K, C), strictly lower triangular
    right = [scale * (k @ m_0 - v), *(scale * share[..., None] * k for share in before.unbind(-1))]
    solved = torch.linalg.solve_triangular(system, torch.cat(right, -1), upper=False, unitriangular=True)
    constant, of_start = solved.split([values, solved.shape[-1] - values], -1)
    written = steps[..., -1, :, None] * k  # (C, K)
    written = written if to_momentum is None else torch.cat([written, to_momentum * k], -1)  # (C, 2 K)

    # 3. From chunk to chunk: the deltas, and the state, M - M_0 above S. Its end is a mixture of its start, minus the
    #    written products. Rows and heads are one dimension here.
    mixture = starts[..., -1, None, :]  # (1, 1): beta; (2, 2): beta and f, 0 and eta'
    if decayed is not None:
        mixture = torch.cat([mixture, F.pad(decayed[..., -1:, :], (1, 0))], -2)
    state = m - m_0[:, 0] if s is None else torch.cat([m - m_0[:, 0], s], -2)
    state, states, deltas = state.flatten(0, 1).contiguous(), [], []  # (2 K, V)
    # Not by indexing: its backward makes a tensor of the full size for every chunk, which is quadratic.
    by_chunk = (x.flatten(0, 1).unbind(1) for x in (constant, of_start, mixture, written))
    for constant_c, of_start_c, mixture_c, written_c in zip(*by_chunk, strict=True):
        states.append(state)
        deltas.append(torch.baddbmm(constant_c, of_start_c, state))  # (C, 2 K) @ (2 K, V)
        kept = (mixture_c @ state.unflatten(1, (-1, features)).flatten(2)).reshape(state.shape)  # (2, 2) @ (2, K V)
        state = torch.baddbmm(kept, written_c.mT, deltas[-1], alpha=-1)  # (2 K, C) @ (C, V)
    states, deltas = (torch.stack(x, 1).unflatten(0, q.shape[:2]) for x in (states, deltas))

    # 4. All chunks at once: what the queries read.
    reads = torch.cat([share[..., None] * q for share in starts.unbind(-1)], -1)  # (C, 2 K)
    o = reads @ states + q @ m_0 - (steps * (q @ k.mT)) @ deltas  # (C, C) @ (C, V)
    o, deltas = (x.flatten(2, 3)[:, :, :length] for x in (o, deltas))
    state = state.unflatten(0, q.shape[:2])
    m, s = state[..., :features, :] + m_0[:, 0], None if s is None else state[..., features:, :].clone()
    return o, deltas, m, s


def unroll(
    theta: Tensor, log_eta: Tensor | None, log_retain: Tensor, filled: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Multiplies the gates (..., C) of a chunk up, as the equations of `piece` use them. filled: as the gates.

    Returns G (..., C, C), beta and f (..., C, 2), eta' and the last row of E times theta (..., C, 1); without momentum
    beta alone (..., C, 1), and None for the last two.
    """
    if filled is not None:  # an empty slot writes nothing, forgets nothing, and does not add the momentum again
        theta, log_retain = theta * filled, log_retain.masked_fill(~filled, 0)
        log_eta = None if log_eta is None else log_eta.masked_fill(~filled, 0)
    retain, beta = products(log_retain), log_retain.cumsum(-1).exp()[..., None]  # R (C, C), beta (C, 1)
    retain = retain if filled is None else retain * filled[..., None, :]
    if log_eta is None:
        return retain * theta[..., None, :], beta, None, None
    decay, decayed = products(log_eta), log_eta.cumsum(-1).exp()[..., None]  # E (C, C), eta' (C, 1)
    starts = torch.cat([beta, retain @ decayed], -1)
    return (retain @ decay) * theta[..., None, :], starts, decayed, (decay[..., -1, :] * theta)[..., None]


def products(log_gate: Tensor) -> Tensor:
    """Multiplies gates over j < l <= t at [t, j], 0 for j > t: (..., C) -> (..., C, C)."""
    return log_gate[..., None, :].expand(*log_gate.shape, log_gate.shape[-1]).triu(1).cumsum(-1).exp().triu().mT
