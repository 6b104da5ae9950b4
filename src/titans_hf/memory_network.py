"""The memory network: a bias-free MLP whose weights are the memory's state (paper section 3.1), and its gradient.

M(x) = W_L silu(... silu(W_1 x)), "mlp", or M(x) = x + LN(W_L gelu(... gelu(W_1 x))), "residual", as in the paper's
second version; one weight matrix per layer, multiplied from the right: x @ W. LN has no weights of its own.

This file contains the layers' shapes, the read, the gradient of the loss as rank-one factors per layer, and the
backward of both (for "residual", autograd's). The update of the weights (`memory_chunk`) uses the factors; with the
delta rule, `memory_chunk` computes the last layer's factors.

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
SMALLEST_LIMIT = 1e-30  # of a clip, where a value is 0
NORM_EPSILON = 1e-5  # of LN: PyTorch's default, because the paper gives none


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


def layer_inputs(x: Tensor, layers: Sequence[Callable[[Tensor], Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """Computes the input of every layer in `apply_layers` of an MLP, and silu' before every layer but the first, for
    the backward.
    """
    inputs, slopes = [x], []
    for layer in layers[:-1]:
        pre_activation = layer(inputs[-1])
        sigmoid = torch.sigmoid(pre_activation)
        inputs.append(pre_activation.mul_(sigmoid))
        slopes.append(_silu_slope(inputs[-1], sigmoid))
    return inputs, slopes


def _silu_slope(activation: Tensor, sigmoid: Tensor) -> Tensor:
    """Computes silu'(z) = s + silu(z) (1 - s) from silu(z) and s = sigmoid(z)."""
    return torch.addcmul(activation + sigmoid, activation, sigmoid, value=-1)


def lengths(x: Tensor) -> Tensor:
    """Computes the norm of each vector: (..., D) -> (..., 1)."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def clip_scale(norm: Tensor, limit: Tensor) -> Tensor:
    """Computes min(1, limit / norm) without an epsilon, with a finite gradient everywhere. The limit is above 0."""
    return limit / torch.maximum(norm, limit)


class UpdateRule(NamedTuple):
    """The form of the memory network, and how the gradients that update it are computed.

    error_clip: kappa of `gradient_factors`; None for the paper's plain loss.
    delta_rule: take the last layer's error at the weights before each token (`memory_chunk`), not at the chunk's
    start; with an MLP only.
    network: "mlp", or "residual" with the delta rule off.
    hidden_step: with the delta rule, the factor of theta in hidden layers. Their gradients in a chunk are all taken at
    the same weights, so the sum of their steps can overshoot; the last layer's cannot.
    """

    error_clip: float | None
    delta_rule: bool = False
    network: Network = "mlp"
    hidden_step: float = 1.0

    @property
    def hidden_factor(self) -> float:
        """The factor of the hidden layers' steps, 1 without the delta rule."""
        return self.hidden_step if self.delta_rule else 1.0

    def check(self) -> None:
        """Raises ValueError for an unknown network, and for the delta rule with a network other than an MLP."""
        if self.network not in get_args(Network):
            raise ValueError(f"`network` must be one of {', '.join(get_args(Network))}, but is {self.network!r}.")
        if self.delta_rule and self.network != "mlp":
            raise ValueError(f"`delta_rule` must be False with the network {self.network!r}, but is True.")

    def needs_anchor(self, depth: int) -> bool:
        """True if any gradient is taken at the weights of the chunk's start. With the delta rule, only the last layer's
        is not.
        """
        return depth > 1 or not self.delta_rule


class FactorsIntermediates(NamedTuple):
    """The intermediate results that the backward of `gradient_factors` of an MLP needs: lists with one entry per layer,
    or per hidden layer.
    """

    pre_activations: list[Tensor]  # z, hidden layers: the next layer's input is silu(z)
    slopes: list[Tensor]  # silu'(z)
    grad_activations: list[Tensor]  # gradient of the loss with respect to silu(z)
    unclipped_deltas: list[Tensor]  # (..., T, d_out)
    delta_norms: list[Tensor]  # (..., T, 1), of the unclipped deltas whose layers' gradients are clipped
    delta_scales: list[Tensor]  # (..., T, 1), by which the unclipped deltas were multiplied; empty without a clip
    error: Tensor  # M(k) - v, before clipping
    error_norm: Tensor | None  # (..., T, 1); None without a clip
    error_scale: Tensor | None  # (..., T, 1): delta_L = error_scale * error; None without a clip, and then 2


class GradientFactors(NamedTuple):
    """The gradient of |M(k) - v|^2 (eq. 12) in every layer as one rank-one matrix per token, inputs[l] (x) deltas[l];
    lists with one entry per layer.
    """

    inputs: list[Tensor]  # h (..., T, d_in)
    deltas: list[Tensor]  # (..., T, d_out), clipped; in hidden layers times `hidden_step`
    intermediates: FactorsIntermediates | None  # None in a residual network, and without an anchor
    hidden_step: float = 1.0


class TokenNorms(NamedTuple):
    """The norms of the tokens that clips compare with: |k| and kappa |v|, at least `SMALLEST_LIMIT`; (..., T, 1)."""

    keys: Tensor
    limit: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, rule: UpdateRule) -> "TokenNorms | None":
        """Computes the norms; None without a clip."""
        if rule.error_clip is None:
            return None
        limit = rule.error_clip * lengths(values)
        return cls(lengths(keys), limit.clamp(min=SMALLEST_LIMIT))


def gradient_factors(
    keys: Tensor, values: Tensor, weights: Sequence[Tensor], rule: UpdateRule, norms: TokenNorms | None = None
) -> GradientFactors:
    """Computes the gradient of the memory's loss (eq. 12), factored: keys, values (..., T, D), weights (..., d_in,
    d_out).

    With the rule's `error_clip` kappa, the error e = M(k) - v enters as e * min(1, kappa |v| / |e|), and the gradient
    of each layer is clipped at 4 kappa |v|, twice the largest that a one-layer memory with a unit key can have: the
    weights then grow at most linearly with the number of tokens, whatever the tokens are. The last layer's gradient is
    not clipped with the delta rule, which replaces it.

    norms: `TokenNorms.of(keys, values, rule)`, if already known.
    """
    norms = TokenNorms.of(keys, values, rule) if norms is None else norms
    if rule.network == "residual":
        return _residual_gradient_factors(keys, values, weights, rule, norms)
    inputs, pre_activations, slopes = [keys], [], []
    for weight in weights[:-1]:
        pre_activations.append(inputs[-1] @ weight)
        sigmoid = torch.sigmoid(pre_activations[-1])
        inputs.append(pre_activations[-1] * sigmoid)
        slopes.append(_silu_slope(inputs[-1], sigmoid))
    error = (inputs[-1] @ weights[-1]).sub_(values)
    error_norm = error_scale = None
    if norms is not None:
        error_norm = lengths(error)
        error_scale = 2 * clip_scale(error_norm, norms.limit)
    unclipped = [(2 if error_scale is None else error_scale) * error]
    grad_activations = []
    for weight, slope in zip(weights[:0:-1], slopes[::-1], strict=True):
        grad_activations.insert(0, unclipped[0] @ weight.mT)
        unclipped.insert(0, grad_activations[0] * slope)
    number = len(inputs) - rule.delta_rule
    deltas, delta_norms, scales = _clip_deltas(inputs, unclipped, norms, number, rule.hidden_factor)
    before_clip = (pre_activations, slopes, grad_activations, unclipped)
    intermediates = FactorsIntermediates(*before_clip, delta_norms, scales, error, error_norm, error_scale)
    return GradientFactors(inputs, deltas, intermediates, rule.hidden_factor)


def _clip_deltas(
    inputs: list[Tensor], unclipped: list[Tensor], norms: TokenNorms | None, number: int, hidden_step: float = 1.0
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Clips the gradient of each of the first `number` layers at 4 kappa |v|, and multiplies it by `hidden_step`. The
    delta rule leaves the last layer's gradient as it is. Returns the deltas, and for each clipped layer the norm before
    the clip and the factor.
    """
    if norms is None:
        stepped = [d if hidden_step == 1 else hidden_step * d for d in unclipped[:number]]
        return stepped + unclipped[number:], [], []
    result = [], [], []
    for i, (h, delta) in enumerate(zip(inputs[:number], unclipped, strict=False)):
        norm, limit = lengths(delta), 4 * norms.limit
        input_norm = norms.keys if i == 0 else lengths(h)
        scale = clip_scale(input_norm * norm, limit)
        scale = scale if hidden_step == 1 else hidden_step * scale
        for x, of_layer in zip(result, (scale * delta, norm, scale), strict=True):
            x.append(of_layer)
    deltas, delta_norms, scales = result
    return deltas + unclipped[number:], delta_norms, scales


def _residual_gradient_factors(
    keys: Tensor, values: Tensor, weights: Sequence[Tensor], rule: UpdateRule, norms: TokenNorms | None
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
    error_scale = 2 if norms is None else 2 * clip_scale(lengths(error), norms.limit)
    grad = error_scale * error
    # LN'(z)^T g = (g - mean(g) - LN(z) mean(g LN(z))) / sqrt(var(z) + epsilon)
    centred = grad - grad.mean(-1, keepdim=True) - normed * (grad * normed).mean(-1, keepdim=True)
    deltas = [centred * inverse]
    for weight, slope in zip(weights[:0:-1], slopes[::-1], strict=True):
        deltas.insert(0, (deltas[0] @ weight.mT) * slope)
    return GradientFactors(inputs, _clip_deltas(inputs, deltas, norms, len(inputs))[0], None)


def _gelu_slope(z: Tensor) -> Tensor:
    """Computes gelu'(z) = Phi(z) + z phi(z), with the normal distribution's Phi and density phi."""
    return torch.special.ndtr(z) + z * torch.exp(-z.square() / 2) * (2 * torch.pi) ** -0.5


def single_layer_factors(keys: Tensor, deltas: Tensor) -> GradientFactors:
    """Returns the gradient factors of a memory of one layer with the deltas of the delta rule (..., T, d_out)."""
    return GradientFactors([keys], [deltas], None)


def with_last_deltas(factors: GradientFactors, deltas: Tensor) -> GradientFactors:
    """Replaces the deltas of the last layer by the delta rule's (..., T, d_out)."""
    return factors._replace(deltas=[*factors.deltas[:-1], deltas])


def gradient_norm(inputs: Tensor, delta: Tensor) -> Tensor:
    """Computes the norm of each token's gradient of one layer, |h (x) delta| = |h| |delta|: (..., T, 1)."""
    return lengths(inputs) * lengths(delta)


def token_surprise(factors: GradientFactors) -> Tensor:
    """Computes the norm of each token's clipped gradient over all layers, before `hidden_step`: (..., T)."""
    norms = torch.cat([gradient_norm(h, d) for h, d in zip(factors.inputs, factors.deltas, strict=True)], dim=-1)
    if factors.hidden_step != 1:
        norms = torch.cat([norms[..., :-1] / factors.hidden_step, norms[..., -1:]], dim=-1)
    return norms.norm(dim=-1)


class FactorsDerivatives(NamedTuple):
    """The factors of the backward of `gradient_factors` of an MLP that follow from the forward alone. `curvatures` has
    an entry per hidden layer. The other lists have an entry per clip: of each layer's gradient, and last of the error.
    """

    curvatures: list[Tensor]  # silu''(z)
    clipped: list[Tensor]  # (..., T, 1) bool, True where the clip applies
    over_square: list[Tensor]  # `clipped` over the squared norm of the unclipped delta, or of the error
    over_input_square: list[Tensor]  # `clipped` over the squared norm of the layer's input


def factors_derivatives(
    inputs: Sequence[Tensor], pre_activations: Sequence[Tensor], clip_norms: Sequence[Tensor], norms: TokenNorms | None
) -> FactorsDerivatives:
    """Computes silu'' and the derivatives of the clips.

    inputs (..., T, d_in): of each layer. clip_norms (..., T, 1): `delta_norms`, and last `error_norm`; empty without a
    clip.
    """
    result = FactorsDerivatives([], [], [], [])
    for z, h in zip(pre_activations, inputs[1:], strict=True):
        # silu''(z) = s (1 - s) (2 + z - 2 silu(z)), s = sigmoid(z)
        sigmoid = torch.sigmoid(z)
        curvature = torch.sub(z, h, alpha=2).add_(2)
        result.curvatures.append(curvature.mul_(sigmoid.addcmul(sigmoid, sigmoid, value=-1)))
    for i, norm in enumerate(clip_norms):
        if i == len(clip_norms) - 1:
            clipped = norm > norms.limit
        else:
            input_norm = norms.keys if i == 0 else lengths(inputs[i])
            clipped = input_norm * norm > 4 * norms.limit
            result.over_input_square.append(_over_square(clipped, input_norm))
        result.clipped.append(clipped)
        result.over_square.append(_over_square(clipped, norm))
    return result


def _over_square(x: Tensor, norm: Tensor) -> Tensor:
    """Computes x / norm^2, 0 where x and the norm are 0."""
    return x / norm.square().clamp(min=torch.finfo(norm.dtype).tiny)


def gradient_factors_backward(
    factors: GradientFactors,
    derivatives: FactorsDerivatives,
    weights: Sequence[Tensor],
    grad_inputs: list[Tensor],
    grad_deltas: list[Tensor | None],
) -> tuple[list[Tensor], tuple[Tensor, Tensor, list[Tensor]]]:
    """Computes the backward of `gradient_factors` of an MLP from the gradients with respect to the factors' inputs and
    deltas, which are overwritten; None for the last layer's deltas with the delta rule.

    Returns the gradients with respect to the weights, and the first three arguments of `tokens_backward`, which
    computes the gradients with respect to keys and values: with respect to the first layer's output and to the error,
    (N, T, d_out) each, and for each clip to the logarithm of its limit, where the clip applies, (N, T, 1).
    """
    last, kept = len(weights) - 1, factors.intermediates
    # 1. The clip of each layer's gradient. Its limit is a multiple of |v|: gradients with respect to its logarithm.
    log_limits = []
    for i, scale in enumerate(kept.delta_scales):
        log_limits.append((grad_deltas[i] * factors.deltas[i]).sum(-1, keepdim=True))
        clip_term = log_limits[-1] * derivatives.over_square[i]
        grad_deltas[i].mul_(scale).addcmul_(clip_term, kept.unclipped_deltas[i], value=-1)
        if i > 0:
            clip_term = log_limits[-1] * derivatives.over_input_square[i]
            grad_inputs[i].addcmul_(clip_term, factors.inputs[i], value=-1)
    if not kept.delta_scales and factors.hidden_step != 1:
        for grad in grad_deltas[:-1]:
            grad.mul_(factors.hidden_step)
    # 2. delta_i = silu'(z_i) o (delta_{i+1} W_{i+1}^T), from the first layer to the last
    grad_slopes, grad_weights = [], []
    for i in range(last):
        grad_activation = grad_deltas[i] * kept.slopes[i]
        grad_slopes.append(grad_deltas[i].mul_(kept.grad_activations[i]))
        # (N, d_in, T) @ (N, T, d_out), (N, T, d_in) @ (N, d_in, d_out)
        grad_weights.append(torch.bmm(grad_activation.mT, kept.unclipped_deltas[i + 1]))
        if grad_deltas[i + 1] is None:
            grad_deltas[i + 1] = torch.bmm(grad_activation, weights[i + 1])
        else:
            grad_deltas[i + 1].baddbmm_(grad_activation, weights[i + 1])
    # 3. delta_L = 2 e, with the clip of e = M(k) - v
    grad_error = grad_deltas[last]
    if kept.error_scale is None:
        grad_error.mul_(2)
    else:
        log_limits.append((grad_error * kept.unclipped_deltas[last]).sum(-1, keepdim=True))
        clip_term = log_limits[-1] * derivatives.over_square[-1]
        grad_error.mul_(kept.error_scale).addcmul_(clip_term, kept.error, value=-1)
    # 4. z_i = h_i W_i and h_{i+1} = silu(z_i), from the last layer to the first
    grad_output = grad_error
    for i in reversed(range(len(weights))):
        if i < last:
            grad_output = grad_slopes[i].mul_(derivatives.curvatures[i])
            grad_output.addcmul_(grad_inputs[i + 1], kept.slopes[i])
        if i > 0:
            grad_weights[i - 1].baddbmm_(factors.inputs[i].mT, grad_output)  # (N, d_in, T) @ (N, T, d_out)
            grad_inputs[i].baddbmm_(grad_output, weights[i].mT)  # (N, T, d_out) @ (N, d_out, d_in)
    grad_weights.insert(0, torch.bmm(factors.inputs[0].mT, grad_output))
    return grad_weights, (grad_output, grad_error, log_limits)


def tokens_backward(
    grad_output: Tensor,
    grad_error: Tensor,
    log_limits: Sequence[Tensor],
    derivatives: FactorsDerivatives,
    keys: Tensor,
    values: Tensor,
    first_weights: Tensor,
    grad_keys: Tensor,
) -> Tensor:
    """Adds the gradients with respect to the keys to `grad_keys`, in place, and returns the gradients with respect to
    the values, from the results of `gradient_factors_backward`.
    """
    grad_keys.baddbmm_(grad_output, first_weights.mT)  # (N, T, d_out) @ (N, d_out, d_in)
    grad_values = -grad_error
    if log_limits:
        if derivatives.over_input_square:
            clip_term = log_limits[0] * derivatives.over_input_square[0]
            grad_keys.addcmul_(clip_term, keys, value=-1)
        of_limit = sum(x * y for x, y in zip(log_limits, derivatives.clipped, strict=True))
        grad_values.addcmul_(_over_square(of_limit, lengths(values)), values)
    return grad_values
