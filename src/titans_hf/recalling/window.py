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
KEYS, STATES, MARKS = ("keys", "values"), ("conv_states", "recurrent_states"), ("start", "earlier")
PASSAGE = "passage."
PASSAGES = *_, SEES = tuple(PASSAGE + x for x in (*KEYS, "sees"))
COLUMNS = (*KEYS, *PASSAGES)  # (B, H, P, D) with any number of columns P
NOT_IN_SDPA = ("softcap", "s_aux")  # arguments of an attention function that "sdpa" does not take


class LayerOffset(int):
    """The first column of a mask, 0, which carries the cache layer too: Transformers hands sizes alone to a mask."""

    layer: "KeyValueLayer"

    def __new__(cls, layer: "KeyValueLayer"):
        self = super().__new__(cls, 0)
        self.layer = layer
        return self


class RowLayer:
    """A layer of a cache whose tensors (B, ...) have a row for each text. None of them is changed in place."""

    def named(self) -> dict[str, Tensor]:
        """Returns the tensors by name."""
        raise NotImplementedError

    def set_named(self, tensors: dict[str, Tensor]) -> None:
        """Takes tensors by name in the place of all tensors."""
        raise NotImplementedError

    def empty(self) -> "RowLayer":
        """Returns a layer of the same kind that has read nothing."""
        raise NotImplementedError

    def replaced(self, tensors: dict[str, Tensor]) -> "RowLayer":
        """Returns a copy with other tensors."""
        new = copy.copy(self)
        new.set_named(tensors)
        return new

    def map(self, function: Callable[[Tensor], Tensor]) -> "RowLayer":
        """Returns a copy with `function` of each tensor."""
        return self.replaced({name: function(x) for name, x in self.named().items()})

    def cleared(self) -> "RowLayer":
        """Returns a layer whose rows have read nothing."""
        tensors = {name: x for name, x in self.named().items() if not name.startswith(PASSAGE)}
        return self.replaced({n: x[..., :0, :] if n in COLUMNS else torch.zeros_like(x) for n, x in tensors.items()})

    def trimmed(self, number: int) -> "RowLayer":
        """Returns the layer with its last `number` columns, and with those of passages that a row sees."""
        if not number:
            return self.empty()
        tensors = self.named()
        for name in KEYS if KEYS[0] in tensors and tensors[KEYS[0]].shape[-2] > number else ():
            tensors[name] = tensors[name][..., -number:, :].clone()
        if (sees := tensors.get(SEES)) is not None and not bool((used := sees.any(0)[0, :, 0]).all()):
            places = used.nonzero()[:, 0]
            for name in (x for x in list(tensors) if x.startswith(PASSAGE)):
                x = tensors.pop(name)
                tensors |= {name: x.index_select(-2, places.to(x.device))} if len(places) else {}
        return self.replaced(tensors)

    def with_rows(self, rows: Tensor, other: "RowLayer", number: int) -> "RowLayer":
        """Returns the `number` rows with those of another layer in the places `rows` (I,). Of columns, the shorter of
        the two gets more in front; what one of them does not have is zeros.
        """
        own, new, tensors = self.named(), other.named(), {}
        for name in own | new:
            form = own[name] if name in own else new[name]
            form = form[..., :0, :] if name in COLUMNS else form
            pair = [own.get(name), new.get(name)]
            for i, size in enumerate((number, len(rows))):
                pair[i] = form.new_zeros(size, *form.shape[1:]) if pair[i] is None else pair[i]
            if name in COLUMNS:
                most = max(x.shape[-2] for x in pair)
                pair = [nn.functional.pad(x, (0, 0, most - x.shape[-2], 0)) for x in pair]
            tensors[name] = pair[0].index_copy(0, rows.to(pair[0].device), pair[1].to(pair[0]))
        return self.replaced(tensors)


class KeyValueLayer(RowLayer, CacheLayerMixin):
    """Keys and values (B, H, P, D) of the last tokens of each row, the latest last.

    window: tokens that a query sees, itself included; None for all. extra: further columns that are kept, from which
    tokens can be read again. seen (B,) int64, on the CPU: tokens that each row has read; columns before a row's first
    token are not valid. sink: keys and values (B, H, 1, D) in front of the others; None while no query sees them.
    passage: keys and values (B, H, S, D) between sink and window, and which of them a row sees, (B, 1, S, 1) bool, on
    the CPU.
    """

    is_croppable = True

    def __init__(self, window: int | None, extra: int = 0, *, is_sliding: bool = False):
        CacheLayerMixin.__init__(self)
        self.window, self.extra, self.is_sliding = window, extra, is_sliding
        self.seen = torch.zeros(1, dtype=torch.int64)
        self.sink: tuple[Tensor, Tensor] | None = None
        self.passage: tuple[Tensor, Tensor, Tensor] | None = None

    def empty(self) -> "KeyValueLayer":
        return KeyValueLayer(self.window, self.extra, is_sliding=self.is_sliding)

    def named(self) -> dict[str, Tensor]:
        tensors = dict(zip(KEYS, (self.keys, self.values), strict=True)) if self.is_initialized else {}
        return tensors | ({} if self.passage is None else dict(zip(PASSAGES, self.passage, strict=True)))

    def set_named(self, tensors: dict[str, Tensor]) -> None:
        self.is_initialized = KEYS[0] in tensors
        self.keys, self.values = (tensors.get(x) for x in KEYS)
        self.passage = tuple(tensors[x] for x in PASSAGES) if SEES in tensors else None

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
                visible = [torch.cat([x.to(y.dtype), y], -2) for x, y in zip(front, visible, strict=False)]
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

    def rewound(self, number: int, is_earlier: bool = False) -> "KeyValueLayer":
        """Returns the layer without its last `number` columns."""
        return self.replaced(
            {n: x[..., : x.shape[-2] - number, :] if n in KEYS else x for n, x in self.named().items()}
        )


class StateLayer(RowLayer, LinearAttentionLayer):
    """States of a recurrent layer, which are replaced, never changed in place: gradients can pass through a call.

    start: the states by name before the unfinished chunk, from which it can be read again. earlier: the states before
    the chunk before that one.
    """

    written_in_place = True  # by some models, in a call of a single token

    def __init__(self, number_of_states: int = 1, **kwargs):
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states, **kwargs)
        self.record_past = True  # otherwise models write a single token's convolution state in place
        self.start: dict[str, Tensor] = {}
        self.earlier: dict[str, Tensor] = {}

    def empty(self) -> "StateLayer":
        return StateLayer(self.number_of_states)

    def states(self) -> dict[str, Tensor]:
        """Returns the states by name, such as "conv_states.0"."""
        groups = {name: getattr(self, name) for name in STATES}
        return {f"{name}.{i}": x for name, group in groups.items() for i, x in group.items() if x is not None}

    def named(self) -> dict[str, Tensor]:
        marks = {f"{mark}.{name}": x for mark in MARKS for name, x in getattr(self, mark).items()}
        return self.states() | marks

    def set_named(self, tensors: dict[str, Tensor]) -> None:
        for mark in MARKS:
            marked = {name.removeprefix(f"{mark}."): x for name, x in tensors.items() if name.startswith(f"{mark}.")}
            setattr(self, mark, marked)
        numbers = range(self.number_of_states)
        self.conv_states, self.recurrent_states = ({i: tensors.get(f"{x}.{i}") for i in numbers} for x in STATES)
        self.is_conv_states_initialized = {i: x is not None for i, x in self.conv_states.items()}
        self.is_recurrent_states_initialized = {i: x is not None for i, x in self.recurrent_states.items()}
        self.has_previous_state = {
            i: self.is_conv_states_initialized[i] or self.is_recurrent_states_initialized[i] for i in numbers
        }
        self.conv_kernel_size = {i: None if x is None else x.shape[-1] for i, x in self.conv_states.items()}

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
        self.earlier, self.start = (
            {
                name: torch.where(
                    rows.to(x.device).view(-1, *[1] * (x.dim() - 1)), x, old.get(name, torch.zeros_like(x))
                )
                for name, x in new.items()
            }
            for new, old in ((self.start, self.earlier), (self.states(), self.start))
        )

    def rewound(self, number: int, is_earlier: bool = False) -> "StateLayer":
        """Returns the layer with the states before the unfinished chunk, or with `earlier`."""
        kept = {name: x for name, x in self.named().items() if not name.startswith(STATES)}
        return self.replaced(kept | (self.earlier if is_earlier else self.start))


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

    def empty(self) -> "StateAndKeyValueLayer":
        return StateAndKeyValueLayer(self.window, self.extra, self.number_of_states)

    def named(self) -> dict[str, Tensor]:
        return StateLayer.named(self) | KeyValueLayer.named(self)

    def set_named(self, tensors: dict[str, Tensor]) -> None:
        StateLayer.set_named(self, tensors)
        KeyValueLayer.set_named(self, tensors)

    def rewound(self, number: int, is_earlier: bool = False) -> "StateAndKeyValueLayer":
        return KeyValueLayer.rewound(StateLayer.rewound(self, number, is_earlier), number)


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
        sees = layer.passage[2].to(device).mT  # (B, 1, 1, S)
        allowed = torch.cat([sees.expand(*allowed.shape[:3], -1), allowed], -1)
    if layer.sink is not None:
        allowed = torch.cat([queries >= layer.window, allowed], -1)
    return allowed
