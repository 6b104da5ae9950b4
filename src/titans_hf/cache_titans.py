"""The cache of a Titans model: what it has learned and last seen, of one size however much it has read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .configuration_titans import TitansConfig
from .memory_state import MemoryState
from .token_grid import Columns


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

    def map(self, fn: Callable[..., Tensor], *others: "LayerState") -> "LayerState":
        """The state with `fn` applied to every tensor, and to those of `others` beside it."""
        states = (self, *others)
        keys_values = (
            None if getattr(self, part) is None else fn(*(getattr(state, part) for state in states))
            for part in ("keys", "values")
        )
        return LayerState(
            self.memory.map(fn, *(state.memory for state in others)),
            fn(*(state.conv for state in states)),
            *keys_values,
            tuple(map(fn, *(state.segment_weights for state in states))),
        )

    def tensors(self) -> list[Tensor]:
        return _tensors(self)


class Span(NamedTuple):
    """Columns that a layer has read and may have to give up again: the state before them (None: nothing read) and what
    it takes to read them once more.

    inputs: (B, T, hidden), the mixer's. real, begins: (B, T), `Columns`.
    """

    state: LayerState | None
    inputs: Tensor
    real: Tensor
    begins: Tensor

    @property
    def num_columns(self) -> int:
        return self.inputs.shape[1]

    def append(self, inputs: Tensor, columns: Columns) -> "Span":
        shape, device = inputs.shape[:2], inputs.device
        real = torch.ones(shape, dtype=torch.bool, device=device) if columns.real is None else columns.real
        begins = torch.zeros(shape, dtype=torch.bool, device=device) if columns.begins is None else columns.begins
        new = (inputs, real, begins)
        return Span(self.state, *(torch.cat(pair, dim=1) for pair in zip(self[1:], new, strict=True)))

    @classmethod
    def empty(cls, state: LayerState | None, inputs: Tensor) -> "Span":
        nothing = torch.zeros(inputs.shape[0], 0, dtype=torch.bool, device=inputs.device)
        return cls(state, inputs[:, :0], nothing, nothing)

    def first(self, num_columns: int) -> "Span":
        return Span(self.state, *(x[:, :num_columns] for x in self[1:]))

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Span":
        return Span(None if self.state is None else self.state.map(fn), *map(fn, self[1:]))


def _tensors(part: LayerState | Span) -> list[Tensor]:
    found = []
    part.map(lambda x: found.append(x) or x)
    return found


class TitansCacheLayer(CacheLayerMixin):
    """One layer's `LayerState`, None before the first token. States are replaced, never written into: earlier ones, and
    the graph of a training step, stay intact.

    While `record_past`, `recorded` holds what was read since the last `crop`. After `crop(-k)`, `state` is the one
    before that, and `unread` what is left of it: the next call reads it again before its own tokens. `restart` (B,)
    marks rows that have been reset, whose next column begins a new document.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, compileable: bool = False):
        super().__init__()
        self.is_compileable = compileable
        self.state: LayerState | None = None
        self.num_columns = 0
        self.record_past = False
        self.recorded: Span | None = None
        self.unread: Span | None = None
        self.restart: Tensor | None = None

    def advance(self, before: LayerState | None, after: LayerState, inputs: Tensor, columns: Columns) -> None:
        """Takes the state after a call, padding included, that read `inputs` (B, T, hidden) from the state `before`."""
        if self.record_past:
            recorded = Span.empty(before, inputs) if self.recorded is None else self.recorded
            self.recorded = recorded.append(inputs, columns)
        self.state, self.unread, self.restart = after, None, None
        self.num_columns += inputs.shape[1]
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

    @property
    def batch_size(self) -> int:
        """-1 before the first token."""
        if self.state is not None:
            return self.state.conv.shape[0]
        return -1 if self.unread is None else self.unread.inputs.shape[0]

    def tensors(self) -> list[Tensor]:
        """All that the layer holds."""
        return [x for part in (self.state, self.recorded, self.unread) if part is not None for x in _tensors(part)]

    def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
        for part in ("state", "recorded", "unread"):
            held = getattr(self, part)
            setattr(self, part, None if held is None else held.map(fn))
        self.restart = None if self.restart is None else fn(self.restart)

    def reset(self, rows: Tensor | None = None) -> None:
        """Forgets everything, or what `rows` (B,) bool have read: their next token starts from the learned initial
        memory. Raises RuntimeError for some rows of a layer that records."""
        if rows is None:
            self.state, self.recorded, self.unread, self.restart = (None,) * 4
            self.num_columns, self.is_initialized = 0, False
        elif self.record_past:
            raise RuntimeError("reset(rows) cannot be taken back by crop(): reset all rows, or stop recording.")
        elif self.state is not None:
            self.restart = rows if self.restart is None else self.restart | rows

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        if held := self.tensors():
            self.device = held[0].device
            self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if hasattr(self, "device"):
            self._map(lambda x: x.to(self.device, non_blocking=True))

    def activate_past_recording(self) -> None:
        """From now on keeps what it takes to `crop` the columns that are read, until the next `crop`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last columns, `tokens_to_remove` being their number, negative; 0 accepts all that was read.

        Raises RuntimeError for columns that were not recorded: what a memory has learned cannot be unlearned.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"`tokens_to_remove` must be 0 or negative, as in crop(-3), but is {tokens_to_remove}.")
        span = self.recorded if self.unread is None else self.unread
        kept = tokens_to_remove + (0 if span is None else span.num_columns)
        if tokens_to_remove and kept < 0:
            raise RuntimeError(
                f"crop({tokens_to_remove}) goes back beyond the {kept - tokens_to_remove} columns recorded since the "
                "last crop. Call activate_past_recording() before reading what may have to be taken back, or read with "
                "a copy (copy.deepcopy)."
            )
        if tokens_to_remove:
            self.state, self.unread = span.state, span.first(kept) if kept else None
            self.num_columns += tokens_to_remove
            self.is_initialized = self.num_columns > 0
        self.recorded = None


class TitansCache(Cache):
    """The state of a Titans model between calls: memory weights and momentum, window or segment, convolution inputs.

    `generate()` and `model(..., use_cache=True)` make one by themselves; pass it back as `past_key_values` to read on.
    Its size depends on the model and the batch alone, not on the tokens read.

    ```python
    cache = TitansCache(model.config)
    model(first_part, past_key_values=cache)
    model(second_part, past_key_values=cache)  # as if both parts had been one sequence
    ```

    offloading: keep the state of a layer on the CPU except while the layer is at work.
    compileable: let `generate()` compile the decoding step.
    """

    def __init__(self, config: TitansConfig, *, offloading: bool = False, compileable: bool = False):
        super().__init__(layers=[TitansCacheLayer(compileable) for _ in range(config.num_hidden_layers)])
        self.offloading = offloading  # not the base class's: that one follows update(), which states never go through
        self.made_for = _shaping_fields(config)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        held = {id(x): x for layer in self.layers for x in layer.tensors()}
        return sum(x.numel() * x.element_size() for x in held.values())

    def reset(self, rows: Tensor | None = None) -> None:
        """Forgets everything, or what `rows` (B,) bool have read: their next token starts from the learned initial
        memory."""
        for layer in self.layers:
            layer.reset(rows)

    def detach(self) -> "TitansCache":
        """Cuts the cache from the graph that made it, in place (truncated backpropagation through time)."""
        for layer in self.layers:
            layer._map(Tensor.detach)
        return self

    def check_fits(self, config: TitansConfig, batch_size: int) -> None:
        """Raises ValueError, saying what differs, unless this is a cache of such a model for such a batch."""
        ours, theirs = self.made_for, _shaping_fields(config)
        if self.batch_size != -1:
            ours, theirs = ours | {"batch size": self.batch_size}, theirs | {"batch size": batch_size}
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
