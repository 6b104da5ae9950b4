"""The rule of `memory_rule` by the published kernels of flash-linear-attention (fla), on a GPU.

Without momentum, the memory is the gated delta rule; with momentum, it is a recurrence whose transition is diagonal
plus low rank (DPLR, the kernel of RWKV-7), with keys of twice the size. Both are exact for the gates that the layer
computes: eta < 1 - alpha, and no logarithm of a gate below -5. The state that one program leaves goes on in the other.

Shapes: B rows, H heads, T tokens, K features, V entries of a value; in fla's layout (B, T, H, ...).
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from transformers.utils import logging

from .memory_rule import products
from .token_grid import TokenGrid

logger = logging.get_logger(f"transformers.{__name__}")  # `transformers.logging.set_verbosity_info()` shows its lines

LARGEST_KEY = 256  # of fla's chunk kernels
BLOCK = 64  # tokens whose shares of the momentum are computed at once

Kernel = Callable[..., tuple[Tensor, Tensor]]
Results = tuple[Tensor, None, Tensor, Tensor | None]  # as in `memory_rule`, without delta


def choose_rule(
    requested: str, k: Tensor, has_momentum: bool, grid: TokenGrid, dtype: torch.dtype
) -> Callable[..., Results] | None:
    """Returns the rule by fla's kernel for keys k (B, H, T, K) if it can compute the update; None for `memory_rule`.

    requested: `TitansConfig.memory_kernel`. "auto" takes the kernel on CUDA in float32 for several tokens, where fla
    can be imported, the call does not ask for the surprise, and the model is not compiled, whose graph the kernel would
    break.
    dtype: of the hidden states. fla's kernel with momentum solves its systems in float16 and is off by 4e-3 where keys
    repeat, so it is taken for models in 16 bits alone.
    """
    if has_momentum and dtype.itemsize > 2:
        return None
    several = grid.num_slots > 1 and not grid.needs_surprise
    size = k.shape[-1] * (2 if has_momentum else 1)
    if requested == "torch" or not (several and k.is_cuda and k.dtype == torch.float32 and size <= LARGEST_KEY):
        return None
    kernel = None if torch.compiler.is_compiling() else _import_kernel(has_momentum)
    return kernel and partial(dplr_delta_rule if has_momentum else gated_delta_rule, kernel)


@cache
def _import_kernel(has_momentum: bool) -> Kernel | None:
    """Returns fla's kernel; None, with one line of log, if it cannot be imported. Nothing is imported on a CPU."""
    try:
        if has_momentum:
            from fla.ops.generalized_delta_rule.dplr import chunk_dplr_delta_rule as kernel
        else:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel
    except Exception as error:  # an fla that does not fit torch or Triton can raise any error
        logger.warning(
            f'The memory is updated by PyTorch: fla cannot be imported ({error}): pip install "titans_hf[gpu]".'
        )
        return None
    logger.info(f"The memory is updated by fla's {kernel.__name__}.")
    return kernel


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, log_retain: Tensor, m_0: Tensor, filled: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns beta = 2 theta / max(1, |k|^2) and log(1 - alpha) (B, H, T), 0 at empty slots, and v - k M_0
    (B, H, T, V): the kernels store M - M_0.
    """
    beta = 2 * theta / k.square().sum(-1).clamp(min=1.0)
    if filled is not None:
        beta, log_retain = (x.masked_fill(~filled[:, None], 0.0) for x in (beta, log_retain))
    return beta, log_retain, v - k @ m_0  # (T, K) @ (K, V)


def gated_delta_rule(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    log_eta: None,
    log_retain: Tensor,
    m_0: Tensor,
    m: Tensor,
    s: None,
    filled: Tensor | None = None,
    **_,
) -> Results:
    """Computes `memory_rule.delta_rule` without momentum by `chunk_gated_delta_rule`; delta is not returned.

    The kernel's rule multiplies the state by r = 1 - alpha before it is read: beta / r and r v in the place of beta and
    v make it the memory's.
    """
    beta, log_retain, v = _prepared(q, k, v, theta, log_retain, m_0, filled)
    retain = log_retain.exp()
    arguments = (q, k, v * retain[..., None], log_retain, beta / retain)
    o, state = kernel(
        *(x.transpose(1, 2) for x in arguments), scale=1.0, initial_state=m - m_0, output_final_state=True
    )
    return o.transpose(1, 2) + q @ m_0, None, state + m_0, None


def dplr_delta_rule(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    log_eta: Tensor,
    log_retain: Tensor,
    m_0: Tensor,
    m: Tensor,
    s: Tensor,
    filled: Tensor | None = None,
    **_,
) -> Results:
    """Computes `memory_rule.delta_rule` with momentum by `chunk_dplr_delta_rule`; delta is not returned.

    The kernel's state is [N; S], with N = M - M_0 - c S. c_{t-1} = (c_t - 1) eta_t / (1 - alpha_t), from c_T = 0
    backwards, makes the transition of N and S diagonal plus a product of two vectors.
    """
    beta, log_retain, v = _prepared(q, k, v, theta, log_retain, m_0, filled)
    counts = torch.ones_like(beta)
    if filled is not None:  # an empty slot adds no momentum
        log_eta, counts = log_eta.masked_fill(~filled[:, None], 0.0), counts * filled[:, None]
    c = momentum_shares(log_eta - log_retain, counts)[..., None]  # (B, H, T + 1, 1)
    before, now = c[:, :, :-1], c[:, :, 1:]
    write = beta[..., None] * torch.cat([(1 - now) * k, k], -1)  # (B, H, T, 2 K)
    erase, read = torch.cat([k, before * k], -1), torch.cat([q, now * q], -1)
    decay = torch.cat([log_retain[..., None].expand_as(k), log_eta[..., None].expand_as(k)], -1)
    start = torch.cat([m - m_0 - c[:, :, :1] * s, s], -2)  # (B, H, 2 K, V)
    arguments = (read, write, v, -erase, write, decay)
    o, state = kernel(
        *(x.transpose(1, 2) for x in arguments), scale=1.0, initial_state=start, output_final_state=True, safe_gate=True
    )
    m, s = state.chunk(2, dim=-2)
    return o.transpose(1, 2) + q @ m_0, None, m + m_0, s


def momentum_shares(log_ratio: Tensor, counts: Tensor) -> Tensor:
    """Computes c with c_{t-1} = (c_t - counts_t) exp(log_ratio_t) and c_T = 0, from (B, H, T): (B, H, T + 1)."""
    shares = [log_ratio.new_zeros(*log_ratio.shape[:2], 1)]
    for ratio, of_block in zip(log_ratio.split(BLOCK, 2)[::-1], counts.split(BLOCK, 2)[::-1], strict=True):
        # [t, j] is the product over j <= l <= t: of t's share in c_{j-1}
        ratios = products(ratio) * ratio.exp()[..., None, :]
        shares.append(ratios[..., -1, :] * shares[-1][..., :1] - (ratios * of_block[..., None]).sum(-2))
    return torch.cat(shares[::-1], -1)
