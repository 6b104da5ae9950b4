"""The products of the per-token gates within a chunk in closed form, in log space.

Unrolling eq. 13-14 from the chunk's start, where the weights less the decay target are W_0, the momentum is S_0 and all
gradients g_i are taken (eq. 16):

    W_t = beta_t W_0 + f_t S_0 - sum_{i<=t} G_ti g_i        G = (R E) diag(theta)     f = R m
    S_T = m_T S_0 - sum_i E_Ti theta_i g_i                  R_tj = prod_{j<l<=t} (1 - alpha_l)
                                                            E_ji = prod_{i<l<=j} eta_l

Shapes: ... batch and heads, C tokens of the chunk.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad


class Gates(NamedTuple):
    """theta, log eta (None without momentum) and log(1 - alpha) of each token, or the gradients with respect to them:
    one shape, (..., C) here.
    """

    inner_lr: Tensor
    log_momentum_decay: Tensor | None
    log_retain: Tensor


def zero_of(x: Tensor) -> Tensor:
    """Returns a 0 that depends on x in the autograd graph, so that the gradient of x is 0 and not None."""
    return x[..., :0].sum()


class GateProducts(NamedTuple):
    """Factors by which the start of a chunk and its tokens' gradients enter later weights and momenta."""

    gradient_to_weights: Tensor  # G (..., C, C): share of token i's gradient in the weights after token t
    weights_decay: Tensor  # beta (..., C): share of the chunk-start weights in the weights after token t
    # None without momentum:
    momentum_to_weights: Tensor | None  # f (..., C): share of the chunk-start momentum in the weights after token t
    gradient_to_momentum: Tensor | None  # E_Ti theta_i (..., C): of token i's gradient in the momentum at the end
    momentum_decay: Tensor | None  # m_T (...): share of the chunk-start momentum in the momentum at the chunk's end


def segment_products(log_decay: Tensor) -> Tensor:
    """Computes the product of the decays at j < l <= t at entry [t, j], 0 above the diagonal: (..., C) -> (..., C, C).

    The logarithms are summed directly, not as a difference of two cumulative sums: exact for decays of any size, -inf
    (a gate of 0) included. The sum runs along rows and is transposed: twice as fast as along columns.
    """
    terms = log_decay[..., None, :].expand(*log_decay.shape, log_decay.shape[-1])
    return terms.triu(1).cumsum(-1).exp().triu().mT


def _zero_empty_slots(filled: Tensor | None, *per_slot: Tensor | None) -> tuple[Tensor | None, ...]:
    """Sets values per slot (..., C) to 0 at slots without a token."""
    if filled is None:
        return per_slot
    return tuple(None if x is None else x.masked_fill(~filled, 0.0) for x in per_slot)


def gate_products(
    inner_lr: Tensor, log_momentum_decay: Tensor | None, log_retain: Tensor, filled: Tensor | None = None
) -> tuple[GateProducts, tuple[Tensor | None, ...]]:
    """Computes the products from theta, log eta (None without momentum) and log(1 - alpha), each (..., C); `filled`
    (..., C) is False at slots without a token.

    Also returns what the backward needs: R, whose columns at empty slots are 0, and R E (R without momentum),
    (..., C, C) each; E (..., C, C) and eta of the first token (..., 1), both None without momentum.
    """
    inner_lr, log_momentum_decay, log_retain = _zero_empty_slots(filled, inner_lr, log_momentum_decay, log_retain)
    retain_products = segment_products(log_retain)  # R
    if filled is not None:
        # An empty slot leaves the weights unchanged: it must not add the momentum to them once more.
        retain_products = retain_products * filled[..., None, :]
    weights_decay = log_retain.cumsum(-1).exp()  # beta
    if log_momentum_decay is None:  # the gradients are the steps: E is the identity
        products = GateProducts(retain_products * inner_lr[..., None, :], weights_decay, None, None, None)
        return products, (retain_products, retain_products, None, None)
    momentum_products = segment_products(log_momentum_decay)  # E
    first_decay = log_momentum_decay[..., :1].exp()  # m is eta_0 times the first column of E, so that f is that of R E
    combined_products = retain_products @ momentum_products  # R E: (..., C, C) @ (..., C, C)
    products = GateProducts(
        gradient_to_weights=combined_products * inner_lr[..., None, :],  # G = (R E) diag(theta)
        weights_decay=weights_decay,
        momentum_to_weights=combined_products[..., 0] * first_decay,  # f = R m
        gradient_to_momentum=momentum_products[..., -1, :] * inner_lr,  # E_T diag(theta)
        momentum_decay=momentum_products[..., -1, 0] * first_decay[..., 0],  # m_T
    )
    return products, (retain_products, combined_products, momentum_products, first_decay)


def gate_products_backward(
    grad: GateProducts,
    products: GateProducts,
    intermediates: tuple[Tensor | None, ...],
    inner_lr: Tensor,
    filled: Tensor | None = None,
) -> Gates:
    """Computes the gradients with respect to the gates from the gradients with respect to their products."""
    (inner_lr,) = _zero_empty_slots(filled, inner_lr)
    retain, combined, momentum, first_decay = intermediates
    # 1. G = (R E) diag(theta), f = eta_0 (R E)_0 and E_T diag(theta), with respect to theta and R E
    grad_lr = (grad.gradient_to_weights * combined).sum(-2)
    grad_combined = grad.gradient_to_weights * inner_lr[..., None, :]
    grad_beta = _suffix_sums(grad.weights_decay * products.weights_decay)
    if momentum is None:
        grad_log_retain = _segment_sums_backward(grad_combined * retain) + grad_beta
        return Gates(*_zero_empty_slots(filled, grad_lr, None, grad_log_retain))
    grad_lr = grad_lr + grad.gradient_to_momentum * momentum[..., -1, :]
    grad_combined[..., 0] += grad.momentum_to_weights * first_decay
    # 2. The same, E_T diag(theta) and m_T = eta_0 E_T0, with respect to R and E
    grad_retain = grad_combined @ momentum.mT
    grad_momentum = retain.mT @ grad_combined
    grad_momentum[..., -1, :] += grad.gradient_to_momentum * inner_lr
    grad_momentum[..., -1, 0] += grad.momentum_decay * first_decay[..., 0]
    # 3. R and beta with respect to log(1 - alpha), E and eta_0 with respect to log eta
    grad_log_decay = _segment_sums_backward(grad_momentum * momentum)
    of_first = (grad.momentum_to_weights * products.momentum_to_weights).sum(-1)
    grad_log_decay[..., 0] += of_first + grad.momentum_decay * products.momentum_decay
    grads = (grad_lr, grad_log_decay, _segment_sums_backward(grad_retain * retain) + grad_beta)
    return Gates(*_zero_empty_slots(filled, *grads))


def _suffix_sums(x: Tensor) -> Tensor:
    """Sums each entry and those after it: (..., C)."""
    return x.flip(-1).cumsum(-1).flip(-1)


def _segment_sums_backward(grad: Tensor) -> Tensor:
    """Computes the gradients with respect to x_l (..., C) from the gradients of the sums over j < l <= t at [t, j], 0
    above the diagonal.
    """
    # Not as the sum of the columns j < l less that of the rows t < l: eta's gradient would be ten times less exact.
    return pad(grad.cumsum(-1).tril(-1).sum(-2)[..., :-1], (1, 0))
