"""The modules of the neural memory: norm, causal convolution, initial weights, gates and output projection.

Shapes: B batch, H heads, T tokens, D head size of the memory.
"""

import torch
from torch import Tensor, nn

from .memory_network import clip_scale

# Added to squared norms that may be 0: a new memory outputs 0, and the key of a sequence's first token is 0 in a new
# model. With an epsilon as small as usual, the gradients of those tokens would exceed all others.
# docs/log.md: "An epsilon of 1e-12 under a length that may be 0"
EPSILON = 1e-4
# Factor of the initial weights of the output projections of memory and attention: untrained, their output is noise.
# docs/log.md: "The memory's output must start quiet"
OUTPUT_SCALE = 0.1


def l2_normalize(x: Tensor) -> Tensor:
    """Computes x / sqrt(|x|^2 + EPSILON) along the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


class HeadNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input: the memory's output may exceed the range of a half-precision model.

    With `only_above`, the length of a vector (..., D) is clipped at 1 and then multiplied by
    sqrt(D), so that a clipped vector has RMS 1: a memory that has stored little for a query outputs little.
    """

    def __init__(self, size: int, only_above: bool = False):
        super().__init__(size, EPSILON)
        self.only_above = only_above

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self.only_above:
            return x * (clip_scale(x.norm(dim=-1, keepdim=True), x.new_ones(())) * x.shape[-1] ** 0.5) * weight
        return nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)


class ChannelConv(nn.Conv1d):
    """Depthwise causal convolution, whose input starts with the kernel_size - 1 previous columns.

    A filter starts as sqrt(1 - n^2) times a delay by `initial_delay` tokens plus n times noise, n being
    `initial_noise`; its squared norm is 1 on average. In a tensor parallel run, each rank has a part of the filters.
    """

    def __init__(self, num_channels: int, kernel_size: int, initial_delay: int, initial_noise: float):
        self.initial_delay = initial_delay  # before super().__init__, which initialises
        self.initial_noise = initial_noise
        super().__init__(num_channels, num_channels, kernel_size, groups=num_channels, bias=False)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(self.initial_weight())

    def initial_weight(self) -> Tensor:
        """Draws the initial filters, with the shape, dtype and device of `weight`."""
        # docs/log.md: "Convolutions that begin as impulses", "The same noise for the pass-key"
        kernel = self.kernel_size[0]
        impulse = torch.arange(kernel).flip(0) == self.initial_delay
        weight = impulse.to(self.weight).expand_as(self.weight) * (1 - self.initial_noise**2) ** 0.5
        if self.initial_noise:
            weight = weight + torch.randn_like(weight) * self.initial_noise * kernel**-0.5
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Convolves x (B, channels, kernel_size - 1 + T): (B, channels, T)."""
        if x.shape[-1] == self.kernel_size[0]:  # docs/log.md: "conv1d of a single token"
            return (x * self.weight[:, 0]).sum(-1, keepdim=True)
        return nn.functional.conv1d(x, self.weight, groups=len(self.weight))


class InitialWeights(nn.Module):
    """The learned weights of the memory network before the first token: (H, d_in, d_out), one per layer.

    starts_as_zero: initialise the last layer with 0, so that M_0(x) = 0.
    """

    def __init__(self, num_heads: int, shapes: list[tuple[int, int]], starts_as_zero: bool = True):
        super().__init__()
        self.starts_as_zero = starts_as_zero
        for layer, shape in enumerate(shapes):
            self.register_parameter(str(layer), nn.Parameter(torch.empty(num_heads, *shape)))
        self.reset_parameters()

    def reset_parameters(self, init=nn.init) -> None:
        """Initialises with the functions of `init`."""
        weights = list(self.parameters())
        for weight in weights[:-1] if self.starts_as_zero else weights:
            init.normal_(weight, std=weight.shape[-2] ** -0.5)
        if self.starts_as_zero:
            init.zeros_(weights[-1])

    def forward(self, dtype: torch.dtype) -> list[Tensor]:
        """Returns copies in `dtype`: sharded parameters are released when this returns."""
        # docs/log.md: "Not copying the initial weights each call"
        return [weight.to(dtype, copy=True) for weight in self._parameters.values()]


class TokenGate(nn.Module):
    """One logit per token and head, or per layer of each head's network, those of a head side by side. Zero-initialised
    weight: every token's logit starts as `initial_logit`.

    No nn.Linear, because quantisers convert every nn.Linear: a gate has few weights, and all updates depend on it.
    """

    # docs/log.md: "Weights of 8 bits"

    def __init__(self, hidden_size: int, num_gates: int, initial_logit: float):
        super().__init__()
        self.in_features, self.out_features = hidden_size, num_gates  # tensor parallelism asks for them
        self.initial_logit = initial_logit
        self.weight = nn.Parameter(torch.zeros(num_gates, hidden_size))
        self.bias = nn.Parameter(torch.full((num_gates,), initial_logit))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Computes the logits (B, T, gates), in float32 at least, of hidden_states (B, T, hidden)."""
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        return nn.functional.linear(hidden_states.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


class OutputProjection(nn.Linear):
    """The output projection of memory or attention, W_o, whose initial weights are scaled by `OUTPUT_SCALE`."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.weight.mul_(OUTPUT_SCALE)
