"""A window of attention and a sink for causal language models of Transformers as they are.

Three public points of Transformers are used: a name in `AttentionInterface` and `AttentionMaskInterface`, which
`model.set_attn_implementation` sets; and cache layers, which hand the model keys and values and say which columns these
are. The attention itself stays the model's own; only its mask is made here. FlashAttention takes no mask: it computes
calls that stay within the window, and "sdpa" all others. (Its own window and the sink could be joined by the
log-sum-exp of its scores, but Transformers does not return the log-sum-exp, and it has no gradient.)

A query at position q of its row sees the keys of positions q - window + 1 to q. Once the first position has left its
window (q >= window) it also sees the sink: the keys and values that the model computes for one token read alone, which
stand in front. Up to `window` tokens the model is therefore the original one.

A row is a text without padding: the caller hands over the columns of a call that are real tokens, so that positions
count the tokens of the row. Keys and values of all rows end at the same column.

Shapes: B rows, T tokens of a call, P columns of the past, H heads of keys and values, D head size.
"""

import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, flash_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

PREFIX = "remember_"  # before the name of the model's own attention
NOT_IN_SDPA = ("softcap", "s_aux")  # arguments of an attention function that "sdpa" does not take


class LayerOffset(int):
    """The first column of a mask, 0, which carries the cache layer too: Transformers hands sizes alone to a mask."""

    layer: "KeyValueLayer"

    def __new__(cls, layer: "KeyValueLayer"):
        self = super().__new__(cls, 0)
        self.layer = layer
        return self


class KeyValueLayer(CacheLayerMixin):
    """Keys and values (B, H, P, D) of the last tokens of each row, the latest last.

    window: tokens that a query sees, itself included; None for all. extra: further columns that are kept, from which
    tokens can be read again. seen (B,) int64, on the CPU: tokens that each row has read; columns before a row's first
    token are not valid. sink: keys and values (B, H, 1, D) in front of the others; None while no query sees them.
    passage: keys and values (B, H, S, D) between sink and window, of which a row sees the columns of sees (B, S) bool.
    """

    is_croppable = True

    def __init__(self, window: int | None, extra: int = 0, *, is_sliding: bool = False):
        super().__init__()
        self.window, self.extra, self.is_sliding = window, extra, is_sliding
        self.seen = torch.zeros(1, dtype=torch.int64)
        self.sink: tuple[Tensor, Tensor] | None = None
        self.passage: tuple[Tensor, Tensor] | None = None
        self.sees: Tensor | None = None

    def empty(self) -> "KeyValueLayer":
        """Returns a layer of the same kind that has read nothing."""
        return KeyValueLayer(self.window, self.extra, is_sliding=self.is_sliding)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states[..., :0, :].detach(), value_states[..., :0, :].detach()
        self.is_initialized = True

    def num_past(self) -> int:
        """Returns how many columns of the past the next call sees, without the sink."""
        held = self.keys.shape[-2] if self.is_initialized else 0
        return held if self.window is None else min(held, self.window - 1)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Appends keys and values (B, H, T, D) and returns all visible to the call, (B, H, sink + S + P + T, D)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = key_states.shape[-2]
        number = self.num_past() + length
        new = [torch.cat([past, x], -2) for past, x in ((self.keys, key_states), (self.values, value_states))]
        self.keys, self.values = (self._kept(x, length) for x in new)
        visible = [x[..., -number:, :] for x in new]
        for front in (self.passage, self.sink):
            if front is not None:
                visible = [torch.cat([x.to(y.dtype), y], -2) for x, y in zip(front, visible, strict=True)]
        return visible[0], visible[1]

    def _kept(self, x: Tensor, length: int) -> Tensor:
        if self.window is not None and x.shape[-2] > (kept := self.window - 1 + self.extra):
            x = x[..., x.shape[-2] - kept :, :]
            x = x.contiguous() if length > max(1, self.extra) else x  # a view keeps all columns, which may be many
        return x.detach()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        front = (self.sink is not None) + (0 if self.passage is None else self.passage[0].shape[-2])
        return front + self.num_past() + query_length, LayerOffset(self)

    def get_seq_length(self) -> int:
        return int(self.seen.max())

    def get_max_length(self) -> int:
        return -1

    def map(self, function: Callable[[Tensor], Tensor]) -> "KeyValueLayer":
        """Returns a copy with `function` of each tensor that has a row dimension."""
        new = copy.copy(self)
        new._map_tensors(function)
        return new

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = function(self.keys), function(self.values)
        if self.passage is not None:
            self.passage = (function(self.passage[0]), function(self.passage[1]))
            self.sees = function(self.sees)

    def trimmed(self, number: int) -> "KeyValueLayer":
        """Returns the layer with its last `number` columns, and with the columns of passages that a row sees."""
        new = copy.copy(self)
        if new.is_initialized and new.keys.shape[-2] > number:
            new.keys, new.values = (x[..., x.shape[-2] - number :, :].clone() for x in (new.keys, new.values))
        if new.passage is not None and not bool((used := new.sees.any(0)).all()):
            places = used.nonzero()[:, 0]
            new.passage = tuple(x.index_select(-2, places.to(x.device)) for x in new.passage) if len(places) else None
            new.sees = new.sees[:, used]
        return new

    def clear(self) -> None:
        """Lets all rows have read nothing."""
        if self.is_initialized:
            self.keys, self.values = self.keys[..., :0, :].clone(), self.values[..., :0, :].clone()
        self.passage = None

    def rewind(self, number: int, is_earlier: bool = False) -> None:
        """Drops the last `number` columns."""
        self.keys, self.values = (x[..., : x.shape[-2] - number, :] for x in (self.keys, self.values))

    def put(self, rows: Tensor, other: "KeyValueLayer", num_rows: int) -> None:
        """Replaces the rows `rows` by the rows of another layer, which may have another number of columns."""
        if known := [x for x in (self, other) if x.is_initialized]:
            olds, news = ((x.keys, x.values) if x.is_initialized else (None, None) for x in (self, other))
            forms = known[0].keys, known[0].values
            self.keys, self.values = _put_columns(olds, news, forms, rows, num_rows)
            self.is_initialized = True
        if any(x.passage is not None for x in (self, other)):
            olds, news = (
                (None,) * 3 if x.passage is None else (*x.passage, x.sees[:, None, :, None]) for x in (self, other)
            )
            forms = news if olds[0] is None else olds
            *passage, sees = _put_columns(olds, news, forms, rows, num_rows)
            self.passage, self.sees = tuple(passage), sees[:, 0, :, 0]


def _put_columns(olds: tuple, news: tuple, forms: tuple, rows: Tensor, num_rows: int) -> list[Tensor]:
    """Replaces rows (I,) of tensors (R, H, P, D) by those of others, which may have another number of columns P: the
    shorter gets zeros in front. None is zeros like `forms`.
    """
    columns, done = max(0 if x is None else x.shape[-2] for x in (olds[0], news[0])), []
    for old, new, form in zip(olds, news, forms, strict=True):
        size = form.shape[1], 0, *form.shape[3:]
        pair = (form.new_zeros(n, *size) if x is None else x for x, n in ((old, num_rows), (new, len(rows))))
        old, new = (nn.functional.pad(x, (0, 0, columns - x.shape[-2], 0)) for x in pair)
        done.append(old.index_copy(0, rows.to(old.device), new.to(old)))
    return done


class StateLayer(LinearAttentionLayer):
    """States of a recurrent layer, which are replaced, never changed in place: gradients can pass through a call.

    start: the states before the unfinished chunk, from which it can be read again. earlier: the states before the chunk
    before that one.
    """

    written_in_place = True  # by some models, in a call of a single token

    def __init__(self, number_of_states: int = 1, **kwargs):
        super().__init__(number_of_states=number_of_states, **kwargs)
        self.record_past = True  # otherwise models write a single token's convolution state in place
        self.start: tuple[dict, dict] | None = None
        self.earlier: tuple[dict, dict] | None = None

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs
    ) -> Tensor:
        if not self.is_conv_states_initialized[state_idx]:
            self.device, self.dtype = conv_states.device, conv_states.dtype
            self.conv_kernel_size[state_idx] = conv_kernel_size or conv_states.shape[-1]
            self.is_conv_states_initialized[state_idx] = True
        size, full = self.conv_kernel_size[state_idx], conv_states
        if self.has_previous_state[state_idx]:
            full = torch.cat([self.conv_states[state_idx], conv_states], dim=-1)
        elif full.shape[-1] < size:
            full = nn.functional.pad(full, (size - full.shape[-1], 0))
        self.has_previous_state[state_idx] = True
        self.conv_states[state_idx] = full[..., -size:].detach()
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs) -> Tensor:
        self.is_recurrent_states_initialized[state_idx] = True
        self.recurrent_states[state_idx] = recurrent_states.detach()
        return recurrent_states

    def mark_start(self, rows: Tensor) -> None:
        """Notes the states of rows (B,) bool as the states before a chunk."""
        if self.start is not None:
            self.earlier = _merged(rows, self.start, self.earlier)
        self.start = _merged(rows, (self.conv_states, self.recurrent_states), self.start)

    def map(self, function: Callable[[Tensor], Tensor]) -> "StateLayer":
        new = copy.copy(self)
        apply = lambda states: {i: None if x is None else function(x) for i, x in states.items()}  # noqa: E731
        new.conv_states, new.recurrent_states = apply(self.conv_states), apply(self.recurrent_states)
        for name in ("start", "earlier"):
            marked = getattr(self, name)
            setattr(new, name, None if marked is None else (apply(marked[0]), apply(marked[1])))
        for name in ("has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized"):
            setattr(new, name, dict(getattr(self, name)))
        new.conv_kernel_size = dict(self.conv_kernel_size)
        return new

    def empty(self) -> "StateLayer":
        """Returns a layer of the same kind that has read nothing."""
        return StateLayer(self.number_of_states)

    def trimmed(self, number: int) -> "StateLayer":
        """Returns the layer; a new one if its rows have read nothing."""
        return self if number else self.empty()

    def clear(self) -> None:
        """Lets all rows have read nothing."""
        zeros = StateLayer.map(self, torch.zeros_like)
        for name in ("conv_states", "recurrent_states", "start", "earlier"):
            setattr(self, name, getattr(zeros, name))

    def rewind(self, number: int, is_earlier: bool = False) -> None:
        """Goes back to the states before the unfinished chunk, or to `earlier`."""
        conv, recurrent = self.earlier if is_earlier else self.start
        self.conv_states, self.recurrent_states = dict(conv), dict(recurrent)
        for i in range(self.number_of_states):
            self.has_previous_state[i] = self.conv_states[i] is not None or self.recurrent_states[i] is not None

    def put(self, rows: Tensor, other: "StateLayer", num_rows: int) -> None:
        """Replaces the rows `rows` by the rows of another layer."""
        for name in ("conv_states", "recurrent_states"):
            _put_states(getattr(self, name), getattr(other, name), rows, num_rows)
        for name in ("start", "earlier"):
            marks = [getattr(x, name) for x in (self, other)]
            if any(x is not None for x in marks):
                nothing = dict.fromkeys(range(self.number_of_states))
                mark, new = ((nothing.copy(), nothing.copy()) if x is None else x for x in marks)
                setattr(self, name, mark)
                for own, of_rows in zip(mark, new, strict=True):
                    _put_states(own, of_rows, rows, num_rows)
        for name in ("has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized"):
            own = getattr(self, name)
            own.update({i: x or own[i] for i, x in getattr(other, name).items()})
        if any(other.is_conv_states_initialized.values()):
            self.conv_kernel_size, self.device, self.dtype = dict(other.conv_kernel_size), other.device, other.dtype


@contextmanager
def copied_states(layers: list) -> Iterator[None]:
    """For a call of a single token: recurrent states are copies, which the model may write in place, and a backward
    pass keeps them as they were before that.
    """
    layers = [x for x in layers if isinstance(x, StateLayer) and x.written_in_place]
    for layer in layers:
        layer.recurrent_states = {i: None if x is None else x.clone() for i, x in layer.recurrent_states.items()}
    states = [x for layer in layers for x in layer.recurrent_states.values() if x is not None]
    written = {x.untyped_storage().data_ptr() for x in states}

    def kept(x: Tensor) -> Tensor:
        return x.clone() if x.untyped_storage().data_ptr() in written else x

    with torch.autograd.graph.saved_tensors_hooks(kept, lambda x: x) if written else nullcontext():
        yield
    for layer in layers:
        layer.recurrent_states = {i: None if x is None else x.detach() for i, x in layer.recurrent_states.items()}


class StateAndKeyValueLayer(StateLayer, KeyValueLayer):
    """A layer with attention and recurrence side by side."""

    is_croppable = True

    def __init__(self, window: int | None, extra: int = 0, number_of_states: int = 1):
        KeyValueLayer.__init__(self, window, extra)
        StateLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args, **kwargs) -> None:
        KeyValueLayer.lazy_initialization(self, *args, **kwargs)

    def map(self, function: Callable[[Tensor], Tensor]) -> "StateAndKeyValueLayer":
        new = StateLayer.map(self, function)
        new._map_tensors(function)
        return new

    def empty(self) -> "StateAndKeyValueLayer":
        return StateAndKeyValueLayer(self.window, self.extra, self.number_of_states)

    def trimmed(self, number: int) -> "StateAndKeyValueLayer":
        return KeyValueLayer.trimmed(self, number) if number else self.empty()

    def clear(self) -> None:
        StateLayer.clear(self)
        KeyValueLayer.clear(self)

    def rewind(self, number: int, is_earlier: bool = False) -> None:
        StateLayer.rewind(self, number, is_earlier)
        KeyValueLayer.rewind(self, number)

    def put(self, rows: Tensor, other: "StateAndKeyValueLayer", num_rows: int) -> None:
        StateLayer.put(self, rows, other, num_rows)
        KeyValueLayer.put(self, rows, other, num_rows)


def make_layers(model: PreTrainedModel, window: int | None, extra: int) -> list:
    """Returns new cache layers for a model: full attention gets the window, sliding attention keeps its own.

    Raises ValueError for a kind of layer that is not known.
    """
    layers = []
    for layer in DynamicCache(config=model.config.get_text_config(decoder=True)).layers:
        if type(layer) is DynamicLayer:
            layers.append(KeyValueLayer(window, extra))
        elif type(layer) is DynamicSlidingWindowLayer:
            layers.append(KeyValueLayer(layer.sliding_window, extra, is_sliding=True))
        elif type(layer) is LinearAttentionLayer:
            layers.append(StateLayer(layer.number_of_states))
        elif type(layer) is LinearAttentionAndFullAttentionLayer:
            layers.append(StateAndKeyValueLayer(window, extra, layer.number_of_states))
        elif type(layer) is DummyLayer:
            layers.append(layer)
        else:
            raise ValueError(f"`model` has a cache layer {type(layer).__name__}, for which there is no window.")
    return layers


def set_window_attention(model: PreTrainedModel) -> str:
    """Lets a model make its masks here, and returns the name of its own attention, which it keeps."""
    own = model.config.get_text_config(decoder=True)._attn_implementation
    model.set_attn_implementation(register_attention(own))
    return own


def register_attention(own: str) -> str:
    """Registers the attention `own` with masks that are made here, and returns its name."""
    name = PREFIX + re.sub("flash|/", "-", own)  # of a name with these, Transformers would look for a kernel
    AttentionInterface.register(name, _attention(own))
    AttentionMaskInterface.register(name, _mask(own))
    return name


def _attention(own: str) -> Callable:
    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask=None, *args, **kwargs):
        mask = attention_mask  # some families pass it by its name
        used = own
        if mask is not None and ALL_MASK_ATTENTION_FUNCTIONS[own] is flash_attention_mask:
            used = "sdpa"
            if any(kwargs.get(x) is not None for x in NOT_IN_SDPA):
                used, mask = "eager", _additive(mask, query.dtype)
        if used == "eager":  # each modeling file has its own
            function = sys.modules[type(module).__module__].eager_attention_forward
        else:
            function = ALL_ATTENTION_FUNCTIONS[used]
        if used not in ("eager", "sdpa"):  # a kernel may be looked up by the name in the configuration
            module = View(module, config=View(module.config, _attn_implementation=own))
        return function(module, query, key, value, mask, *args, **kwargs)

    return attention


class View:
    """An object as one call sees it, with other values of some attributes: the object itself is shared by threads."""

    def __init__(self, viewed: Any, **values: Any):
        self.__dict__.update(values, _viewed=viewed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_viewed"], name)


def _mask(own: str) -> Callable:
    def mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: Callable | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        **kwargs,
    ) -> Tensor | None:
        layer, make = getattr(kv_offset, "layer", None), ALL_MASK_ATTENTION_FUNCTIONS[own]
        sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
        if layer is None or _is_plain(layer, q_length):
            q_offset = q_offset if layer is None else int(layer.seen.max())
            offsets = {"q_offset": q_offset, "kv_offset": int(kv_offset), "mask_function": mask_function}
            return make(**sizes, **offsets, dtype=dtype, device=device, **kwargs)
        # For one query on the CPU, which then need not wait for a GPU; for many queries the CPU would be slow.
        allowed = visible_columns(layer, q_length, mask_function, "cpu" if q_length == 1 else device)
        if make is sdpa_mask and q_length == 1 and bool(allowed.all()):
            return None
        allowed = allowed.to(device)
        if make is eager_mask:
            return _additive(allowed, dtype)
        if make in (sdpa_mask, flash_attention_mask):
            return allowed
        sees = lambda row, head, query, column: allowed[row, 0, query, column]  # noqa: E731
        return make(**sizes, mask_function=sees, device=device)

    return mask


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


def _is_plain(layer: KeyValueLayer, length: int) -> bool:
    """Returns whether all rows have read equally many tokens, and none leaves the window in a call of `length`."""
    seen = int(layer.seen.max())
    fits = layer.window is None or seen + length <= layer.window
    return fits and layer.sink is None and layer.passage is None and layer.num_past() == seen == int(layer.seen.min())


def visible_columns(layer: KeyValueLayer, length: int, mask_function: Callable, device: torch.device | str) -> Tensor:
    """Returns (B, 1, T, sink + S + P + T) bool on a device, True where a query sees a key."""
    past, seen = layer.num_past(), layer.seen.to(device)[:, None, None, None]
    queries = seen + torch.arange(length, device=device)[:, None]  # (B, 1, T, 1) positions in the row
    keys = seen - past + torch.arange(past + length, device=device)  # (B, 1, 1, P + T)
    rows = torch.arange(len(seen), device=device)[:, None, None, None]
    allowed = mask_function(rows, torch.zeros_like(rows), queries, keys) & (keys >= 0)
    if layer.window is not None:
        allowed = allowed & (queries - keys < layer.window)
    if layer.passage is not None:
        sees = layer.sees.to(device)[:, None, None, :]
        allowed = torch.cat([sees.expand(*allowed.shape[:3], -1), allowed], -1)
    if layer.sink is not None:
        allowed = torch.cat([queries >= layer.window, allowed], -1)
    return allowed


def _merged(rows: Tensor, new: tuple[dict, dict], old: tuple[dict, dict] | None) -> tuple[dict, dict]:
    """Returns the states `new` in rows (B,) bool, and `old` in the others."""
    if old is None or bool(rows.all()):
        return dict(new[0]), dict(new[1])
    first, second = ({i: _where_rows(rows, y[i], x.get(i)) for i in y} for x, y in zip(old, new, strict=True))
    return first, second


def _where_rows(rows: Tensor, new: Tensor | None, old: Tensor | None) -> Tensor | None:
    if new is None:
        return None
    old = torch.zeros_like(new) if old is None else old
    return torch.where(rows.to(new.device).view(-1, *[1] * (new.dim() - 1)), new, old)


def _put_states(old: dict, new: dict, rows: Tensor, num_rows: int) -> None:
    """Replaces the rows `rows` of the states `old` by those of `new`. None is the state of rows that have read nothing:
    zeros, if other rows have read.
    """
    for i, x in new.items():
        own = old.get(i)
        if own is None and x is not None:
            own = x.new_zeros(num_rows, *x.shape[1:])
        if x is None and own is not None:
            x = own.new_zeros(len(rows), *own.shape[1:])
        old[i] = None if x is None else own.index_copy(0, rows.to(own.device), x)
