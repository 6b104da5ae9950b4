"""The token mixers of the decoder layers: one per variant (paper section 4), on the same memory and attention.

Their base, `TitansMixer`, is a function of a call's tokens and of the state before them. On request
(`output_surprise=True` in a call), a mixer also returns the surprise of each token, `LayerSurprise`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .attention_titans import SegmentAttention, WindowAttention
from .cache_layer import LayerState, WindowCache
from .cache_titans import TitansCache
from .configuration_titans import TitansConfig
from .memory_state import Gates, Update, map_tensors, where_rows
from .neural_memory import MemoryRecall, NeuralMemory, TitansRMSNorm
from .token_grid import TokenGrid, TokenLayout


@dataclass(frozen=True)
class LayerSurprise:
    """The update that each token causes in one memory: the surprise and the gates theta, eta and alpha, (B, H, T)
    each, persistent tokens excluded.

    The properties are computed when they are read; they carry no gradient and are 0 at padding. Where the layers of a
    network have gates of their own (`memory_form="paper"`), a gate is the mean over the layers.

    parts: for each call, its updates (in MAC one per segment, in order) and its grid. An update is the surprise and the
        gates of the tokens on the grid's slots, (R, H, G) each, or (R, H, G, layers) where layers have gates of their
        own. The surprise is None if the grid does not ask for it.
    """

    parts: tuple[tuple[Sequence[Update], TokenGrid], ...]

    @property
    def gradient_norm(self) -> Tensor:
        """The surprise: the norm of the gradient of |M(k) - v|^2 (eq. 12), clipped as in the update."""
        return self._of_tokens(lambda surprise, gates: surprise)

    @property
    def inner_lr(self) -> Tensor:
        """theta (eq. 10), the factor of the gradient."""
        return self._of_tokens(lambda surprise, gates: gates.inner_lr)

    @property
    def momentum_decay(self) -> Tensor:
        """eta (eq. 10), the factor of the previous momentum; 0 without momentum."""

        def momentum_decay(surprise: Tensor, gates: Gates) -> Tensor:
            logarithm = gates.log_momentum_decay
            return torch.zeros_like(gates.inner_lr) if logarithm is None else logarithm.exp()

        return self._of_tokens(momentum_decay)

    @property
    def forget(self) -> Tensor:
        """alpha (eq. 13): 1 - alpha is the factor of the previous weights."""
        return self._of_tokens(lambda surprise, gates: -gates.log_retain.expm1())

    def _of_tokens(self, quantity: Callable[..., Tensor]) -> Tensor:
        """Gathers a quantity of the updates (R, H, G) or (R, H, G, layers) for the tokens of all calls: (B, H, T)."""
        calls = []
        for updates, grid in self.parts:
            parts = (quantity(*x) for x in updates)
            slots = torch.cat([x if x.dim() == 3 else x.mean(-1) for x in parts], dim=-1)
            if grid.is_padding is not None:
                slots = slots.masked_fill(grid.is_padding[:, None, None], 0)
            calls.append(grid.gather(slots.mT).mT)
        return torch.cat(calls, dim=-1)


# The result of a mixer for the slots of a grid: hidden states (R, G, hidden); attention weights (R, h, G, K) or None;
# the state after the last token; and the updates of the memory, in MAC one per segment.
Mixed = tuple[Tensor, Tensor | None, LayerState, Sequence[Update]]


class TitansMixer(nn.Module):
    """Combines memory, persistent tokens P and, in most variants, attention.

    A mixer is a function of the normalised input x (B, T, hidden) and of the state before it. Subclasses are the
    paper's variants and implement `mix` for tokens on the slots of a grid.
    """

    memory_reads_persistent, attends_to_memory, keeps_segment_weights = True, False, False

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        persistent = torch.empty(config.num_persistent_tokens, config.hidden_size)
        if len(persistent):
            self.persistent = nn.Parameter(persistent)
        else:  # an empty parameter gets no gradient, and DDP would wait for it; so it is a buffer
            self.register_buffer("persistent", persistent, persistent=False)
        self.memory = NeuralMemory(config, layer_idx)

    def forward(
        self, inputs: Tensor, layout: TokenLayout, cache: TitansCache | None = None, **kwargs
    ) -> tuple[Tensor, Tensor | None, LayerSurprise]:
        """Mixes inputs (B, T, hidden) after the tokens of the cache, if there is one, and updates its layer.
        `kwargs` go to the attention function. Returns hidden states (B, T, hidden), attention weights (B, h, T, K) or
        None, and the tokens' surprise.
        """
        layer = None if cache is None else cache.layers[self.layer_idx]
        state, recorded = (None, ()) if layer is None else layer.state_before_call()
        reread = zip((run.inputs for run in recorded), layout.reread_grids, strict=True)
        for tokens, grid in (*reread, (inputs, layout.grid)):
            before = state
            state_of_rows = self._state_of_rows(state, tokens.dtype, grid)
            hidden_states, weights, state, updates = self.mix(grid.scatter(tokens), state_of_rows, grid, **kwargs)
            if grid.is_padding is not None:
                state = state_of_rows.where_rows(grid.is_padding, state)
            if grid.last_rows is not None:
                state = state.map(lambda x, rows=grid.last_rows: x[rows])
        if layer is not None:
            layer.finish_call(before, state, inputs, layout.columns)
        if weights is not None and grid.token_slots is not None:
            weights = grid.gather(weights.transpose(1, 2)).transpose(1, 2)
        surprise = LayerSurprise(((map_tensors(Tensor.detach, updates), grid),))
        return grid.gather(hidden_states), weights, surprise

    def _state_of_rows(self, state: LayerState | None, dtype: torch.dtype, grid: TokenGrid) -> LayerState:
        """Returns the state from which each row of the grid continues, given the state of the batch rows (None before
        their first token).
        """
        if state is not None and grid.source_rows is None:
            return state
        # Computed within forward, where the parameters of a sharded or offloaded model are complete.
        initial = self.initial_state(grid.num_rows, dtype)
        if state is None or grid.source_rows is None:
            return initial
        return initial.where_rows(grid.source_rows < 0, state.map(lambda x: x[grid.source_rows]))

    def mix(self, hidden_states: Tensor, state: LayerState, grid: TokenGrid, **kwargs) -> Mixed:
        """Mixes hidden_states (R, G, hidden) on the slots of `grid`."""
        raise NotImplementedError

    def initial_state(self, batch_size: int, dtype: torch.dtype) -> LayerState:
        """Returns the state before the first token: after P, which precedes every sequence (x~ = P || x: eq. 26, 29).

        P does not count as tokens of the first chunk. The state is the same for every row: computed once and expanded,
        unless adapters may differ between rows.
        """
        persistent = self.persistent_rows(batch_size)
        memory = self.memory.initial_state(len(persistent), dtype)
        conv_state = self.memory.initial_conv_state(memory, persistent.dtype)
        memory_output = persistent
        if self.memory_reads_persistent and self.config.num_persistent_tokens:
            grid = TokenGrid.identity(len(persistent), persistent.shape[1], persistent.device)
            memory_output, memory, conv_state, _ = self.memory.update(
                persistent, memory, conv_state, grid, projects=self.attends_to_memory
            )
        kept = memory.weights if self.keeps_segment_weights else ()
        state = LayerState(memory.with_count_reset(), conv_state, self.initial_kv_cache(memory_output), kept)
        return state.map(lambda x: x.expand(batch_size, *x.shape[1:]))

    def persistent_rows(self, batch_size: int) -> Tensor:
        """Returns P (1, P, hidden), or (batch_size, P, hidden) if an adapter wraps a projection: PEFT's `adapter_names`
        give every row of a batch an adapter of its own. Raises ValueError for an activated LoRA.
        """
        parts = (part.named_children() for part in self.children())
        wrapped = [x for part in parts for name, x in part if name.endswith("_proj") and not isinstance(x, nn.Linear)]
        variants = {type(y).__name__ for x in wrapped for y in getattr(x, "lora_variant", {}).values()}
        if "ALoraLinearVariant" in variants:  # it counts the columns of a call; a projection sees persistent tokens too
            raise ValueError("`alora_invocation_tokens` must be None: a Titans model has no activated LoRA.")
        return self.persistent[None].expand(batch_size if wrapped else 1, -1, -1)

    def initial_kv_cache(self, memory_output: Tensor) -> WindowCache | None:
        """Returns attention's cache before the first token; memory_output (1 or B, P, hidden): the memory's output for
        the persistent tokens, of no use without `attends_to_memory`.
        """
        return None


def add_memory(y: Tensor, m: Tensor, norm: nn.Module) -> Tensor:
    """Computes y * sigmoid(norm(m)) + m from the outputs of attention and memory, (B, T, hidden): `memory_residual`."""
    return torch.addcmul(m, y, torch.sigmoid(norm(m)))


def multiply_by_memory(y: Tensor, m: Tensor, norm_y: nn.Module, norm_m: nn.Module) -> Tensor:
    """Computes norm(y) * sigmoid(norm(m)), y (x) M(x) in eq. 25 and 28, of (B, T, hidden): no `memory_residual`."""
    return norm_y(y) * torch.sigmoid(norm_m(m))


class LMMMixer(TitansMixer):
    """The memory alone (paper section 4.3, "memory without attention")."""

    def mix(self, hidden_states, state, grid, **kwargs):
        output, memory, conv_state, update = self.memory.update(hidden_states, state.memory, state.conv_state, grid)
        return output, None, LayerState(memory, conv_state), [update]


class MALMixer(TitansMixer):
    """Memory as a layer: sliding-window attention over the memory's output (eq. 29-31).

    With `memory_residual`, attention reads the input plus the memory's output. The memory's output also gates
    attention's output and is added to it.
    """

    attends_to_memory = True

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.memory_norm = TitansRMSNorm(size, eps=eps)
        self.sum_norm = TitansRMSNorm(size, eps=eps) if config.memory_residual else None
        self.attention = WindowAttention(config, layer_idx)

    def initial_kv_cache(self, memory_output):
        persistent = self.persistent_rows(len(memory_output))
        return self.attention.initial_kv_cache(self._attention_input(persistent, memory_output))

    def _attention_input(self, hidden_states: Tensor, m: Tensor) -> Tensor:
        return self.memory_norm(m) if self.sum_norm is None else self.sum_norm(hidden_states + m)

    def mix(self, hidden_states, state, grid, **kwargs):
        m, memory, conv_state, updates = self.memory.update(  # M(x~): eq. 30
            hidden_states, state.memory, state.conv_state, grid
        )
        inputs = self._attention_input(hidden_states, m)
        # o = SW-Attn(norm(m)): eq. 31
        output, weights, cache = self.attention(inputs, state.kv_cache, state.memory.num_seen, grid, **kwargs)
        if self.config.memory_residual:
            output = add_memory(output, m, self.memory_norm)
        return output, weights, LayerState(memory, conv_state, cache), [updates]


class MAGMixer(TitansMixer):
    """Memory as a gate: attention and memory in parallel; the memory's output gates attention's output (eq. 26-28).

    With `memory_residual`, the memory's output is also added.
    """

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention = WindowAttention(config, layer_idx)
        self.attention_norm = None if config.memory_residual else TitansRMSNorm(size, eps=eps)
        self.memory_norm = TitansRMSNorm(size, eps=eps)

    def initial_kv_cache(self, memory_output):
        return self.attention.initial_kv_cache(self.persistent_rows(len(memory_output)))

    def mix(self, hidden_states, state, grid, **kwargs):
        m, memory, conv_state, updates = self.memory.update(  # M(x~): eq. 28
            hidden_states, state.memory, state.conv_state, grid
        )
        num_seen = state.memory.num_seen
        output, weights, cache = self.attention(hidden_states, state.kv_cache, num_seen, grid, **kwargs)  # eq. 27
        if self.attention_norm is None:
            output = add_memory(output, m, self.memory_norm)
        else:
            output = multiply_by_memory(output, m, self.attention_norm, self.memory_norm)  # o = y (x) M(x~): eq. 28
        return output, weights, LayerState(memory, conv_state, cache), [updates]


class MACMixer(TitansMixer):
    """Memory as context: attention over a segment and the memory's recall for it. The memory is then updated with the
    result and gates it (eq. 21-25). Segments are processed in order: each recalls from the memory at the end of the
    segment before.

    With `memory_residual`, the gate applies to attention's output without the residual input, and the memory's output
    is added.
    """

    memory_reads_persistent = False  # P is part of the attention's context only

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        size, eps = config.hidden_size, config.rms_norm_eps
        # In a segment of one chunk, the memory's anchor, if it has one, is the weights at the segment's start.
        self.keeps_segment_weights = config.segment_length != config.memory_chunk_size or not config.is_deep
        self.recall = MemoryRecall(config, layer_idx)
        self.attention = SegmentAttention(config, layer_idx)
        self.attention_norm = None if config.memory_residual else TitansRMSNorm(size, eps=eps)
        self.memory_norm = TitansRMSNorm(size, eps=eps)

    def initial_kv_cache(self, memory_output):
        return self.attention.initial_kv_cache(memory_output)

    def mix(self, hidden_states, state, grid, **kwargs):
        """Mixes segment after segment. Parts that need no memory are computed for all segments at once, in fewer and
        larger products.
        """
        length, slots = self.config.segment_length, None
        if grid.is_single_token:
            segment_slots = slots = state.memory.num_seen[:, None] % length
        else:
            segment_slots = torch.arange(grid.num_slots, device=hidden_states.device)[None] % length
        queries, projected = self.recall.queries(hidden_states), self.attention.project(hidden_states, segment_slots)
        initial = self.memory.initial_weights(state.memory.weights[0].dtype)
        segments = zip(
            hidden_states.split(length, dim=1),
            queries.split(length, dim=1),
            # Not by indexing: its backward makes a tensor of the full size for every segment, which is quadratic.
            zip(*(x.split(length, dim=1) for x in projected), strict=True),
            grid.split(length),
            strict=True,
        )
        results = []
        for segment, queries, projected, part in segments:
            weights = self._segment_weights(state, part, slots)
            h = self.recall(queries, self.memory, weights, initial)  # h_t = M*_{t-1}(q_t): eq. 21
            # on [P | h | S]: eq. 22-23
            attended, maps, cache = self.attention(projected, h, state.kv_cache, slots, part.filled, **kwargs)
            y = segment + attended  # y_t: eq. 23, with the residual connection
            output, memory, conv_state, update = self.memory.update(  # M_t: eq. 24
                y, state.memory, state.conv_state, part, initial, projects=False
            )
            state = LayerState(memory, conv_state, cache, weights if self.keeps_segment_weights else ())
            results.append((attended, output, maps, update))
        attended, retrieved, attentions, updates = zip(*results, strict=True)
        attended = torch.cat(attended, dim=1)
        y = hidden_states + attended
        m = self.memory.project_output(y, torch.cat(retrieved, dim=2))  # M_t(y_t)
        if self.attention_norm is None:
            output = add_memory(attended, m, self.memory_norm)
        else:
            output = multiply_by_memory(y, m, self.attention_norm, self.memory_norm)  # o_t = y_t (x) M*_t(y_t): eq. 25
        # With one segment, the very tensor that attention used, so that it has a gradient.
        single = attentions[0] is None or len(attentions) == 1
        return output, attentions[0] if single else torch.cat(attentions, dim=2), state, updates

    def _segment_weights(self, state: LayerState, grid: TokenGrid, slots: Tensor | None) -> tuple[Tensor, ...]:
        """Returns the memory's weights at the start of the segment that each row is in."""
        if slots is None and grid.token_slots is None:  # the segment starts here, in every row
            return state.memory.weights
        before = state.segment_weights if self.keeps_segment_weights else state.memory.anchor
        starts = (grid.row_starts == 0) & (grid.row_ends > 0) if slots is None else slots[:, 0] == 0
        return tuple(map(partial(where_rows, starts), state.memory.weights, before))


MIXERS = {"mac": MACMixer, "mag": MAGMixer, "mal": MALMixer, "lmm": LMMMixer}


def make_mixer(config: TitansConfig, layer_idx: int) -> TitansMixer:
    """Returns the mixer of a layer: its variant's."""
    return MIXERS[config.variant](config, layer_idx)
