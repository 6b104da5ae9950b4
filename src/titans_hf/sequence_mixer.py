"""The base of the modules with a state between calls: functions of a call's tokens and of the state before them."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .cache_titans import TitansCache
from .layer_state import LayerState
from .memory_state import where_rows
from .surprise_titans import LayerSurprise, TokenUpdates
from .token_grid import TokenGrid
from .token_layout import TokenLayout


class MixerOutput(NamedTuple):
    """hidden_states (B, T, hidden); attention weights (B, h, T, K) or None; the state after; the tokens' surprise."""

    hidden_states: Tensor
    attentions: Tensor | None
    state: LayerState
    surprise: LayerSurprise


class SlotsOutput(NamedTuple):
    """What `SequenceMixer.mix` returns for the slots of a grid: hidden_states (R, G, hidden), attention weights
    (R, h, G, K) or None, the state after (R rows), and the memory's updates.
    """

    hidden_states: Tensor
    attentions: Tensor | None
    state: LayerState
    updates: Sequence[TokenUpdates]


class SequenceMixer(nn.Module):
    """Mixes the tokens of a call with the state before them. Subclasses implement `initial_state`, and `mix` for tokens
    on the slots of a grid.

    input_size: size of the inputs' last dimension.
    """

    def __init__(self, layer_idx: int, input_size: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.input_size = input_size

    def initial_state(self, batch_size: int, dtype: torch.dtype) -> LayerState:
        """Returns the state before the first token."""
        raise NotImplementedError

    def mix_after_cache(self, inputs: Tensor, layout: TokenLayout, past_key_values: TitansCache | None) -> Tensor:
        """Mixes inputs (B, T, input_size) after the tokens of the cache, if any, whose layer is updated."""
        cache = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        # `forward` runs no hooks, so that attention and surprise of reread columns are not recorded again.
        state = None if cache is None else cache.state_before_call(self.forward, layout.reread_grid)
        mixed = self(inputs, state, layout.grid)
        if cache is not None:
            cache.finish_call(state, mixed.state, inputs, layout.columns)
        return mixed.hidden_states

    def forward(self, inputs: Tensor, state: LayerState | None, grid: TokenGrid) -> MixerOutput:
        """Mixes tokens (B, T, input_size) after `state`, None before the first token of every row."""
        before = self._state_of_rows(state, inputs.dtype, grid)
        output = self.mix(grid.scatter(inputs), before, grid, at_start=state is None)
        weights, after = output.attentions, output.state
        if weights is not None and grid.token_slots is not None:
            weights = grid.gather(weights.transpose(1, 2)).transpose(1, 2)
        if grid.is_padding is not None:
            after = before.map(partial(where_rows, grid.is_padding), after)
        if grid.last_rows is not None:
            after = after.map(lambda x: x[grid.last_rows])
        surprise = LayerSurprise(((tuple(updates.detach() for updates in output.updates), grid),))
        return MixerOutput(grid.gather(output.hidden_states), weights, after, surprise)

    def _state_of_rows(self, state: LayerState | None, dtype: torch.dtype, grid: TokenGrid) -> LayerState:
        """Returns the state from which each row of the grid continues, given those of the B batch rows."""
        if state is not None and grid.source_rows is None:
            return state
        # Computed within forward, where the parameters of a sharded or offloaded model are complete.
        initial = self.initial_state(grid.num_rows, dtype)
        if state is None:
            return initial
        return initial.map(lambda new, old: where_rows(grid.source_rows < 0, new, old[grid.source_rows]), state)

    def mix(self, inputs: Tensor, state: LayerState, grid: TokenGrid, at_start: bool) -> SlotsOutput:
        """Mixes inputs (R, G, input_size) on the slots of `grid`; `at_start`: no row has read a token before."""
        raise NotImplementedError
