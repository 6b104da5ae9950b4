"""The cache of a Titans model: what it has learned and last seen, of one size however much it has read."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .configuration_titans import TitansConfig
from .memory_state import MemoryState


@dataclass(frozen=True)
class LayerState:
    """Everything a decoder layer needs to read on; every tensor has the batch first.

    memory: weights, momentum, chunk-start weights and tokens seen (`MemoryState`).
    conv: (B, kernel - 1, 3 * hidden), the last inputs of the memory's convolutions.
    keys, values: (B, P + W - 1, h, D) persistent tokens and window; in MAC (B, P + 2 L, h, D) persistent tokens,
    recalled memory and segment; None in LMM.
    segment_weights: MAC, the memory's weights at the start of the running segment; empty where that is the chunk's
    start.
    """

    memory: MemoryState
    conv: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    segment_weights: tuple[Tensor, ...] = ()

    def map(self, fn: Callable[[Tensor], Tensor]) -> "LayerState":
        """The state with `fn` applied to every tensor."""
        keys_values = (None if x is None else fn(x) for x in (self.keys, self.values))
        return LayerState(self.memory.map(fn), fn(self.conv), *keys_values, tuple(fn(w) for w in self.segment_weights))

    def tensors(self) -> list[Tensor]:
        found = []
        self.map(lambda x: found.append(x) or x)
        return found


class TitansCacheLayer(CacheLayerMixin):
    """One layer's `LayerState`, None before the first token. States are replaced, never written into: earlier ones, and
    the graph of a training step, stay intact."""

    is_sliding = False

    def __init__(self):
        super().__init__()
        self.state: LayerState | None = None
        self.num_columns = 0

    def set(self, state: LayerState, num_columns: int) -> None:
        """Takes the state after `num_columns` more columns of input, padding included."""
        self.state = state
        self.num_columns += num_columns
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("A Titans layer makes its state itself, from learned weights, at the first token.")

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(
            "A TitansCache takes whole layer states, not keys and values: use it with a Titans model."
        )

    def get_seq_length(self) -> int:
        return self.num_columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = self.state.map(fn)

    def reset(self) -> None:
        """Forgets everything: the next token starts from the learned initial memory."""
        self.state, self.num_columns, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        if self.state is not None:
            self.device = self.state.conv.device
            self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.state is not None and hasattr(self, "device"):
            self._map(lambda x: x.to(self.device, non_blocking=True))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError(
                f"crop({tokens_to_remove}): what a Titans memory has learned cannot be unlearned. Copy the cache "
                "(copy.deepcopy) before reading tokens that may have to be taken back."
            )


class TitansCache(Cache):
    """The state of a Titans model between calls: memory weights and momentum, window or segment, convolution inputs.

    `generate()` and `model(..., use_cache=True)` make one by themselves; pass it back as `past_key_values` to read on.
    Its size depends on the model and the batch alone, not on the tokens read.

    ```python
    cache = TitansCache(model.config)
    model(first_part, past_key_values=cache)
    model(second_part, past_key_values=cache)  # as if both parts had been one sequence
    ```
    """

    def __init__(self, config: TitansConfig):
        super().__init__(layers=[TitansCacheLayer() for _ in range(config.num_hidden_layers)])
        self.made_for = _shaping_fields(config)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        states = (layer.state for layer in self.layers if layer.state is not None)
        return sum(x.numel() * x.element_size() for state in states for x in state.tensors())

    def detach(self) -> "TitansCache":
        """Cuts the cache from the graph that made it, in place (truncated backpropagation through time)."""
        for layer in self.layers:
            layer._map(Tensor.detach)
        return self

    def check_fits(self, config: TitansConfig, batch_size: int) -> None:
        """Raises ValueError, saying what differs, unless this is a cache of such a model for such a batch."""
        ours, theirs = self.made_for, _shaping_fields(config)
        for state in (layer.state for layer in self.layers if layer.state is not None):
            ours, theirs = ours | {"batch size": state.conv.shape[0]}, theirs | {"batch size": batch_size}
        for name, value in ours.items():
            if value != theirs.get(name):
                raise ValueError(
                    f"`past_key_values` does not fit the model and its input: its {name} is {value}, "
                    f"not {theirs.get(name)}."
                )


def _shaping_fields(config: TitansConfig) -> dict:
    """The fields of a config that say what its states look like and when they change."""
    names = ["variant", "num_hidden_layers", "hidden_size", "memory_num_heads", "memory_depth", "memory_expansion"]
    names += ["memory_chunk_size", "memory_conv_kernel"]
    if config.variant != "lmm":
        names += ["num_persistent_tokens", "num_key_value_heads", "head_dim"]
        names += ["segment_length"] if config.variant == "mac" else ["sliding_window"]
    return {name: getattr(config, name) for name in names}


__all__ = ["TitansCache", "TitansCacheLayer"]
