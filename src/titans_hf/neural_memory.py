"""The long-term memory as a layer: its modules (norm, causal convolution, initial weights, gates), then projections,
update and output (paper sections 3 and 4.4).

Shapes: B batch, H heads, T tokens, D head size of the memory.
"""

import math
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu
from transformers import initialization as init
from transformers.integrations import use_kernel_forward_from_hub
from transformers.utils.generic import maybe_autocast

from .cache_layer import LayerState
from .configuration_titans import TitansConfig
from .memory_deep import LOSSES, Loss, Network, clip, deep_rule, gradient_factors, gradient_norm, make_network, read
from .memory_kernels import choose_rule
from .memory_rule import delta_rule, error_of, features
from .memory_state import Gates, MemoryState, Update, where_rows, zero_of
from .token_grid import TokenGrid

# Added to squared norms that may be 0: a new memory outputs 0, and the key of a sequence's first token is 0 in a new
# model. With a usual, smaller epsilon, the gradients of these tokens would exceed all other gradients.
EPSILON = 1e-4
# Factor of the initial weights of the output projections of memory and attention: untrained, their output is noise,
# which costs more than the memory gains. With 0, a memory whose last layer starts at 0 would have no gradient.
OUTPUT_SCALE = 0.1
# Limit of eta, the decay of the momentum, with the delta rule: above it, bursts of one key can make a memory grow
# exponentially.
LARGEST_ETA_OF_DELTA_RULE = 1 / 3
# Limits of the gates with the delta rule, by which the published kernels compute the same rule (`memory_kernels`): eta
# below 1 - alpha, and no logarithm below -5. Forgetting everything takes a few tokens.
LARGEST_ALPHA_OF_DELTA_RULE = 0.6
SMALLEST_LOG_ETA = -5.0
# W_o / W_v^T at the start of a memory that recalls: with less, what is retrieved hardly changes the logits.
RECALL_SCALE = 3.0


def l2_normalize(x: Tensor) -> Tensor:
    """Computes x / sqrt(|x|^2 + EPSILON) along the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


@use_kernel_forward_from_hub("RMSNorm")
class TitansRMSNorm(nn.RMSNorm):
    """RMSNorm that `use_kernels=True` replaces by a kernel, as in every model of Transformers."""

    @property
    def variance_epsilon(self) -> float | None:
        """The epsilon, by the name that Transformers' kernels read."""
        return self.eps


class HeadNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input: the memory's output may exceed the range of a half-precision model.

    With `only_above`, the length of a vector (..., D) is clipped at 1, then multiplied by sqrt(D), so that a clipped
    vector has RMS 1 and small retrievals stay small.
    """

    def __init__(self, size: int, only_above: bool = False):
        super().__init__(size, EPSILON)
        self.only_above = only_above

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self.only_above:
            return x / x.norm(dim=-1, keepdim=True).clamp(min=1.0) * (weight * x.shape[-1] ** 0.5)
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
        kernel = self.kernel_size[0]
        impulse = torch.arange(kernel).flip(0) == self.initial_delay
        weight = impulse.to(self.weight).expand_as(self.weight) * (1 - self.initial_noise**2) ** 0.5
        if self.initial_noise:
            weight = weight + torch.randn_like(weight) * self.initial_noise * kernel**-0.5
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Convolves x (B, channels, kernel_size - 1 + T): (B, channels, T)."""
        if x.shape[-1] == self.kernel_size[0]:  # a single token, for which conv1d takes longer
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

    def reset_parameters(self) -> None:
        weights = list(self.parameters())
        for weight in weights[:-1] if self.starts_as_zero else weights:
            init.normal_(weight, std=weight.shape[-2] ** -0.5)
        if self.starts_as_zero:
            init.zeros_(weights[-1])

    def forward(self, dtype: torch.dtype) -> list[Tensor]:
        """Returns copies in `dtype`: sharded parameters are released when this returns."""
        weights = [x for x in self._parameters.values() if x is not None]
        copies = torch.cat([x.flatten() for x in weights]).to(dtype).split([x.numel() for x in weights])
        return [x.view_as(weight) for x, weight in zip(copies, weights, strict=True)]


class TokenGate(nn.Module):
    """One logit per token and head, or per layer of each head's network; the logits of a head's layers are side by
    side. Zero-initialised weight: every token's logit starts as `initial_logit`.

    Not an nn.Linear, because quantisers convert every nn.Linear: a gate has few weights, and all updates depend on it.
    """

    def __init__(self, hidden_size: int, num_gates: int, initial_logit: float):
        super().__init__()
        self.in_features, self.out_features = hidden_size, num_gates  # read by tensor parallelism
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


def is_updated(config: TitansConfig, grid: TokenGrid) -> bool:
    """True if tokens on the slots of a grid update a memory: not with `memory_max_lr` 0, nor while learning is off."""
    return grid.learns and config.memory_max_lr > 0


def layer_shapes(config: TitansConfig) -> list[tuple[int, int]]:
    """Returns (d_in, d_out) of each layer of the memory network: D -> F -> ... -> F -> D, F = `memory_expansion` D.

    A hidden layer of products has 2 F outputs, which become F features.
    """
    size = config.memory_head_dim
    sizes = [size, *[config.memory_expansion * size] * (config.memory_depth - 1), size]
    outputs = 2 if config.memory_activation == "product" else 1
    shapes = [(d_in, d_out * outputs) for d_in, d_out in pairwise(sizes)]
    return [*shapes[:-1], (sizes[-2], sizes[-1])]


class NeuralMemory(nn.Module):
    """Projects tokens to keys, values and queries, learns key -> value at test time and returns the values that the
    queries retrieve.

    The initial state is learned. The memory is a layer for any network; its state has the same size after any number of
    tokens:

    ```python
    memory = NeuralMemory(TitansConfig(variant="lmm", hidden_size=256, memory_num_heads=4))
    output, state = memory(first)  # first (B, T, 256), output (B, T, 256)
    output, state = memory(second, state)  # as if both had been one sequence
    ```

    Args:
        config: `hidden_size` and the fields whose names begin with `memory_`; use variant="lmm", for which
            attention fields are not validated.
        layer_idx: index of the decoder layer; None outside of a model.
        network, loss: functions in the place of the config's `memory_network` and `memory_loss`, as the head of
            `memory_deep` describes them; they need `memory_update_rule="chunk"`. `set_rule` sets them later.
        shapes: (d_in, d_out) of each matrix of `network`; by default those of the config's network.
    """

    def __init__(
        self,
        config: TitansConfig,
        layer_idx: int | None = None,
        *,
        network: Network | None = None,
        loss: Loss | None = None,
        shapes: list[tuple[int, int]] | None = None,
    ):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.memory_head_dim
        self.is_deep = config.memory_update_rule == "chunk"
        size, num_heads = config.hidden_size, config.memory_num_heads
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)
        # k_conv starts as a one-token delay: x_t is stored under the key of x_{t-1} and retrieved by its query, so that
        # recall is learned sooner. Three convolutions, because one for q, k and v cannot be cut into heads.
        self.q_conv, self.k_conv, self.v_conv = (self._convolution(initial_delay) for initial_delay in (0, 1, 0))
        num_gates = num_heads * config.memory_gates_per_head
        self.inner_lr = TokenGate(size, num_gates, initial_logit=0.0)  # theta
        self.momentum = TokenGate(size, num_gates, initial_logit=0.0) if config.memory_momentum else None  # eta
        self.forget = TokenGate(size, num_gates, config.memory_forget_bias) if config.memory_forget else None  # alpha
        self.stable = config.memory_recurrence == "stable"
        starts_as_zero = self.stable and config.memory_network == "mlp"  # LN has too large a gradient at 0
        self.initial_weights = InitialWeights(num_heads, shapes or layer_shapes(config), starts_as_zero)
        self.norm = HeadNorm(self.head_dim, config.memory_output_norm == "clip")
        self.gate_proj = nn.Linear(size, size, bias=False)
        self.o_proj = OutputProjection(size, size, bias=False)
        self.network, self.loss = None, None
        if self.is_deep:
            self.network = make_network(config.memory_network, config.memory_activation)
            self.loss = LOSSES[config.memory_loss]
        self.set_rule(network, loss)
        self.tie_projections()

    def set_rule(self, network: Network | None = None, loss: Loss | None = None) -> None:
        """Sets the network or the inner loss of the deep rule to functions of one's own (`memory_deep`).

        Raises ValueError for a memory of the delta rule, which has neither.
        """
        if not self.is_deep and (network or loss):
            name = "network" if network else "loss"
            raise ValueError(f"`{name}` needs `memory_update_rule='chunk'`, but the config has 'delta'.")
        self.network, self.loss = network or self.network, loss or self.loss

    @property
    def functions_of_its_own(self) -> list[str]:
        """The names of "network" and "loss" that are functions which no config can name."""
        config, own = self.config, []
        if self.is_deep and self.network is not make_network(config.memory_network, config.memory_activation):
            own.append("network")
        if self.is_deep and self.loss is not LOSSES[config.memory_loss]:
            own.append("loss")
        return own

    @torch.no_grad()
    def tie_projections(self) -> None:
        """With `memory_start="recall"`, sets W_q = W_k and W_o = 3 W_v^T, where they come from no checkpoint."""
        if self.config.memory_start == "recall":
            init.copy_(self.q_proj.weight, self.k_proj.weight)
            init.copy_(self.o_proj.weight, RECALL_SCALE * self.v_proj.weight.T)

    def _convolution(self, initial_delay: int) -> ChannelConv | None:
        kernel = self.config.memory_conv_kernel
        if kernel == 1:
            return None
        return ChannelConv(self.config.hidden_size, kernel, initial_delay, self.config.memory_conv_noise)

    def initial_state(self, batch_size: int, dtype: torch.dtype) -> MemoryState:
        """Returns the learned state before the first token, in float32 at least whatever the dtype of the model: the
        weights of all layers with the deep rule, of the last layer with the delta rule.
        """
        dtype = torch.promote_types(dtype, torch.float32)
        weights = self.initial_weights(dtype)
        weights = weights if self.is_deep else weights[-1:]
        return MemoryState.initial(weights, batch_size, dtype, self.is_deep, self.momentum is not None)

    def initial_conv_state(self, state: MemoryState, dtype: torch.dtype) -> Tensor:
        """Returns the inputs of the convolutions before the first token, zeros: (B, kernel - 1, 3 * H * D)."""
        batch_size, num_heads = state.weights[0].shape[:2]
        size = (batch_size, self.config.memory_conv_kernel - 1, 3 * num_heads * self.head_dim)
        return state.weights[0].new_zeros(size, dtype=dtype)

    def forward(self, hidden_states: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """Updates the memory with tokens and reads it for each of them (eq. 10-16).

        hidden_states (B, T, hidden), T at least 1; state: returned by the call before, None before the first token.
        Returns the output (B, T, hidden) and the state after the last token, in float32 at least. `state` is not
        changed: several calls can continue it. `state.map(Tensor.detach)` cuts the graph of a training step.

        Raises ValueError for hidden_states of another shape.
        """
        size, shape = self.config.hidden_size, tuple(hidden_states.shape)
        if len(shape) != 3 or shape[1] < 1 or shape[2] != size:
            raise ValueError(f"`hidden_states` must be (batch, tokens, {size}) by `hidden_size`, but is {shape}.")
        if state is None:
            memory = self.initial_state(len(hidden_states), hidden_states.dtype)
            state = LayerState(memory, self.initial_conv_state(memory, hidden_states.dtype))
        grid = TokenGrid.build(state.memory.num_seen, hidden_states.shape[1], self.config.memory_grid_size)
        output, memory, conv, _ = self.update(grid.scatter(hidden_states), state.memory, state.conv_state, grid)
        return grid.gather(output), LayerState(memory, conv)

    def update(
        self,
        hidden_states: Tensor,
        state: MemoryState,
        conv_state: Tensor,
        grid: TokenGrid,
        initial: list[Tensor] | None = None,
        projects: bool = True,
    ) -> tuple[Tensor, MemoryState, Tensor, Update]:
        """Updates the memory with hidden_states (R, G, hidden) on the slots of `grid` and reads it for each of them.

        initial: the result of `initial_weights` in the state's dtype, which is called if it is None. projects: False to
        return the retrieved values (B, H, T, D) in the state's dtype, to which `project_output` is to be applied.
        Returns the output (R, G, hidden), the states of memory and convolutions after the last token, and the surprise
        (None unless the grid asks for it) and the gates.
        """
        dtype, updates = state.weights[0].dtype, is_updated(self.config, grid)
        initial = self.initial_weights(dtype) if initial is None else initial
        projected, conv_state = self._project_inputs(hidden_states, conv_state, grid)
        with maybe_autocast(hidden_states.device.type, enabled=False):
            gates = self._gates(hidden_states, dtype, updates)
            q, k, v = self._normalize(projected.to(dtype))
            arguments = (q, k, v, gates, initial, state, grid, updates)
            if self.is_deep:
                retrieved, surprise, state = self._learn_deep(*arguments)
            else:
                retrieved, surprise, state = self._learn_features(*arguments, projected.dtype)
            if not updates:  # DistributedDataParallel waits for a gradient of every parameter, the gates' included
                retrieved = retrieved + sum(zero_of(gate) for gate in gates if gate is not None)
        surprise = surprise.detach() if surprise is not None and grid.needs_surprise else None
        output = self.project_output(hidden_states, retrieved) if projects else retrieved
        return output, state, conv_state, (surprise, gates)

    def _learn_features(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Gates,
        initial: list[Tensor],
        state: MemoryState,
        grid: TokenGrid,
        updates: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None, MemoryState]:
        """Updates and reads the matrix of features (`memory_rule`), with q, k, v (B, H, T, D); dtype: of the hidden
        states.

        Returns what is retrieved (B, H, T, D), the norm of each token's gradient (B, H, T), and the state after the
        tokens; if `updates` is False, the memory is read alone.
        """
        *hidden, m_0 = initial
        m_0 = m_0 if self.stable else torch.zeros_like(m_0)
        q, k = (features(x, hidden, self.config.memory_activation) for x in (q, k))
        (m,), s = state.weights, state.momentum[0] if state.momentum else None
        if updates:
            rule = choose_rule(self.config.memory_kernel, k, s is not None, grid, dtype) or delta_rule
            learn = partial(rule, chunk_size=self.config.memory_chunk_size, recompute=self.config.memory_recompute)
            retrieved, delta, m, s = learn(q, k, v, *gates, m_0, m, s, grid.filled)
        else:
            retrieved, delta = q @ m, error_of(k, v, m)
        surprise = k.norm(dim=-1) * delta.norm(dim=-1) if grid.needs_surprise else None
        return retrieved, surprise, MemoryState((m,), () if s is None else (s,), (), self._num_seen(state, grid))

    def _learn_deep(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Gates,
        initial: list[Tensor],
        state: MemoryState,
        grid: TokenGrid,
        updates: bool,
    ) -> tuple[Tensor, Tensor | None, MemoryState]:
        """Updates and reads a network (`memory_deep`); arguments and results are otherwise as in `_learn_features`."""
        chunk_size, clips = self.config.memory_chunk_size, self.loss is LOSSES["huber"]
        num_seen, starts = self._num_seen(state, grid), self._chunk_starts(state, grid)
        if updates:
            learn = partial(deep_rule, network=self.network, loss=self.loss, clips=clips, chunk_size=chunk_size)
            learn = partial(learn, recompute=self.config.memory_recompute)
            of_rule = (initial if self.stable else None, state.weights, state.momentum, state.anchor)
            retrieved, norms, m, s, last = learn(q, k, v, *gates, *of_rule, grid.filled, starts)
            return retrieved, norms, MemoryState(tuple(m), tuple(s), tuple(last), num_seen)
        retrieved, surprise, anchor = read(self.network, state.weights, q), None, state.weights
        if starts is not None:  # a chunk that began before keeps its anchor
            pairs = zip(state.weights, state.anchor, strict=True)
            anchor = tuple(where_rows(starts.any(0), new, old) for new, old in pairs)
        if grid.needs_surprise:
            h, delta = gradient_factors(self.network, self.loss, state.weights, k, v)
            surprise = gradient_norm(h, clip(h, delta, v) if clips else delta)
        return retrieved, surprise, MemoryState(state.weights, state.momentum, anchor, num_seen)

    def _num_seen(self, state: MemoryState, grid: TokenGrid) -> Tensor:
        """Returns the number of tokens that each row has read after the tokens of the grid, (R,)."""
        return state.num_seen + (1 if grid.is_single_token else grid.row_ends - grid.row_starts)

    def _chunk_starts(self, state: MemoryState, grid: TokenGrid) -> Tensor | None:
        """Returns (P, R) bool, True where a chunk of slots starts with a token of the grid; None if all start so."""
        chunk_size = self.config.memory_chunk_size
        if grid.is_single_token:
            return (state.num_seen % chunk_size == 0)[None]
        if grid.token_slots is None:
            return None
        first = torch.arange(0, grid.num_slots, chunk_size, device=grid.row_starts.device)[:, None]
        return (grid.row_starts <= first) & (grid.row_ends > first)

    def read(self, weights: tuple[Tensor, ...], queries: Tensor, initial: list[Tensor]) -> Tensor:
        """Computes M(q) (eq. 15) from a state's weights and queries (B, H, T, D), in their dtype: (B, H, T, D)."""
        if self.is_deep:
            return read(self.network, weights, queries)
        return features(queries, initial[:-1], self.config.memory_activation) @ weights[0]

    def _normalize(self, projected: Tensor) -> Tensor:
        """Normalises queries, keys and values (3, B, H, T, D), in the memory's dtype: the squares may exceed the range
        of float16.
        """
        # Keys and queries as in the paper (section 4.4); values too, because the largest stable step of a hidden layer
        # decreases with |v|^2: theta alone sets the size of an update.
        if self.stable:
            return l2_normalize(projected)
        queries_and_keys, values = projected.split([2, 1])
        return torch.cat([l2_normalize(queries_and_keys), values])

    def project_output(self, hidden_states: Tensor, retrieved: Tensor) -> Tensor:
        """Computes W_o (norm(y) o silu(W_g x)) (section 4.4) from x (B, T, hidden) and the retrieved values y
        (B, H, T, D): (B, T, hidden).
        """
        with maybe_autocast(hidden_states.device.type, enabled=False):
            normed = self.norm(retrieved.transpose(1, 2)).flatten(2)
        gate = silu(self.gate_proj(hidden_states))
        return self.o_proj(normed.to(gate.dtype) * gate)

    def _project_inputs(self, hidden_states: Tensor, conv_state: Tensor, grid: TokenGrid) -> tuple[Tensor, Tensor]:
        """Computes q, k and v (3, B, H, T, D) by linear (eq. 11) -> causal depthwise convolution -> SiLU, and the conv
        state after the last token.
        """
        projected = torch.cat([proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        if self.q_conv is not None:
            extended = grid.prepend(conv_state.to(projected.dtype), projected)
            conv_state = grid.last_entries(extended, conv_state.shape[1])
            parts = zip((self.q_conv, self.k_conv, self.v_conv), extended.mT.chunk(3, dim=1), strict=True)
            projected = torch.cat([conv(channels) for conv, channels in parts], dim=1).mT
        heads = silu(projected).unflatten(-1, (3, -1, self.head_dim))
        return heads.permute(2, 0, 3, 1, 4), conv_state

    def _gates(self, hidden_states: Tensor, dtype: torch.dtype, updates: bool) -> Gates:
        """Computes the data-dependent gates (paper section 3.1) of eq. 10 and 13: (B, H, T), or (B, H, T, layers) with
        separate gates for each layer of the memory network. All are 0 unless the memory is updated.
        """
        logits = self._logits(self.inner_lr, hidden_states, dtype)
        inner_lr = (self.config.memory_max_lr if updates else 0.0) * torch.sigmoid(logits)  # theta_t: eq. 10
        if self.momentum is None:
            log_momentum_decay = None
        elif not updates:
            eta = torch.full_like(inner_lr, -torch.inf)  # eta_t = 0
            log_momentum_decay = eta + zero_of(self._logits(self.momentum, hidden_states, dtype))
        else:
            momentum = self._logits(self.momentum, hidden_states, dtype)
            log_momentum_decay = logsigmoid(momentum)  # log eta_t: eq. 10
            if not self.is_deep:
                log_eta = log_momentum_decay + math.log(LARGEST_ETA_OF_DELTA_RULE)
                log_momentum_decay = log_eta.clamp(min=SMALLEST_LOG_ETA)
            if self.stable:
                # Times 1 - eta_t: then a gradient's steps sum to theta_t whatever eta is, |S| <= max theta |gradient|.
                if self.is_deep:  # eta may be close to 1
                    inner_lr = inner_lr * torch.sigmoid(-momentum)
                else:
                    inner_lr = inner_lr * (1 - log_momentum_decay.exp())
        if self.forget is None:
            log_retain = torch.zeros_like(inner_lr)  # alpha_t = 0
        else:
            logits = self._logits(self.forget, hidden_states, dtype)
            log_retain = logsigmoid(-logits) if updates else torch.zeros_like(inner_lr) + zero_of(logits)  # eq. 13
            log_retain = log_retain if self.is_deep else log_retain.clamp(min=math.log(1 - LARGEST_ALPHA_OF_DELTA_RULE))
        return Gates(inner_lr, log_momentum_decay, log_retain)

    def _logits(self, gate: TokenGate, hidden_states: Tensor, dtype: torch.dtype) -> Tensor:
        """Computes the logits of a gate: (B, H, T), or (B, H, T, layers)."""
        logits, layers = gate(hidden_states).to(dtype), self.config.memory_gates_per_head  # (B, T, H * layers)
        # Contiguous, because a compiled backward supposes other strides of log_sigmoid than it gets.
        return (logits.mT if layers == 1 else logits.unflatten(-1, (-1, layers)).transpose(1, 2)).contiguous()


class MemoryRecall(nn.Module):
    """Reads the memory without updating it, with projections of its own: h = norm(W_o norm(M(q))) (eq. 21, MAC)."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.memory_head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.norm = HeadNorm(self.head_dim, config.memory_output_norm == "clip")
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.output_norm = TitansRMSNorm(config.hidden_size, EPSILON)

    def queries(self, hidden_states: Tensor) -> Tensor:
        """Projects tokens to queries: (B, T, hidden) -> (B, T, H, D)."""
        return silu(self.q_proj(hidden_states)).unflatten(-1, (-1, self.head_dim))

    def forward(
        self, queries: Tensor, memory: NeuralMemory, weights: tuple[Tensor, ...], initial: list[Tensor]
    ) -> Tensor:
        """Computes h (B, T, hidden) from queries (B, T, H, D) and the weights of a memory's state; initial: the result
        of the memory's `initial_weights` in their dtype.
        """
        with maybe_autocast(queries.device.type, enabled=False):
            queries_in_dtype = l2_normalize(queries.transpose(1, 2).to(weights[0].dtype))
            retrieved = memory.read(weights, queries_in_dtype, initial)  # M*(q): eq. 21
            retrieved = self.norm(retrieved.transpose(1, 2)).flatten(2)
        return self.output_norm(self.o_proj(retrieved.to(queries.dtype)))
