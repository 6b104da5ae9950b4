"""The memory network: a bias-free MLP whose weights are the memory's state (paper section 3.1), and its gradient.

M(x) = W_L silu(... silu(W_1 x)), "mlp", or M(x) = x + LN(W_L gelu(... gelu(W_1 x))), "residual", as in the paper's
second version; one weight matrix per layer, multiplied from the right: x @ W. LN has no weights of its own.

This file contains the layers' shapes, the read, the gradient of the loss as rank-one factors per layer, and the
backward of both, for "residual" left to autograd. The update of the weights (`memory_chunk.py`) uses those factors;
with the delta rule, the last layer's factors are computed in `memory_chunk.py`.

Shapes: ... batch and heads, T tokens, D head size, F hidden size; layer l maps d_in to d_out.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, silu

Network = Literal["mlp", "residual"]
NORM_EPSILON = 1e-5  # of LN; docs/dev/log.md: "What version 2 leaves open", "Which step the literal model trains with"


def layer_shapes(head_dim: int, depth: int, expansion: int) -> list[tuple[int, int]]:
    """Returns (d_in, d_out) of each of the `depth` layers: D -> F -> ... -> F -> D with F = expansion * D."""
    sizes = [head_dim, *[expansion * head_dim] * (depth - 1), head_dim]
    return list(pairwise(sizes))


def apply_layers(x: Tensor, layers: Sequence[Callable[[Tensor], Tensor]], network: Network) -> Tensor:
    """Applies the network with its linear maps given as functions: no activation after the last."""
    activation, h = gelu if network == "residual" else silu, x
    for layer in layers[:-1]:
        h = activation(layer(h))
    h = layers[-1](h)
    return x + layer_norm(h, h.shape[-1:], eps=NORM_EPSILON) if network == "residual" else h


def read(weights: Sequence[Tensor], queries: Tensor, network: Network) -> Tensor:
    """Computes M(q) (eq. 15): weights (..., d_in, d_out), queries (..., T, D) -> (..., T, D)."""
    return apply_layers(queries, [partial(torch.matmul, other=weight) for weight in weights], network)


class LayerInputs(NamedTuple):
    """The input of every layer in `apply_layers` of an MLP, and silu' before every layer but the first."""

    inputs: list[Tensor]
    slopes: list[Tensor]


def layer_inputs(x: Tensor, layers: Sequence[Callable[[Tensor], Tensor]]) -> LayerInputs:
    """Computes the input of each layer of an MLP and the derivative of its SiLU, for the backward."""
    inputs, slopes = [x], []
    for layer in layers[:-1]:
        pre_activation = layer(inputs[-1])
        sigmoid = torch.sigmoid(pre_activation)
        inputs.append(pre_activation.mul_(sigmoid))
        slopes.append(_silu_slope(inputs[-1], sigmoid))
    return LayerInputs(inputs, slopes)


def _silu_slope(activation: Tensor, sigmoid: Tensor) -> Tensor:
    """Computes silu'(z) = s + silu(z) (1 - s) from silu(z) and s = sigmoid(z)."""
    return torch.lerp(activation, sigmoid.new_ones(()), sigmoid)


def clip_scale(norm: Tensor, limit: Tensor) -> Tensor:
    """Computes min(1, limit / norm) without an epsilon: 1 where the norm is 0, with a finite gradient everywhere."""
    exceeds = norm > limit
    return torch.where(exceeds, limit / torch.where(exceeds, norm, 1.0), 1.0)


class UpdateRule(NamedTuple):
    """The form of the memory network, and how the gradients that update it are computed.

    error_clip: kappa of `gradient_factors`; None for the paper's plain loss.
    delta_rule: take the last layer's error at the weights before each token (`memory_chunk`), not at the chunk's
    start; with an MLP only.
    network: "mlp", or "residual" with the delta rule off.
    hidden_step: with the delta rule, the hidden layers' steps are theta times this, because a chunk's gradients of
    theirs are taken at the same weights, and their sum can overshoot where the last layer's cannot.
    """

    error_clip: float | None
    delta_rule: bool = False
    network: Network = "mlp"
    hidden_step: float = 1.0

    def check(self) -> None:
        """Raises ValueError for an unknown network, and for the delta rule with another than an MLP."""
        if self.network not in get_args(Network):
            raise ValueError(f"`network` must be one of {', '.join(get_args(Network))}, but is {self.network!r}.")
        if self.delta_rule and self.network != "mlp":
            raise ValueError(f"`delta_rule` must be False with the network {self.network!r}, but is True.")

    def needs_anchor(self, depth: int) -> bool:
        """True if any gradient is taken at the weights of the chunk's start. With the delta rule, the gradients of all
        layers but the last are.
        """
        return depth > 1 or not self.delta_rule


class ChunkLayer(NamedTuple):
    """One layer of the memory network in a chunk, or the gradients with respect to it.

    offset (W), momentum (S) (N, d_in, d_out): at the chunk's start; the offset is the weights less the decay target,
    the momentum None without momentum.
    inputs h (N, C, d_in), deltas (N, C, d_out): the factors of the tokens' gradients; deltas None before the delta rule
    computes them.
    decay_target (M_0) (N, d_in, d_out): the weights that forgetting decays to; None for 0.
    """

    offset: Tensor
    momentum: Tensor | None
    inputs: Tensor
    deltas: Tensor | None
    decay_target: Tensor | None


class FactorsIntermediates(NamedTuple):
    """The intermediate results that the backward of `gradient_factors` of an MLP needs: lists with one entry per layer,
    or per hidden layer.
    """

    pre_activations: list[Tensor]  # z, hidden layers: the next layer's input is silu(z)
    sigmoids: list[Tensor]  # of z
    slopes: list[Tensor]  # silu'(z)
    grad_activations: list[Tensor]  # gradient of the loss with respect to silu(z)
    unclipped_deltas: list[Tensor]  # (..., T, d_out)
    error: Tensor  # M(k) - v, before clipping
    error_scale: Tensor | None  # (..., T, 1), the factor that clips it


class GradientFactors(NamedTuple):
    """The gradient of |M(k) - v|^2 (eq. 12) in every layer as one rank-one matrix per token, inputs[l] (x) deltas[l];
    lists with one entry per layer.
    """

    inputs: list[Tensor]  # h (..., T, d_in)
    deltas: list[Tensor]  # (..., T, d_out), clipped
    # (..., T, 1), the factors that clip the layers' gradients; none for the last layer with the delta rule, and none
    # without a clip
    gradient_scales: list[Tensor]
    intermediates: FactorsIntermediates | None  # None in a residual network, and without an anchor
    hidden_step: float = 1.0  # by which the deltas of the hidden layers are multiplied


def gradient_factors(keys: Tensor, values: Tensor, weights: Sequence[Tensor], rule: UpdateRule) -> GradientFactors:
    """Computes the gradient of the memory's loss (eq. 12), factored: keys, values (..., T, D), weights (..., d_in,
    d_out).

    With the rule's `error_clip` kappa, the error e = M(k) - v enters as e * min(1, kappa |v| / |e|), and the gradient
    of each layer is clipped at 4 kappa |v|, twice the largest that a one-layer memory with a unit key can have: the
    weights then grow at most linearly with the number of tokens, whatever the tokens are.
    """
    # docs/dev/log.md: "The inner loop blows up with the error clip alone" (4 kappa |v|)
    limit = None if rule.error_clip is None else rule.error_clip * values.norm(dim=-1, keepdim=True)
    if rule.network == "residual":
        return _residual_gradient_factors(keys, values, weights, limit)
    inputs, pre_activations, sigmoids = [keys], [], []
    for weight in weights[:-1]:
        pre_activations.append(inputs[-1] @ weight)
        sigmoids.append(torch.sigmoid(pre_activations[-1]))
        inputs.append(pre_activations[-1] * sigmoids[-1])
    error = inputs[-1] @ weights[-1] - values
    error_scale = None if limit is None else clip_scale(error.norm(dim=-1, keepdim=True), limit)
    unclipped = [2 * error if error_scale is None else 2 * error_scale * error]
    slopes = [_silu_slope(h, s) for h, s in zip(inputs[1:], sigmoids, strict=True)]
    grad_activations = []
    for weight, slope in zip(weights[:0:-1], slopes[::-1], strict=True):
        grad_activations.append(unclipped[-1] @ weight.mT)
        unclipped.append(grad_activations[-1] * slope)
    grad_activations.reverse()
    unclipped.reverse()
    intermediates = FactorsIntermediates(
        pre_activations, sigmoids, slopes, grad_activations, unclipped, error, error_scale
    )
    return _clip_factors(inputs, unclipped, limit, intermediates, rule.delta_rule)


def _residual_gradient_factors(
    keys: Tensor, values: Tensor, weights: Sequence[Tensor], limit: Tensor | None
) -> GradientFactors:
    """Computes `gradient_factors` of M(k) = k + LN(z_L), z_L = W_L gelu(... gelu(W_1 k))."""
    inputs, slopes = [keys], []
    for weight in weights[:-1]:
        z = inputs[-1] @ weight
        inputs.append(gelu(z))
        slopes.append(_gelu_slope(z))
    z = inputs[-1] @ weights[-1]
    variance, mean = torch.var_mean(z, dim=-1, correction=0, keepdim=True)
    inverse = torch.rsqrt(variance + NORM_EPSILON)
    normed = (z - mean) * inverse  # LN(z)
    error = keys + normed - values
    grad = 2 * error if limit is None else 2 * clip_scale(error.norm(dim=-1, keepdim=True), limit) * error
    # LN'(z)^T g = (g - mean(g) - LN(z) mean(g LN(z))) / sqrt(var(z) + epsilon)
    centred = grad - grad.mean(-1, keepdim=True) - normed * (grad * normed).mean(-1, keepdim=True)
    deltas = [centred * inverse]
    for weight, slope in zip(weights[:0:-1], slopes[::-1], strict=True):
        deltas.insert(0, (deltas[0] @ weight.mT) * slope)
    return _clip_factors(inputs, deltas, limit, None, last_is_replaced=False)


def _gelu_slope(z: Tensor) -> Tensor:
    """Computes gelu'(z) = Phi(z) + z phi(z), with the normal distribution's Phi and density phi."""
    return torch.special.ndtr(z) + z * torch.exp(-z.square() / 2) * (2 * torch.pi) ** -0.5


def _clip_factors(
    inputs: list[Tensor],
    unclipped: list[Tensor],
    limit: Tensor | None,
    intermediates: FactorsIntermediates | None,
    last_is_replaced: bool,
) -> GradientFactors:
    """Clips the gradient of each layer at 4 `limit` (..., T, 1); None for no limit. The last layer's gradient is
    not clipped where the delta rule will replace it.
    """
    if limit is None:
        return GradientFactors(inputs, unclipped, [], intermediates)
    clipped = len(inputs) - last_is_replaced
    norms = [gradient_norm(x, d) for x, d in zip(inputs[:clipped], unclipped, strict=False)]
    scales = [clip_scale(norm, 4 * limit) for norm in norms]
    deltas = [d * c for d, c in zip(unclipped, scales, strict=False)] + unclipped[clipped:]
    return GradientFactors(inputs, deltas, scales, intermediates)


def single_layer_factors(keys: Tensor, deltas: Tensor) -> GradientFactors:
    """Returns the gradient factors of a memory of one layer with the deltas of the delta rule (..., T, d_out)."""
    return GradientFactors([keys], [deltas], [], None)


def with_last_deltas(factors: GradientFactors, deltas: Tensor, hidden_step: float) -> GradientFactors:
    """Replaces the deltas (..., T, d_out) of the last layer, which are not clipped, and multiplies the hidden layers'
    by `hidden_step`.
    """
    hidden = [hidden_step * x for x in factors.deltas[:-1]]
    return factors._replace(deltas=[*hidden, deltas], hidden_step=hidden_step)


def gradient_norm(inputs: Tensor, delta: Tensor) -> Tensor:
    """Computes the norm of each token's gradient of one layer, |h (x) delta| = |h| |delta|: (..., T, 1)."""
    return inputs.norm(dim=-1, keepdim=True) * delta.norm(dim=-1, keepdim=True)


def token_surprise(factors: GradientFactors) -> Tensor:
    """Computes the norm of each token's clipped gradient over all layers, before `hidden_step`: (..., T)."""
    norms = torch.cat([gradient_norm(h, d) for h, d in zip(factors.inputs, factors.deltas, strict=True)], dim=-1)
    if factors.hidden_step != 1:
        norms = torch.cat([norms[..., :-1] / factors.hidden_step, norms[..., -1:]], dim=-1)
    return norms.norm(dim=-1)


class FactorsGradients(NamedTuple):
    """Gradients with respect to the arguments of `gradient_factors`."""

    keys: Tensor
    values: Tensor
    weights: list[Tensor]


def gradient_factors_backward(
    factors: GradientFactors,
    values: Tensor,
    weights: Sequence[Tensor],
    grad_inputs: list[Tensor],
    grad_deltas: list[Tensor],
) -> FactorsGradients:
    """Computes the gradients with respect to keys, values and weights from the gradients with respect to the factors'
    inputs and deltas, which are overwritten. The network is an MLP.
    """
    last, kept = len(weights) - 1, factors.intermediates
    if factors.hidden_step != 1:
        for grad in grad_deltas[:-1]:
            grad.mul_(factors.hidden_step)
    # 1. The clip of each layer's gradient. Its limit is a multiple of |v|: gradients with respect to its logarithm.
    grad_log_limits = []
    for i, scale in enumerate(factors.gradient_scales):
        h, d = factors.inputs[i], kept.unclipped_deltas[i]
        grad_log_limits.append(_grad_log_limit(scale, grad_deltas[i], d))
        grad_inputs[i].addcmul_(h, -_divide_by_square(grad_log_limits[-1], h))
        grad_deltas[i].mul_(scale).addcmul_(d, -_divide_by_square(grad_log_limits[-1], d))
    # 2. delta_i = silu'(z_i) o (delta_{i+1} W_{i+1}^T), from the first layer to the last
    grad_slopes, grad_weights = [], []
    for i in range(last):
        grad_slopes.append(grad_deltas[i] * kept.grad_activations[i])
        grad_activation = grad_deltas[i].mul_(kept.slopes[i])
        grad_weights.append(grad_activation.mT @ kept.unclipped_deltas[i + 1])  # (..., d_in, T) @ (..., T, d_out)
        grad_deltas[i + 1].baddbmm_(grad_activation, weights[i + 1])  # (..., T, d_in) @ (..., d_in, d_out)
    # 3. delta_L = 2 e, with the clip of e = M(k) - v
    grad_error = grad_deltas[last].mul_(2)
    if kept.error_scale is not None:
        grad_log_limits.append(_grad_log_limit(kept.error_scale, grad_error, kept.error))
        clip_term = _divide_by_square(grad_log_limits[-1], kept.error)
        grad_error.mul_(kept.error_scale).addcmul_(kept.error, -clip_term)
    grad_values = -grad_error
    if grad_log_limits:
        grad_values.addcmul_(values, _divide_by_square(sum(grad_log_limits), values))
    # 4. z_i = h_i W_i and h_{i+1} = silu(z_i), from the last layer to the first
    grad_output = grad_error
    for i in reversed(range(len(weights))):
        if i < last:
            slope_term = _silu_curvature(factors, i).mul_(grad_slopes[i])
            grad_output = slope_term.addcmul_(grad_inputs[i + 1], kept.slopes[i])
        if i > 0:
            grad_weights[i - 1].baddbmm_(factors.inputs[i].mT, grad_output)  # (..., d_in, T) @ (..., T, d_out)
        else:
            grad_weights.insert(0, factors.inputs[i].mT @ grad_output)
        grad_inputs[i].baddbmm_(grad_output, weights[i].mT)  # (..., T, d_out) @ (..., d_out, d_in)
    return FactorsGradients(grad_inputs[0], grad_values, grad_weights)


def _silu_curvature(factors: GradientFactors, i: int) -> Tensor:
    """Computes silu''(z) = s (1 - s) (2 + z - 2 silu(z)) of hidden layer i, s = sigmoid(z)."""
    z, s, h = factors.intermediates.pre_activations[i], factors.intermediates.sigmoids[i], factors.inputs[i + 1]
    return torch.sub(z, h, alpha=2).add_(2).mul_(torch.addcmul(s, s, s, value=-1))


def _grad_log_limit(scale: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Computes the gradient with respect to log(limit) of scale * x with scale = limit / norm; 0 where nothing is
    clipped.
    """
    return torch.where(scale < 1, (grad * x).sum(-1, keepdim=True) * scale, 0.0)


def _divide_by_square(x: Tensor, vector: Tensor) -> Tensor:
    """Computes x / |vector|^2, 0 where the vector is 0."""
    square = vector.square().sum(-1, keepdim=True)
    return torch.where(square > 0, x / torch.where(square > 0, square, 1.0), 0.0)
