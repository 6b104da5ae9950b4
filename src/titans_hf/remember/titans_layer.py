"""The state of a Titans in a `MemoryCache`: `remember(titans)` adds fast weights and list to a Titans' own memory."""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache_layer import LayerState
from ..cache_titans import TitansCache
from ..memory_state import tensors_of, with_tensors
from ..mixers_titans import TitansMixer
from .window import StateLayer


class TitansLayer(StateLayer):
    """The `LayerState` of a layer of a Titans, kept as the tensors of a recurrent layer, in the same order.

    module: the layer's mixer. form: a state of one row, of which only the structure counts.
    """

    written_in_place = False

    def __init__(self, module: TitansMixer):
        self.module = module
        with torch.no_grad():
            self.form = with_whole_window(self.initial_state(1), module)
        super().__init__(number_of_states=len(tensors_of(self.form)))

    def initial_state(self, rows: int) -> LayerState:
        """Returns the learned state of `rows` rows that have read nothing, with its graph."""
        return self.module.initial_state(rows, next(self.module.parameters()).dtype)

    def clear(self, rows: int) -> None:
        """Sets the state of `rows` rows that have read nothing."""
        self.set_state(self.initial_state(rows))
        self.start = self.earlier = None

    def set_state(self, state: LayerState) -> None:
        """Keeps a state, without its graph."""
        state = with_whole_window(state, self.module)
        self.recurrent_states = {i: x.detach() for i, x in enumerate(tensors_of(state))}

    def state(self) -> LayerState:
        """Returns the state."""
        return with_tensors(self.form, self.recurrent_states.values())

    def forget_empty_rows(self) -> None:
        """Sets the learned state, if the layer has rows."""
        if (x := self.recurrent_states[0]) is not None:
            self.clear(len(x))


def with_whole_window(state: LayerState, module: TitansMixer) -> LayerState:
    """Returns a state whose window has its full length, so that rows of any length read can be in one batch."""
    if not hasattr(state.kv_cache, "with_length"):  # only a window has it; a checkpoint's own code has its own class
        return state
    return replace(state, kv_cache=state.kv_cache.with_length(module.config.sliding_window - 1))


def is_titans(model: PreTrainedModel) -> bool:
    """Returns whether a model is a Titans, which has a cache of its own."""
    return model.config.model_type == "titans"


def titans_cache(model: PreTrainedModel, layers: list[TitansLayer], seen: Tensor, learns: bool) -> TitansCache:
    """Returns the model's own cache with the states of `layers`, of rows that have read `seen` (R,) tokens.

    The state before the first token has a graph, and is computed here, where no fast weights act on persistent tokens.
    """
    cache, number = model.cache_class(model.config), int(seen.max())
    cache.learning = learns
    for own, layer in zip(cache.layers, layers, strict=True):
        own.state, own.is_initialized = layer.state() if number else layer.initial_state(len(seen)), number > 0
        own.set_num_columns(number)
    return cache
