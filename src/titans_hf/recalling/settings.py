"""What `remember` adds to a model, resolved from its arguments and from the model."""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .passages import Passages
from .rotary import check_window
from .window import KeyValueLayer, StateLayer, make_layers

CHUNK = 64  # tokens from one note of the states of recurrent layers to the next
READING: ContextVar[bool] = ContextVar("reading", default=False)  # in `Memory.call`


@dataclass(eq=False)
class Memory:
    """What `remember` adds to a model; the states of texts are in `MemoryCache`.

    window: tokens that a query of full attention sees. passages: None for the window alone. first_token: the token of
    the sink. forward: the model's own, with these `arguments`. has_states: of recurrent layers. own_attention: the name
    of the model's attention. checkpointed: modules that had gradient checkpointing, which is off. frequencies: see
    `rotary`.
    """

    window: int
    passages: Passages | None
    first_token: int
    forward: Callable
    arguments: frozenset[str]
    has_states: bool
    chunk: int = CHUNK
    own_attention: str = ""
    hooks: list = field(default_factory=list)
    checkpointed: list = field(default_factory=list)
    frequencies: list = field(default_factory=list)

    def call(
        self, model: PreTrainedModel, ids: Tensor, cache: Any, seen: Tensor, num_kept: int, **arguments: Any
    ) -> Any:
        """Calls the model's own forward, as a part of a reading: ids (R, T) of rows that have read seen (R,) tokens,
        the last `num_kept` logits of which are needed.
        """
        if "logits_to_keep" in self.arguments:
            arguments["logits_to_keep"] = num_kept
        if "position_ids" in self.arguments:
            arguments["position_ids"] = (seen[:, None] + torch.arange(ids.shape[1])).to(ids.device)
        token = READING.set(True)
        try:
            return self.forward(model, input_ids=ids, cache=cache, use_cache=True, return_dict=True, **arguments)
        finally:
            READING.reset(token)

    @property
    def needs_marks(self) -> bool:
        """Whether recurrent layers note their states at the starts of chunks, for the last tokens to be read again."""
        return self.has_states and self.passages is not None

    @property
    def extra_columns(self) -> int:
        """Columns that the window keeps beyond what a query sees, from which the last tokens can be read again."""
        if self.passages is None:
            return 0
        again = self.passages.again  # most tokens of `tokens_again`:
        return self.chunk + again // 4 - 1 if self.has_states else again

    def tokens_again(self, seen: int) -> tuple[int, bool]:
        """Returns how many of the last tokens of a row of `seen` tokens a recall reads again, and whether this begins
        before the row's unfinished chunk: recurrent layers can go back to the starts of the last two chunks.
        """
        again = self.passages.again
        if not self.has_states:
            return min(again, seen), False
        number = (seen - 1) % self.chunk + 1
        is_earlier = number < again // 4 and number + self.chunk <= seen
        return (number + self.chunk if is_earlier else number), is_earlier


def resolve(model: PreTrainedModel, window: int, passages: Passages | None, first_token: int | None) -> Memory:
    """Returns the memory that the arguments of `remember` give to a model, which is not changed.

    Raises ValueError for a model that can have none, and for a bad argument.
    """
    kind, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if hasattr(model, "memory"):
        raise ValueError("`model` has a memory already: call `forget(model)` first.")
    if config.model_type == "titans":
        raise ValueError(f"`model` is a {kind}, which has a memory of its own: read with a `TitansCache`.")
    if "forward" in model.__dict__ and "_old_forward" not in model.__dict__:
        raise ValueError("`model.forward` was replaced, as torch.compile and accelerate do: call `remember` before.")
    if type(window) is not int or window < 2:
        why = " Without a window all text stays in sight: use the model itself." if window is None else ""
        raise ValueError(f"`window` must be a whole number of at least 2, got {window!r}.{why}")
    if passages is not None and not isinstance(passages, Passages):
        raise ValueError(f"`passages` must be a `Passages`, or None for the window alone, got {passages!r}.")
    layers = make_layers(model, window, 0)
    if not any(isinstance(x, KeyValueLayer) and not x.is_sliding for x in layers):
        raise ValueError(
            f"`model` is a {kind}, none of whose layers has full attention, which passages need. Take a model in which "
            "some layers have it; where all layers slide, `from_pretrained(..., sliding_window=None)` may give them it."
        )
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"`model` is a {kind}, which does not use the attention interface of Transformers: it can have no window."
        )
    check_window(model, window)
    return Memory(
        window=window,
        passages=passages,
        first_token=choose_first_token(model, first_token),
        forward=type(model).forward,
        arguments=frozenset(inspect.signature(type(model).forward).parameters),
        has_states=any(isinstance(x, StateLayer) for x in layers),
    )


def memory_of(model: PreTrainedModel) -> Memory:
    """Returns the memory that `remember` gave to a model. Raises ValueError for a model without it."""
    memory = getattr(model, "memory", None)
    if not isinstance(memory, Memory):
        raise ValueError(f"`model` is a {type(model).__name__} without a memory: call `remember(model)` first.")
    return memory


def choose_first_token(model: PreTrainedModel, given: int | None) -> int:
    """Returns the token of the sink: the given token, or the model's begin token, or its end token."""
    config = model.config.get_text_config(decoder=True)
    size = model.get_input_embeddings().weight.shape[0]
    for token in (given, config.bos_token_id, config.eos_token_id, 0):
        token = token[0] if isinstance(token, list) and token else token
        if token is not None and not isinstance(token, list):
            break
    if type(token) is not int or not 0 <= token < size:
        raise ValueError(f"`first_token` must be a token of the model, 0 to {size - 1}, got {token!r}.")
    return token
