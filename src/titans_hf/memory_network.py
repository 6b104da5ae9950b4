"""The memory as a function: a bias-free MLP whose weights are the state (paper section 3.1), and its gradient.

M(x) = W_L silu(... silu(W_1 x)), one weight matrix per layer, applied from the right: x @ W.
Shapes: B batch, H heads, T tokens, D head size, F hidden size; layer l maps d_in to d_out.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu


def layer_shapes(head_dim: int, depth: int, expansion: int) -> list[tuple[int, int]]:
    """(d_in, d_out) of each of the `depth` layers: D -> F -> ... -> F -> D with F = expansion * D."""
    sizes = [head_dim, *[expansion * head_dim] * (depth - 1), head_dim]
    return list(pairwise(sizes))


def apply_layers(x: Tensor, layers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """The MLP with its linear maps given as functions: SiLU between them, none after the last."""
    for layer in layers[:-1]:
        x = silu(layer(x))
    return layers[-1](x)


def read(weights: Sequence[Tensor], queries: Tensor) -> Tensor:
    """M(q) (eq. 15): weights of (B, H, d_in, d_out), queries (B, H, T, D) -> (B, H, T, D)."""
    return apply_layers(queries, [partial(torch.matmul, other=weight) for weight in weights])


def clip_scale(norm: Tensor, limit: Tensor) -> Tensor:
    """min(1, limit / norm), without an epsilon: 1 where the norm is 0, and with a finite gradient everywhere."""
    exceeds = norm > limit
    return torch.where(exceeds, limit / torch.where(exceeds, norm, 1.0), 1.0)


class Factors(NamedTuple):
    """The gradient of |M(k) - v|^2 (eq. 12) in every layer, one rank-one matrix per token: inputs[l] (x) deltas[l].

    And what led there, for its own derivative: a list per layer, or per hidden layer.
    """

    inputs: list[Tensor]  # h (..., T, d_in)
    deltas: list[Tensor]  # (..., T, d_out), limited
    pre_activations: list[Tensor]  # z, hidden layers: the next layer's input is silu(z)
    sigmoids: list[Tensor]  # of z
    slopes: list[Tensor]  # silu'(z)
    returned: list[Tensor]  # what the next layer's delta is at silu(z)
    unlimited: list[Tensor]  # deltas before they are limited
    norms: list[Tensor]  # (..., T, 1), of the layers' gradients before they are limited
    scales: list[Tensor]  # (..., T, 1), what limits them; empty without a clip
    error: Tensor  # M(k) - v, before it is limited
    error_scale: Tensor | None  # (..., T, 1)


def gradient_factors(keys: Tensor, values: Tensor, weights: Sequence[Tensor], error_clip: float | None) -> Factors:
    """The gradient of the memory's loss as its factors.

    With `error_clip` kappa, the error e = M(k) - v enters as e * min(1, kappa |v| / |e|), and no layer's gradient may
    be longer than 4 kappa |v|, twice the longest that a one-layer memory with a unit key can have: the weights then
    grow at most linearly with the tokens read, whatever they are.

    keys, values (..., T, D); weights (..., d_in, d_out).
    """
    inputs, pre_activations, sigmoids = [keys], [], []
    for weight in weights[:-1]:
        pre_activations.append(inputs[-1] @ weight)
        sigmoids.append(torch.sigmoid(pre_activations[-1]))
        inputs.append(pre_activations[-1] * sigmoids[-1])
    error = inputs[-1] @ weights[-1] - values
    scale, scales = None, []
    if error_clip is None:
        unlimited = [2 * error]
    else:
        limit = error_clip * values.norm(dim=-1, keepdim=True)
        scale = clip_scale(error.norm(dim=-1, keepdim=True), limit)
        unlimited = [2 * scale * error]
    # silu'(z) = s + silu(z) (1 - s) with s = sigmoid(z)
    slopes = [torch.lerp(h, h.new_ones(()), s) for h, s in zip(inputs[1:], sigmoids, strict=True)]
    returned = []
    for weight, slope in zip(weights[:0:-1], slopes[::-1], strict=True):
        returned.append(unlimited[-1] @ weight.mT)
        unlimited.append(returned[-1] * slope)
    returned.reverse()
    unlimited.reverse()
    deltas, norms = unlimited, [surprise(x, d) for x, d in zip(inputs, unlimited, strict=True)]
    if error_clip is not None:
        scales = [clip_scale(norm, 4 * limit) for norm in norms]
        deltas = [d * c for d, c in zip(unlimited, scales, strict=True)]
    return Factors(inputs, deltas, pre_activations, sigmoids, slopes, returned, unlimited, norms, scales, error, scale)


def surprise(inputs: Tensor, delta: Tensor) -> Tensor:
    """The norm of a token's gradient of one layer, |h (x) delta| = |h| |delta|: (..., T, 1)."""
    return inputs.norm(dim=-1, keepdim=True) * delta.norm(dim=-1, keepdim=True)


def token_surprise(factors: Factors) -> Tensor:
    """The norm of a token's gradient of all layers, as it is written: (..., T)."""
    norms = torch.cat(factors.norms, dim=-1)
    if factors.scales:
        norms = norms * torch.cat(factors.scales, dim=-1)
    return norms.norm(dim=-1)
