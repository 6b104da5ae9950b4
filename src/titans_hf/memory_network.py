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
SMALLEST_LENGTH = 1e-12  # of a layer's input, by which a limit is divided
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
    """Computes the input of every layer in `apply_layers` of an MLP, and what every layer but the last puts out, for
    the backward.
    """
    inputs, pre_activations = [x], []
    for layer in layers[:-1]:
        pre_activations.append(layer(inputs[-1]))
        inputs.append(silu(pre_activations[-1]))
    return inputs, pre_activations


def silu_backward(gradient: Tensor, z: Tensor) -> Tensor:
    """Computes gradient * silu'(z)."""
    if torch.is_grad_enabled() and (gradient.requires_grad or z.requires_grad):  # the kernel has no derivative
        sigmoid = torch.sigmoid(z)
        return gradient * (sigmoid + z * sigmoid * (1 - sigmoid))
    return torch.ops.aten.silu_backward.default(gradient, z)


def lengths(x: Tensor) -> Tensor:
    """Computes the norm of each vector: (..., D) -> (..., 1)."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


class UpdateRule(NamedTuple):
    """The form of the memory network, and how the gradients that update it are computed.

    error_clip: kappa of `gradient_factors`; None for the paper's plain loss.
    delta_rule: take the last layer's error at the weights before each token (`memory_chunk`), not at the chunk's
    start; with an MLP only.
    network: "mlp", or "residual" with the delta rule off.
    hidden_step: with the delta rule, the factor of theta in hidden layers. Their gradients in a chunk are all taken at
    the same weights, so the sum of their steps can overshoot; the last layer's cannot. With 0 the hidden layers are
    constant, neither updated nor forgotten, and the memory is a linear one of learned features.
    """

    error_clip: float | None
    delta_rule: bool = False
    network: Network = "mlp"
    hidden_step: float = 1.0

    @property
    def hidden_factor(self) -> float:
        """The factor of the hidden layers' steps, 1 without the delta rule."""
        return self.hidden_step if self.delta_rule else 1.0

    @property
    def fixes_hidden_layers(self) -> bool:
        """True if only the last layer learns."""
        return self.hidden_factor == 0

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
        return (depth > 1 and not self.fixes_hidden_layers) or not self.delta_rule


class GradientFactors(NamedTuple):
    """The gradient of |M(k) - v|^2 (eq. 12) in every layer as one rank-one matrix per token, inputs[l] (x) deltas[l],
    and what its backward needs of an MLP's: tuples with an entry per layer, or per hidden layer.
    """

    inputs: tuple[Tensor, ...]  # h (..., T, d_in)
    deltas: tuple[Tensor, ...]  # (..., T, d_out), clipped; in hidden layers times `hidden_step`
    pre_activations: tuple[Tensor, ...] = ()  # z, hidden layers: the next layer's input is silu(z)
    grad_activations: tuple[Tensor, ...] = ()  # gradient of the loss with respect to silu(z)
    unclipped_deltas: tuple[Tensor, ...] = ()  # (..., T, d_out)
    delta_norms: tuple[Tensor, ...] = ()  # (..., T, 1), of the unclipped deltas whose layers' gradients are clipped
    delta_limits: tuple[Tensor, ...] = ()  # (..., T, 1), of these norms
    delta_scales: tuple[Tensor, ...] = ()  # (..., T, 1), by which the unclipped deltas were multiplied
    error: Tensor | None = None  # M(k) - v, before clipping
    error_norm: Tensor | None = None  # (..., T, 1); None without a clip
    error_scale: Tensor | None = None  # (..., T, 1): delta_L = error_scale * error; None without a clip, and then 2


class Limits(NamedTuple):
    """The lengths above which clips act on a token, (..., T, 1) each, and their products with the factor of what is
    clipped.

    error, twice_error: kappa |v|, at least `SMALLEST_LIMIT`, and twice that. first, first_step: of the first layer's
    delta, 4 kappa |v| / |k|, and that times `UpdateRule.hidden_factor`.
    """

    error: Tensor
    twice_error: Tensor
    first: Tensor
    first_step: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, rule: UpdateRule) -> "Limits | None":
        """Computes the limits; None without a clip."""
        if rule.error_clip is None:
            return None
        error = (rule.error_clip * lengths(values)).clamp(min=SMALLEST_LIMIT)
        first = _delta_limit(error, keys)
        return cls(error, 2 * error, first, first if rule.hidden_factor == 1 else rule.hidden_factor * first)


def _delta_limit(error_limit: Tensor, inputs: Tensor) -> Tensor:
    """Computes the largest length of a layer's delta, so that its gradient's is 4 kappa |v|."""
    return 4 * error_limit / lengths(inputs).clamp(min=SMALLEST_LENGTH)


def gradient_factors(
    keys: Tensor, values: Tensor, weights: Sequence[Tensor], rule: UpdateRule, limits: Limits | None = None
) -> GradientFactors:
    """Computes the gradient of the memory's loss (eq. 12), factored: keys, values (..., T, D), weights (..., d_in,
    d_out).

    With the rule's `error_clip` kappa, the error e = M(k) - v enters as e * min(1, kappa |v| / |e|), and the gradient
    of each layer is clipped at 4 kappa |v|, twice the largest that a one-layer memory with a unit key can have: the
    weights then grow at most linearly with the number of tokens, whatever the tokens are. The last layer's gradient is
    not clipped with the delta rule, which replaces it.

    limits: `Limits.of(keys, values, rule)`, if already known.
    """
    limits = Limits.of(keys, values, rule) if limits is None else limits
    if rule.network == "residual":
        return _residual_gradient_factors(keys, values, weights, rule, limits)
    inputs, pre_activations, grad_activations = [keys], [], []
    for weight in weights[:-1]:
        pre_activations.append(inputs[-1] @ weight)
        inputs.append(silu(pre_activations[-1]))
    error = (inputs[-1] @ weights[-1]).sub_(values)
    error_norm = error_scale = None
    if limits is not None:
        error_norm = lengths(error)
        error_scale = limits.twice_error / torch.maximum(error_norm, limits.error)
    unclipped = [(2 if error_scale is None else error_scale) * error]
    for weight, z in zip(weights[:0:-1], pre_activations[::-1], strict=True):
        grad_activations.insert(0, unclipped[0] @ weight.mT)
        unclipped.insert(0, silu_backward(grad_activations[0], z))
    clips = _clip_deltas(inputs, unclipped, limits, len(inputs) - rule.delta_rule, rule.hidden_factor)
    kept = map(tuple, (inputs, clips[0], pre_activations, grad_activations, unclipped, *clips[1:]))
    return GradientFactors(*kept, error, error_norm, error_scale)


def _clip_deltas(
    inputs: list[Tensor], unclipped: list[Tensor], limits: Limits | None, number: int, hidden_step: float = 1.0
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Clips the gradient of each of the first `number` layers at 4 kappa |v|, and multiplies it by `hidden_step`. The
    delta rule leaves the last layer's gradient as it is. Returns the deltas, and for each clipped layer the norm before
    the clip, its limit and the factor.
    """
    if limits is None:
        stepped = [d if hidden_step == 1 else hidden_step * d for d in unclipped[:number]]
        return stepped + unclipped[number:], [], [], []
    result = [], [], [], []
    for i, (h, delta) in enumerate(zip(inputs[:number], unclipped, strict=False)):
        norm, limit, stepped = lengths(delta), limits.first, limits.first_step
        if i > 0:
            limit = _delta_limit(limits.error, h)
            stepped = limit if hidden_step == 1 else hidden_step * limit
        scale = stepped / torch.maximum(norm, limit)
        for x, of_layer in zip(result, (scale * delta, norm, limit, scale), strict=True):
            x.append(of_layer)
    return result[0] + unclipped[number:], *result[1:]


def _residual_gradient_factors(
    keys: Tensor, values: Tensor, weights: Sequence[Tensor], rule: UpdateRule, limits: Limits | None
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
    error_scale = 2 if limits is None else limits.twice_error / torch.maximum(lengths(error), limits.error)
    grad = error_scale * error
    # LN'(z)^T g = (g - mean(g) - LN(z) mean(g LN(z))) / sqrt(var(z) + epsilon)
    centred = grad - grad.mean(-1, keepdim=True) - normed * (grad * normed).mean(-1, keepdim=True)
    deltas = [centred * inverse]
    for weight, slope in zip(weights[:0:-1], slopes[::-1], strict=True):
        deltas.insert(0, (deltas[0] @ weight.mT) * slope)
    return GradientFactors(tuple(inputs), tuple(_clip_deltas(inputs, deltas, limits, len(inputs))[0]))


def _gelu_slope(z: Tensor) -> Tensor:
    """Computes gelu'(z) = Phi(z) + z phi(z), with the normal distribution's Phi and density phi."""
    return torch.special.ndtr(z) + z * torch.exp(-z.square() / 2) * (2 * torch.pi) ** -0.5


def gradient_norm(inputs: Tensor, delta: Tensor) -> Tensor:
    """Computes the norm of each token's gradient of one layer, |h (x) delta| = |h| |delta|: (..., T, 1)."""
    return lengths(inputs) * lengths(delta)


def token_surprise(inputs: Sequence[Tensor], deltas: Sequence[Tensor], rule: UpdateRule) -> Tensor:
    """Computes the norm of each token's clipped gradient over all layers, before `hidden_step`: (..., T)."""
    norms = torch.cat([gradient_norm(h, d) for h, d in zip(inputs, deltas, strict=True)], dim=-1)
    if rule.hidden_factor != 1:
        norms = torch.cat([norms[..., :-1] / rule.hidden_factor, norms[..., -1:]], dim=-1)
    return norms.norm(dim=-1)


class FactorsDerivatives(NamedTuple):
    """The factors of the backward of `gradient_factors` of an MLP that follow from the forward alone. The first two
    have an entry per hidden layer. The others have an entry per clip: of each layer's gradient, and last of the error.
    """

    slopes: tuple[Tensor, ...]  # silu'(z)
    bends: tuple[Tensor, ...]  # silu''(z) times the gradient with respect to silu(z)
    clipped: tuple[Tensor, ...]  # (..., T, 1) bool, True where the clip applies
    terms: tuple[Tensor, ...]  # x / |x|^2 of the unclipped delta, or of the error, where the clip applies, else 0
    input_terms: tuple[Tensor, ...]  # x / |x|^2 of the layer's input, where the clip applies, else 0


def factors_derivatives(factors: GradientFactors) -> FactorsDerivatives:
    """Computes silu', silu'' and the derivatives of the clips."""
    slopes, bends, clipped, terms, input_terms = [], [], [], [], []
    of_hidden = zip(factors.pre_activations, factors.inputs[1:], factors.grad_activations, strict=True)
    for z, h, gradient in of_hidden:
        # silu'(z) = s + silu(z) (1 - s), silu''(z) = s (1 - s) (2 + z - 2 silu(z)), s = sigmoid(z)
        sigmoid = torch.sigmoid(z)
        slopes.append(torch.addcmul(h + sigmoid, h, sigmoid, value=-1))
        curvature = torch.sub(z, h, alpha=2).add_(2)
        bends.append(curvature.mul_(sigmoid.addcmul(sigmoid, sigmoid, value=-1)).mul_(gradient))
    of_clips = factors.inputs, factors.unclipped_deltas, factors.delta_norms, factors.delta_limits
    for h, delta, norm, limit in zip(*of_clips, strict=False):
        clipped.append(norm > limit)
        terms.append(_over_square(clipped[-1], norm) * delta)
        input_terms.append(_over_square(clipped[-1], lengths(h)) * h)
    if factors.error_scale is not None:
        clipped.append(factors.error_scale < 2)
        terms.append(_over_square(clipped[-1], factors.error_norm) * factors.error)
    return FactorsDerivatives(*map(tuple, (slopes, bends, clipped, terms, input_terms)))


def _over_square(x: Tensor, norm: Tensor) -> Tensor:
    """Computes x / norm^2, 0 where x and the norm are 0."""
    return x / norm.square().clamp(min=torch.finfo(norm.dtype).tiny)


def gradient_factors_backward(
    factors: GradientFactors,
    derivatives: FactorsDerivatives,
    weights: Sequence[Tensor],
    rule: UpdateRule,
    grad_inputs: list[Tensor | None],
    grad_deltas: list[Tensor | None],
) -> tuple[list[Tensor], tuple[Tensor, Tensor, tuple[Tensor, ...]]]:
    """Computes the backward of `gradient_factors` of an MLP from the gradients with respect to the factors' inputs and
    deltas, which are overwritten; None for the first layer's inputs, and for the last layer's deltas with the delta
    rule.

    Returns the gradients with respect to the weights, and the first three arguments of `tokens_backward`, which
    computes the gradients with respect to keys and values: with respect to the first layer's output and to the error,
    (N, T, d_out) each, and for each clip to the logarithm of its limit, where the clip applies, (N, T, 1).
    """
    last = len(weights) - 1
    # 1. The clip of each layer's gradient. Its limit is a multiple of |v|: gradients with respect to its logarithm.
    log_limits = []
    for i, scale in enumerate(factors.delta_scales):
        log_limits.append((grad_deltas[i] * factors.deltas[i]).sum(-1, keepdim=True))
        grad_deltas[i].mul_(scale).addcmul_(log_limits[-1], derivatives.terms[i], value=-1)
        if i > 0:
            grad_inputs[i].addcmul_(log_limits[-1], derivatives.input_terms[i], value=-1)
    if not factors.delta_scales and rule.hidden_factor != 1:
        for grad in grad_deltas[:-1]:
            grad.mul_(rule.hidden_factor)
    # 2. delta_i = silu'(z_i) o (delta_{i+1} W_{i+1}^T), from the first layer to the last
    grad_slopes, grad_weights = [], []
    for i in range(last):
        grad_activation = grad_deltas[i] * derivatives.slopes[i]
        grad_slopes.append(grad_deltas[i].mul_(derivatives.bends[i]))
        # (N, d_in, T) @ (N, T, d_out), (N, T, d_in) @ (N, d_in, d_out)
        grad_weights.append(torch.bmm(grad_activation.mT, factors.unclipped_deltas[i + 1]))
        if grad_deltas[i + 1] is None:
            grad_deltas[i + 1] = torch.bmm(grad_activation, weights[i + 1])
        else:
            grad_deltas[i + 1].baddbmm_(grad_activation, weights[i + 1])
    # 3. delta_L = 2 e, with the clip of e = M(k) - v
    grad_error = grad_deltas[last]
    if factors.error_scale is None:
        grad_error.mul_(2)
    else:
        log_limits.append((grad_error * factors.unclipped_deltas[last]).sum(-1, keepdim=True))
        grad_error.mul_(factors.error_scale).addcmul_(log_limits[-1], derivatives.terms[-1], value=-1)
    # 4. z_i = h_i W_i and h_{i+1} = silu(z_i), from the last layer to the first
    grad_output = grad_error
    for i in reversed(range(len(weights))):
        if i < last:
            grad_output = grad_slopes[i].addcmul_(grad_inputs[i + 1], derivatives.slopes[i])
        if i > 0:
            grad_weights[i - 1].baddbmm_(factors.inputs[i].mT, grad_output)  # (N, d_in, T) @ (N, T, d_out)
            grad_inputs[i].baddbmm_(grad_output, weights[i].mT)  # (N, T, d_out) @ (N, d_out, d_in)
    grad_weights.insert(0, torch.bmm(factors.inputs[0].mT, grad_output))
    return grad_weights, (grad_output, grad_error, tuple(log_limits))


def tokens_backward(
    grad_output: Tensor,
    grad_error: Tensor,
    log_limits: Sequence[Tensor],
    derivatives: FactorsDerivatives,
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
        if derivatives.input_terms:
            grad_keys.addcmul_(log_limits[0], derivatives.input_terms[0], value=-1)
        of_limit = sum(x * y for x, y in zip(log_limits, derivatives.clipped, strict=True))
        grad_values.addcmul_(_over_square(of_limit, lengths(values)), values)
    return grad_values
