"""Closed-form products of the per-token gates within a chunk, in log space.

Unrolling eq. 13-14 from the chunk's start (weights M_0, less those that forgetting leads back to, momentum S_0,
gradients g_i all taken at the start, eq. 16):

    M_t = beta_t M_0 + f_t S_0 - sum_{i<=t} G_ti g_i        G = (R E) diag(theta)     f = R m
    S_T = m_T S_0 - sum_i E_Ti theta_i g_i                  R_tj = prod_{j<l<=t} (1 - alpha_l)
                                                            E_ji = prod_{i<l<=j} eta_l

Shapes: ... batch and heads, C tokens of the chunk.
"""

from typing import NamedTuple

from torch import Tensor


class GateProducts(NamedTuple):
    write: Tensor  # G (..., C, C): share of token i's gradient in the weights after token t
    retain: Tensor  # beta (..., C): share of the weights at the chunk's start left after token t
    carry: Tensor  # f (..., C): what the momentum at the chunk's start has added after token t
    momentum_write: Tensor  # E_Ti theta_i (..., C): share of token i's gradient in the momentum at the chunk's end
    momentum_carry: Tensor  # m_T (...): share of the momentum at the chunk's start left at its end


class GateParts(NamedTuple):
    """What the products are made of; a slot without a token has nothing in R's column."""

    retain: Tensor  # R (..., C, C)
    momentum: Tensor  # E (..., C, C)
    both: Tensor  # R E (..., C, C)
    momentum_decay: Tensor  # m (..., C)


def segment_products(log_decay: Tensor) -> Tensor:
    """(..., C) -> (..., C, C): product of the decays at j < l <= t at [t, j], 0 above the diagonal.

    Their logarithms are summed directly, not as a difference of two cumulative sums: exact for decays of any size,
    -inf (a gate of 0) included. Transposed on the way: sums along rows are twice as fast.
    """
    terms = log_decay[..., None, :].expand(*log_decay.shape, log_decay.shape[-1])
    return terms.triu(1).cumsum(-1).exp().triu().mT


def _of_tokens(filled: Tensor | None, *per_slot: Tensor) -> tuple[Tensor, ...]:
    """0 where no token lies."""
    return per_slot if filled is None else tuple(x.masked_fill(~filled, 0.0) for x in per_slot)


def gate_products(
    inner_lr: Tensor, log_momentum_decay: Tensor, log_retain: Tensor, filled: Tensor | None = None
) -> tuple[GateProducts, GateParts]:
    """theta, log eta and log(1 - alpha), each (..., C); `filled` (..., C) is False where no token lies."""
    inner_lr, log_momentum_decay, log_retain = _of_tokens(filled, inner_lr, log_momentum_decay, log_retain)
    retain_products = segment_products(log_retain)  # R
    momentum_products = segment_products(log_momentum_decay)  # E
    if filled is not None:
        # A slot without a token leaves the weights alone: it must not add the momentum to them once more.
        retain_products = retain_products * filled[..., None, :]
    momentum_decay = log_momentum_decay.cumsum(-1).exp()  # m
    both = retain_products @ momentum_products
    products = GateProducts(
        write=both * inner_lr[..., None, :],
        retain=log_retain.cumsum(-1).exp(),
        carry=(retain_products @ momentum_decay[..., None]).squeeze(-1),
        momentum_write=momentum_products[..., -1, :] * inner_lr,
        momentum_carry=momentum_decay[..., -1],
    )
    return products, GateParts(retain_products, momentum_products, both, momentum_decay)


def gate_products_backward(
    grad: GateProducts, products: GateProducts, parts: GateParts, inner_lr: Tensor, filled: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to `gate_products` -> to theta, log eta and log(1 - alpha)."""
    (inner_lr,) = _of_tokens(filled, inner_lr)
    grad_lr = (grad.write * parts.both).sum(-2) + grad.momentum_write * parts.momentum[..., -1, :]
    grad_write = grad.write * inner_lr[..., None, :]
    grad_retain = grad_write @ parts.momentum.mT + grad.carry[..., None] * parts.momentum_decay[..., None, :]
    grad_momentum = parts.retain.mT @ grad_write
    grad_momentum[..., -1, :] += grad.momentum_write * inner_lr
    grad_decay = (parts.retain.mT @ grad.carry[..., None]).squeeze(-1)
    grad_decay[..., -1] += grad.momentum_carry
    grads = (
        grad_lr,
        _segment_backward(grad_momentum * parts.momentum) + _suffix_sums(grad_decay * parts.momentum_decay, -1),
        _segment_backward(grad_retain * parts.retain) + _suffix_sums(grad.retain * products.retain, -1),
    )
    return _of_tokens(filled, *grads)


def _suffix_sums(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)


def _segment_backward(grad: Tensor) -> Tensor:
    """Gradients with respect to the sums over j < l <= t, at [t, j] -> to the terms: sums over j < l <= t of these."""
    return _suffix_sums(grad, -2).tril(-1).sum(-1)
