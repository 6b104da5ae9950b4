"""The long-term memory as a layer: what is written, how fast, and how it is read out (paper sections 3 and 4.4)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu
from transformers.utils.generic import maybe_autocast

from .configuration_titans import TitansConfig
from .memory_chunk import memorize_surprised
from .memory_network import layer_shapes, read
from .memory_state import MemoryState
from .memory_sweep import Tokens
from .surprise_titans import Writes
from .token_grid import TokenGrid

# Added to squares of lengths that may be 0: a memory that has read nothing says nothing, and the first token of all has
# no key in a new model. With an epsilon as small as usual, there would be no other first gradients than theirs.
EPSILON = 1e-4


def unit(x: Tensor) -> Tensor:
    """x at length 1; shorter where |x| is not large against sqrt(EPSILON)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


class HeadNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input: what a memory says may exceed the range of a half-precision model."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class ChannelConv(nn.Conv1d):
    """One filter a channel, of as many channels as there are filters: a rank of a parallel run has a part of them.

    At first it hands on the token that came `initial_delay` tokens ago and, of norm `initial_noise` beside that token's
    1, a random mixture of tokens.
    """

    def __init__(self, num_channels: int, kernel_size: int, initial_delay: int, initial_noise: float):
        super().__init__(num_channels, num_channels, kernel_size, groups=num_channels, bias=False)
        self.initial_delay = initial_delay
        self.initial_noise = initial_noise

    def initial_weight(self) -> Tensor:
        kernel = self.kernel_size[0]
        impulse = torch.arange(kernel).flip(0) == self.initial_delay
        weight = impulse.to(self.weight).expand_as(self.weight)
        if self.initial_noise:
            weight = weight + torch.randn_like(weight) * self.initial_noise * kernel**-0.5
        return weight

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] == self.kernel_size[0]:  # of one token: conv1d takes ten times as long
            return (x * self.weight[:, 0]).sum(-1, keepdim=True)
        return nn.functional.conv1d(x, self.weight, groups=len(self.weight))


class InitialWeights(nn.Module):
    """The learned weights of the memory network before the first token: (H, d_in, d_out), one a layer."""

    def __init__(self, num_heads: int, shapes: list[tuple[int, int]]):
        super().__init__()
        for layer, shape in enumerate(shapes):
            self.register_parameter(str(layer), nn.Parameter(torch.empty(num_heads, *shape)))

    def forward(self, dtype: torch.dtype) -> list[Tensor]:
        """Copies: where parameters are sharded, they are gone when this returns."""
        return [weight.to(dtype, copy=True) for weight in self._parameters.values()]


class TokenGate(nn.Linear):
    """One logit per head from a token. It starts at `initial_logit` for every token: weight 0."""

    def __init__(self, hidden_size: int, num_heads: int, initial_logit: float):
        self.initial_logit = initial_logit  # before super().__init__, which initialises
        super().__init__(hidden_size, num_heads)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, self.initial_logit)

    def forward(self, hidden_states: Tensor, dtype: torch.dtype) -> Tensor:
        """hidden_states (B, T, hidden) -> logits (B, T, H), computed in `dtype`.

        Laid out like any linear layer's output, because an adapter adds its own to it.
        """
        return nn.functional.linear(hidden_states.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


class NeuralMemory(nn.Module):
    """Projects tokens to keys, values and queries, learns key -> value at test time and returns what the queries
    retrieve.

    The state it starts from is learned; the last layer of the memory network starts at zero.
    """

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.memory_head_dim
        size, num_heads = config.hidden_size, config.memory_num_heads
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)
        # At first what follows a token is stored under that token, and looked up by it: keys are a token late.
        self.q_conv, self.k_conv, self.v_conv = (self._convolution(initial_delay) for initial_delay in (0, 1, 0))
        self.inner_lr = TokenGate(size, num_heads, initial_logit=0.0)  # theta
        self.momentum = TokenGate(size, num_heads, initial_logit=0.0) if config.memory_momentum else None  # eta
        self.forget = TokenGate(size, num_heads, initial_logit=-5.0) if config.memory_forget else None  # alpha
        shapes = layer_shapes(self.head_dim, config.memory_depth, config.memory_expansion)
        self.initial_weights = InitialWeights(num_heads, shapes)
        self.norm = HeadNorm(self.head_dim, EPSILON)
        self.gate_proj = nn.Linear(size, size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def _convolution(self, initial_delay: int) -> ChannelConv | None:
        kernel = self.config.memory_conv_kernel
        if kernel == 1:
            return None
        return ChannelConv(self.config.hidden_size, kernel, initial_delay, self.config.memory_conv_noise)

    def initial_state(self, batch_size: int, dtype: torch.dtype) -> MemoryState:
        """The learned state before the first token, in float32 at least whatever the dtype of the model."""
        dtype = torch.promote_types(dtype, torch.float32)
        return MemoryState.initial(self.initial_weights(dtype), batch_size, dtype)

    def initial_history(self, state: MemoryState, dtype: torch.dtype) -> Tensor:
        """(B, kernel - 1, 3 * H * D): the inputs of the convolutions before the first token."""
        batch_size, num_heads = state.weights[0].shape[:2]
        size = (batch_size, self.config.memory_conv_kernel - 1, 3 * num_heads * self.head_dim)
        return state.weights[0].new_zeros(size, dtype=dtype)

    def forward(
        self, hidden_states: Tensor, state: MemoryState, history: Tensor, grid: TokenGrid
    ) -> tuple[Tensor, MemoryState, Tensor, Writes]:
        """hidden_states (B, T, hidden) on the slots of `grid`; `history` the last inputs of the convolutions
        -> what the memory says (B, T, hidden), the state and the history after, and what was written.
        """
        retrieved, state, *rest = self.write(hidden_states, state, history, grid, self.forgets_to(state))
        return self.say(hidden_states, retrieved), state, *rest

    def forgets_to(self, state: MemoryState) -> tuple[Tensor, ...]:
        """The weights (H, d_in, d_out) that forgetting leads back to, in the state's dtype; none if nothing is
        forgotten. To 0, it would lead to a network of several layers that has no gradient any more.
        """
        return tuple(self.initial_weights(state.weights[0].dtype)) if self.forgets else ()

    def write(
        self, hidden_states: Tensor, state: MemoryState, history: Tensor, grid: TokenGrid, initial: tuple[Tensor, ...]
    ) -> tuple[Tensor, MemoryState, Tensor, Writes]:
        """Like `forward`, but returns what the queries retrieve, (B, H, T, D) in the state's dtype; `initial` are the
        weights of `forgets_to`.
        """
        projected, history = self._project(hidden_states, history, grid)
        dtype = state.weights[0].dtype
        with maybe_autocast(hidden_states.device.type, enabled=False):
            # Keys and queries as in the paper; values because the step that a hidden layer of the memory can take
            # without overshooting falls with |v|^2. How much a token writes is left to theta. In the memory's dtype:
            # float16 has no room for the squares.
            gates = self._gates(hidden_states, dtype)
            retrieved, surprise, state = memorize_surprised(
                Tokens(*unit(projected.to(dtype)), *gates),
                state,
                chunk_size=self.config.memory_chunk_size,
                error_clip=self.config.memory_error_clip,
                initial=initial,
                grid=grid,
            )
        return retrieved, state, history, Writes(surprise, *gates)

    def say(self, hidden_states: Tensor, retrieved: Tensor) -> Tensor:
        """hidden_states (B, T, hidden) and what they retrieved (B, H, T, D) -> what the memory says (B, T, hidden)."""
        with maybe_autocast(hidden_states.device.type, enabled=False):
            normed = self.norm(retrieved.transpose(1, 2)).flatten(2)
        gate = silu(self.gate_proj(hidden_states))
        return self.o_proj(normed.to(gate.dtype) * gate)

    def _project(self, hidden_states: Tensor, history: Tensor, grid: TokenGrid):
        """linear -> causal depthwise convolution -> SiLU: q, k and v (3, B, H, T, D), and the history after."""
        projected = torch.cat([proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        if self.q_conv is not None:
            extended = grid.extend(history.to(projected.dtype), projected)
            history = grid.tail(extended, history.shape[1])
            parts = zip((self.q_conv, self.k_conv, self.v_conv), extended.mT.chunk(3, dim=1), strict=True)
            projected = torch.cat([conv(channels) for conv, channels in parts], dim=1).mT
        heads = silu(projected).unflatten(-1, (3, -1, self.head_dim))
        return heads.permute(2, 0, 3, 1, 4), history

    @property
    def forgets(self) -> bool:
        """A stopped memory (no step) stays as it is."""
        return self.forget is not None and self.config.memory_max_lr > 0

    def _gates(self, hidden_states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """theta, log eta and log(1 - alpha) of every token and head, (B, H, T): data-dependent (paper section 3.1)."""
        inner_lr = self.config.memory_max_lr * torch.sigmoid(self.inner_lr(hidden_states, dtype).mT)
        if self.momentum is None or self.config.memory_max_lr == 0:  # nothing moves: no past surprise is carried on
            log_momentum_decay = torch.full_like(inner_lr, -torch.inf)
        else:
            momentum = self.momentum(hidden_states, dtype).mT
            log_momentum_decay = logsigmoid(momentum)
            inner_lr = inner_lr * torch.sigmoid(-momentum)  # (1 - eta): the step does not grow with the momentum
        if not self.forgets:
            return inner_lr, log_momentum_decay, torch.zeros_like(inner_lr)
        return inner_lr, log_momentum_decay, logsigmoid(-self.forget(hidden_states, dtype).mT)


class MemoryRecall(nn.Module):
    """Reads the memory without writing, with projections of its own: h = norm(W_o norm(M(q))) (eq. 21, MAC)."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.memory_head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.norm = HeadNorm(self.head_dim, EPSILON)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.output_norm = nn.RMSNorm(config.hidden_size, EPSILON)

    def queries(self, hidden_states: Tensor) -> Tensor:
        """(B, T, hidden) -> (B, T, H, D)"""
        return silu(self.q_proj(hidden_states)).unflatten(-1, (-1, self.head_dim))

    def forward(self, queries: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        """`queries` (B, T, H, D), weights of the memory network (B, H, d_in, d_out) -> (B, T, hidden)."""
        with maybe_autocast(queries.device.type, enabled=False):
            recalled = read(weights, unit(queries.transpose(1, 2).to(weights[0].dtype)))
            recalled = self.norm(recalled.transpose(1, 2)).flatten(2)
        return self.output_norm(self.o_proj(recalled.to(queries.dtype)))
