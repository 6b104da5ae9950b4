"""What `remember` adds to a model."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .fast_weights import FastWeights
from .passages import Passages
from .titans_layer import is_titans
from .token_list import TokenList

PASSAGES, FAST_WEIGHTS, LIST = PARTS = ("passages", "fast_weights", "list")
READING: ContextVar[dict[str, Tensor] | None] = ContextVar("reading", default=None)  # in `Memory.call`: what hooks note


@dataclass
class Memory:
    """What `remember` adds to a model; the states of texts are in `MemoryCache`.

    window: tokens that a query of full attention sees, None for all. passages, fast_weights, token_list: None if there
    is none.
    first_token: the token of the sink. learn_from: "read" or "all". forward: the model's own,
    with these `arguments`.
    """

    window: int | None
    passages: Passages | None
    fast_weights: FastWeights | None
    token_list: TokenList | None
    first_token: int
    learn_from: str
    forward: Callable
    arguments: frozenset[str]
    own_attention: str = ""
    own_learning: bool = True
    learning: bool = True
    has_states: bool = False
    hooks: list = field(default_factory=list)
    checkpointed: list = field(default_factory=list)  # modules that had gradient checkpointing, which is off

    def call(self, model: PreTrainedModel, ids: Tensor, cache: Any, seen: Tensor, **arguments: Any) -> Any:
        """Calls the model's own forward, as a part of a reading: ids (R, T) of rows that have read seen (R,) tokens."""
        if "position_ids" in self.arguments and not is_titans(model):
            arguments["position_ids"] = (seen[:, None] + torch.arange(ids.shape[1])).to(ids.device)
        token = READING.set(noted := {})
        try:
            output = self.forward(model, input_ids=ids, cache=cache, use_cache=True, return_dict=True, **arguments)
        finally:
            READING.reset(token)
        output.noted = noted
        return output

    @property
    def parts(self) -> list[str]:
        """The names of the parts that there are."""
        own = (self.passages, self.fast_weights, self.token_list)
        return [name for name, x in zip(PARTS, own, strict=True) if x is not None]

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return 64 if self.fast_weights is None else self.fast_weights.step.chunk

    @property
    def extra_columns(self) -> int:
        """Columns that the window keeps beyond what a query sees, from which the last tokens can be read again."""
        of_chunk = 0 if self.fast_weights is None else self.chunk
        if self.passages is None:
            return of_chunk
        query = self.passages.query  # most tokens of `tokens_again`:
        return max(of_chunk, self.chunk + query // 4 - 1 if self.has_states else query)

    def tokens_again(self, seen: int) -> tuple[int, bool]:
        """Returns how many of the last tokens of a row of `seen` tokens a recall reads again, and whether this begins
        before the row's unfinished chunk: recurrent layers can go back to the starts of the last two chunks.
        """
        query = self.passages.query
        if not self.has_states:
            return min(query, seen), False
        number = (seen - 1) % self.chunk + 1
        is_earlier = number < query // 4 and number + self.chunk <= seen
        return (number + self.chunk if is_earlier else number), is_earlier

    @property
    def needs_marks(self) -> bool:
        """Whether recurrent layers note their states at the starts of chunks."""
        return self.has_states and (self.fast_weights is not None or self.passages is not None)

    def initial_state(self, model: PreTrainedModel, rows: int, device: torch.device) -> dict[str, Tensor]:
        """Returns the tensors of a `MemoryCache` before the first token."""
        state, dtype = {}, model.dtype
        if self.fast_weights is not None:
            state |= self.fast_weights.initial_state(rows, torch.promote_types(dtype, torch.float32), device)
            state["chunk.ids"] = torch.zeros(rows, self.chunk, dtype=torch.int64, device=device)
            state["chunk.learns"] = torch.zeros(rows, self.chunk, dtype=torch.bool)  # the host asks for it
        if self.token_list is not None:
            vocabulary = model.get_output_embeddings().weight.shape[0]
            state |= self.token_list.initial_state(rows, vocabulary, dtype, device)
        if self.passages is not None:
            state |= self.passages.initial_state(rows, device)
        return state


def memory_of(model: PreTrainedModel) -> Memory:
    """Returns the memory that `remember` gave to a model. Raises ValueError for a model without it."""
    memory = getattr(model, "memory", None)
    if not isinstance(memory, Memory):
        raise ValueError(f"`model` is a {type(model).__name__} without a memory: call `remember(model)` first.")
    return memory


def check_settings(model: PreTrainedModel, window: int | None, learn_from: str) -> None:
    """Raises ValueError for a bad argument of `remember`."""
    if window is not None and is_titans(model):
        raise ValueError(f"`window` must be None for a Titans, which has a window of its own, got {window!r}.")
    if window is not None and (not isinstance(window, int) or window < 2):
        raise ValueError(f"`window` must be None or a whole number of at least 2, got {window!r}.")
    if learn_from not in ("read", "all"):
        raise ValueError(f'`learn_from` must be "read" or "all", got {learn_from!r}.')


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


def end_tokens(*sources: Any) -> tuple[int, ...]:
    """Returns the end tokens of the first of some generation configs and tokenizers that has any; in a chat they end a
    turn.
    """
    for found in (source.eos_token_id for source in sources):
        if found is not None:
            return (found,) if isinstance(found, int) else tuple(map(int, found))
    return ()
