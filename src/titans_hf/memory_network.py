"""The memory as a function: a bias-free MLP whose weights are the state (paper section 3.1), and its gradient.

M(x) = W_L silu(... silu(W_1 x)), one weight matrix per layer, applied from the right: x @ W.
Shapes: B batch, H heads, T tokens, D head size, F hidden size; layer l maps d_in to d_out.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

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


def gradient_factors(
    keys: Tensor, values: Tensor, weights: Sequence[Tensor], error_clip: float | None
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradient of |M(k) - v|^2 (eq. 12) in every layer, one rank-one matrix per token, as its two factors.

    Token i's gradient of layer l is inputs[l][i] (x) deltas[l][i]. With `error_clip` kappa, the error e = M(k) - v
    enters as e * min(1, kappa |v| / |e|), and no layer's gradient may be longer than 4 kappa |v|, twice the longest
    that a one-layer memory with a unit key can have: the weights then grow at most linearly with the tokens read,
    whatever they are.

    keys, values (B, H, T, D); weights (B, H, d_in, d_out) -> two lists of (B, H, T, d_in) and (B, H, T, d_out).
    """
    inputs, sigmoids = [keys], []
    for weight in weights[:-1]:
        pre_activation = inputs[-1] @ weight
        sigmoids.append(torch.sigmoid(pre_activation))
        inputs.append(pre_activation * sigmoids[-1])
    error = inputs[-1] @ weights[-1] - values
    if error_clip is None:
        limit = None
    else:
        limit = error_clip * values.norm(dim=-1, keepdim=True)
        error = error * clip_scale(error.norm(dim=-1, keepdim=True), limit)
    delta = 2 * error
    deltas = [delta]
    for weight, sigmoid, hidden in zip(weights[:0:-1], sigmoids[::-1], inputs[:0:-1], strict=True):
        # silu'(z) = s + silu(z) (1 - s) with s = sigmoid(z)
        delta = (delta @ weight.mT) * (sigmoid + hidden * (1 - sigmoid))
        deltas.append(delta)
    deltas.reverse()
    if limit is not None:
        deltas = [d * clip_scale(surprise(x, d), 4 * limit) for x, d in zip(inputs, deltas, strict=True)]
    return inputs, deltas


def surprise(inputs: Tensor, delta: Tensor) -> Tensor:
    """The norm of a token's gradient of one layer, |h (x) delta| = |h| |delta|: (B, H, T, 1)."""
    return inputs.norm(dim=-1, keepdim=True) * delta.norm(dim=-1, keepdim=True)
