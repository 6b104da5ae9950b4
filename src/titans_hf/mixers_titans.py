"""What a decoder layer does across tokens: one mixer per variant of the paper (section 4), on the same memory and
attention.
"""

from functools import partial

import torch
from torch import Tensor, nn

from .attention_titans import SegmentAttention, WindowAttention
from .configuration_titans import TitansConfig
from .layer_state import LayerState
from .memory_state import where_rows
from .neural_memory import MemoryRecall, NeuralMemory
from .surprise_titans import LayerSurprise
from .token_grid import TokenGrid


class TitansMixer(nn.Module):
    """What a decoder layer does across tokens: the memory, persistent tokens P, and in most variants attention.

    A mixer is a function of the normed input x (B, T, hidden) and of the state before it. Subclasses are the paper's
    variants: their `mix` sees the tokens on the slots of a grid, (B, G, hidden), and returns what the memory wrote too.
    """

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        persistent = torch.empty(config.num_persistent_tokens, config.hidden_size)
        if len(persistent):
            self.persistent = nn.Parameter(persistent)
        else:  # no parameter, for nothing would use it in LMM: DDP would wait for its gradient
            self.register_buffer("persistent", persistent, persistent=False)
        self.memory = NeuralMemory(config, layer_idx)

    def initial_state(self, batch_size: int, dtype: torch.dtype) -> LayerState:
        """The state before the first token. The memory has read P, which is part of every sequence (x~ = P || x) but
        not of its grid of chunks; this is the same for every row, so it is computed once and expanded.
        """
        persistent = self.persistent[None]
        memory = self.memory.initial_state(1, dtype)
        history = self.memory.initial_history(memory, persistent.dtype)
        said = persistent
        if self.config.num_persistent_tokens:
            grid = TokenGrid.whole(1, self.config.num_persistent_tokens, persistent.device)
            said, memory, history, _ = self.memory(persistent, memory, history, grid)
        state = LayerState(memory.primed(), history, *self.initial_keys_values(said))
        return state.map(lambda x: x.expand(batch_size, *x.shape[1:]))

    def initial_keys_values(self, said: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What attention carries before the first token; `said` is the memory's output for P, (1, N_p, hidden)."""
        return None, None

    def forward(
        self, hidden_states: Tensor, state: LayerState | None, grid: TokenGrid
    ) -> tuple[Tensor, Tensor | None, LayerState, LayerSurprise]:
        """hidden_states (B, T, hidden); state: None before the first token of every row
        -> output (B, T, hidden), attention weights or None, the state after, and how the tokens surprised the memory.
        """
        fresh = state is None
        before = self._open(state, hidden_states, grid)
        output, weights, state, writes = self.mix(grid.place(hidden_states), before, grid, fresh)
        if weights is not None and grid.slot is not None:
            weights = grid.take(weights.transpose(1, 2)).transpose(1, 2)
        if grid.idle is not None:
            state = before.map(partial(where_rows, grid.idle), state)
        if grid.last is not None:
            state = state.map(lambda x: x[grid.last])
        return grid.take(output), weights, state, LayerSurprise(((writes, grid),))

    def _open(self, state: LayerState | None, hidden_states: Tensor, grid: TokenGrid) -> LayerState:
        """The states (B rows) before the call -> those that the rows of the grid begin with."""
        if state is not None and grid.origin is None:
            return state
        # made in here, where the parameters are: a model may be sharded, or its layers offloaded
        initial = self.initial_state(grid.num_rows, hidden_states.dtype)
        if state is None:
            return initial
        return initial.map(lambda new, old: where_rows(grid.origin < 0, new, old[grid.origin]), state)

    def mix(self, hidden_states: Tensor, state: LayerState, grid: TokenGrid, fresh: bool):
        raise NotImplementedError


class LMMMixer(TitansMixer):
    """The memory alone (paper section 4.3, "memory without attention")."""

    def mix(self, hidden_states, state, grid, fresh):
        output, memory, history, writes = self.memory(hidden_states, state.memory, state.conv, grid)
        return output, None, LayerState(memory, history), [writes]


class MALMixer(TitansMixer):
    """Memory as a layer: sliding-window attention over what the memory says (eq. 29-31)."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.memory_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = WindowAttention(config, layer_idx)

    def initial_keys_values(self, said):
        return self.attention.initial_keys_values(self.memory_norm(said))

    def mix(self, hidden_states, state, grid, fresh):
        said, memory, history, writes = self.memory(hidden_states, state.memory, state.conv, grid)
        carried, num_seen = (state.keys, state.values), state.memory.num_seen
        output, weights, carried = self.attention(self.memory_norm(said), carried, num_seen, grid, fresh)
        return output, weights, LayerState(memory, history, *carried), [writes]


class MAGMixer(TitansMixer):
    """Memory as a gate: attention and memory side by side, mixed by a gate that looks at both (eq. 26-28)."""

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention = WindowAttention(config, layer_idx)
        self.attention_norm, self.memory_norm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)
        self.gate_attention, self.gate_memory, self.gate_bias = (nn.Parameter(torch.empty(size)) for _ in range(3))

    def initial_keys_values(self, said):
        return self.attention.initial_keys_values(self.persistent[None])

    def mix(self, hidden_states, state, grid, fresh):
        said, memory, history, writes = self.memory(hidden_states, state.memory, state.conv, grid)
        carried, num_seen = (state.keys, state.values), state.memory.num_seen
        attended, weights, carried = self.attention(hidden_states, carried, num_seen, grid, fresh)
        y, m = self.attention_norm(attended), self.memory_norm(said)
        gate = torch.sigmoid(self.gate_attention * y + self.gate_memory * m + self.gate_bias)
        return gate * y + (1 - gate) * m, weights, LayerState(memory, history, *carried), [writes]


class MACMixer(TitansMixer):
    """Memory as context: attention over what the memory recalls for a segment and the segment; the memory then learns
    from the result and gates it (eq. 21-25). Segments follow each other: each recalls from the memory the last one
    left.
    """

    def __init__(self, config: TitansConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.recall = MemoryRecall(config, layer_idx)
        self.attention = SegmentAttention(config, layer_idx)
        self.attention_norm, self.memory_norm = nn.RMSNorm(size, eps=eps), nn.RMSNorm(size, eps=eps)

    def initial_state(self, batch_size, dtype):
        """In MAC, P is part of the attention's context only."""
        memory = self.memory.initial_state(1, dtype)
        persistent = self.persistent[None]
        keys_values = self.attention.initial_keys_values(persistent)
        segment_weights = memory.weights if self.keeps_segment_weights else ()
        history = self.memory.initial_history(memory, persistent.dtype)
        state = LayerState(memory, history, *keys_values, segment_weights)
        return state.map(lambda x: x.expand(batch_size, *x.shape[1:]))

    @property
    def keeps_segment_weights(self) -> bool:
        """With one chunk a segment, the weights at the segment's start are the memory's anchor."""
        return self.config.segment_length != self.config.memory_chunk_size

    def mix(self, hidden_states, state, grid, fresh):
        """Only what needs the memory of the segment before is done segment by segment."""
        length, slots = self.config.segment_length, None
        if grid.is_step:
            at = slots = state.memory.num_seen[:, None] % length
        else:
            at = torch.arange(grid.num_slots, device=hidden_states.device)[None] % length
        projected = self.recall.queries(hidden_states), *self.attention.project(hidden_states, at)
        initial = self.memory.forgets_to(state.memory)
        # split, not indexing: the backward of an index is a tensor of the whole size for every segment
        segments = zip(*(x.split(length, dim=1) for x in (hidden_states, *projected)), strict=True)
        found = []
        for (segment, queries, *own), piece in zip(segments, grid.pieces(length), strict=True):
            weights = self._segment_weights(state, piece, slots)
            recalled = self.recall(queries, weights)
            attended, seen, carried = self.attention(own, recalled, (state.keys, state.values), slots, piece.filled)
            attended = segment + attended
            retrieved, memory, history, written = self.memory.write(attended, state.memory, state.conv, piece, initial)
            state = LayerState(memory, history, *carried, weights if self.keeps_segment_weights else ())
            found.append((attended, retrieved, seen, written))
        attended, retrieved, seen, writes = zip(*found, strict=True)
        attended = torch.cat(attended, dim=1)
        said = self.memory.say(attended, torch.cat(retrieved, dim=2))
        output = self.attention_norm(attended) * torch.sigmoid(self.memory_norm(said))
        # of one segment, what was recorded itself: the output has a gradient with respect to it
        return output, seen[0] if seen[0] is None or len(seen) == 1 else torch.cat(seen, dim=2), state, writes

    def _segment_weights(self, state: LayerState, grid: TokenGrid, slots: Tensor | None) -> tuple[Tensor, ...]:
        """The memory's weights at the start of the segment that each row goes on with."""
        if slots is None and grid.slot is None:  # it starts here, in every row
            return state.memory.weights
        before = state.segment_weights if self.keeps_segment_weights else state.memory.anchor
        begins = (grid.start == 0) & (grid.end > 0) if slots is None else slots[:, 0] == 0
        return tuple(map(partial(where_rows, begins), state.memory.weights, before))


MIXERS = {"mac": MACMixer, "mag": MAGMixer, "mal": MALMixer, "lmm": LMMMixer}
