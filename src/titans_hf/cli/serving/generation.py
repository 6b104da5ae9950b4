"""Generates the answers of a server: from snapshots, up to a limit, without the stop string, while the client is there.

The server of transformers asks a `GenerateManager` for each answer; `TitansGenerateManager` takes its place.
"""

import asyncio
import copy
import json
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from fastapi import HTTPException
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.cli.serving.utils import GenerateManager
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from titans_hf.cache_titans import CACHE_NAME
from titans_hf.cli.serving.snapshots import (
    OPENING,
    Snapshots,
    empty_cache,
    learns_from_answers,
    num_common,
    read,
    starting,
)

if TYPE_CHECKING:
    from titans_hf.cli.serving.checks import Body

logger = logging.get_logger(__name__)
LEAST_LIMIT = 4096
REWRITTEN = (
    "A chat came back changed: of the {length} tokens read for its last turn, those from {first} on are read again. "
    "Either the client has changed its messages, or the chat template writes earlier messages in another way (it drops "
    "thinking blocks, or tells the time): a template that does not is answered faster. This is said once."
)


@dataclass(eq=False)
class ServedRequest(StoppingCriteria):
    """What a request says beside its prompt and its generation config.

    user: what the client has sent to tell users apart. seed, samples: None, False if the request has none, asks for no
    sampling. asks_length: it names how many tokens it wants. chat, earlier_chat: hashes of its messages, and of those
    up to the last answer; None without. gone: set when nobody waits for the answer.
    """

    user: tuple = ()
    seed: int | None = None
    samples: bool = False
    asks_length: bool = False
    chat: int | None = None
    earlier_chat: int | None = None
    gone: bool = False
    running: ClassVar[WeakSet] = WeakSet()

    @classmethod
    def of(cls, body: "Body", authorization: str | None) -> "ServedRequest":
        messages = body.model_dump(include={"messages"})["messages"] or []
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        lengths = (body.max_tokens, body.max_completion_tokens, body.max_output_tokens, body.generation_config)
        return cls(
            (authorization, body.user),
            body.seed,
            bool(body.temperature) or (body.temperature is None and body.top_p is not None),
            any(x is not None for x in lengths),
            _hash(messages) if messages else None,
            _hash(messages[: answers[-1]]) if answers else None,
        )

    def check(self) -> None:
        """Raises HTTPException (503) if nobody waits for the answer."""
        if self.gone:
            raise HTTPException(503, "the answer was given up: the client has gone, or the server ends")

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        self.check()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _hash(messages: list[dict]) -> int:
    return hash(json.dumps(messages, sort_keys=True))


REQUEST: ContextVar[ServedRequest] = ContextVar("REQUEST")


class ServerOptions(NamedTuple):
    """max_tokens: of an answer; None for the default. snapshots: of each model; 0 for none."""

    max_tokens: int | None = None
    snapshots: int = 0
    snapshot_folder: Any = None


class TitansGenerateManager(GenerateManager):
    """Runs `generate()` for one request after the other."""

    options = ServerOptions()
    snapshots: WeakKeyDictionary[PreTrainedModel, Snapshots] = WeakKeyDictionary()

    def generate_streaming(self, model, processor, inputs, gen_config, **kwargs) -> tuple:
        served = self._prepare(model, inputs, gen_config)
        queue, streamer = super().generate_streaming(served, processor, inputs, gen_config, **kwargs)
        return TextUntilStop(queue, _stop_strings(gen_config)), streamer

    async def generate_non_streaming(self, model, processor, inputs, gen_config, **kwargs) -> tuple:
        served = self._prepare(model, inputs, gen_config)
        text, *others = await super().generate_non_streaming(served, processor, inputs, gen_config, **kwargs)
        return text[: _find_stop(text, _stop_strings(gen_config))], *others

    def _prepare(self, model: PreTrainedModel, inputs: dict, config: GenerationConfig) -> "ServedModel":
        """Returns what generates for the request of this context. Raises HTTPException (400) for an empty prompt, and
        for a longer answer than the limit.
        """
        request = REQUEST.get()
        if not inputs["input_ids"].numel():
            raise HTTPException(400, "the prompt has no token: send a text that is not empty")
        limit = self.options.max_tokens or max(LEAST_LIMIT, getattr(model.config, "max_position_embeddings", 0))
        length = config.max_length if config.max_new_tokens is None else config.max_new_tokens
        if length is not None and length > limit:
            if request.asks_length:
                raise HTTPException(400, f"`max_tokens` is {length}, but may be at most {limit}")
            config.max_new_tokens = limit
        if request.samples:  # transformers samples only where the checkpoint says so
            config.do_sample = True
        if self.options.snapshots and model not in self.snapshots:
            self.snapshots[model] = Snapshots(model, *self.options[1:])
        return ServedModel(model, request, self.snapshots.get(model))


class ServedModel:
    """Stands for a model in one request."""

    def __init__(self, model: PreTrainedModel, request: ServedRequest, snapshots: Snapshots | None):
        self.model, self.request, self.snapshots = model, request, snapshots

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, input_ids: Tensor, generation_config: GenerationConfig, **inputs) -> Tensor:
        """Generates from input_ids (1, T) as the model does. Raises HTTPException (503) once nobody waits for it."""
        self.request.check()
        if self.request.seed is not None:
            torch.manual_seed(self.request.seed)
        branches = self._can_branch(generation_config, inputs)
        cache = self._read_prompt(input_ids) if branches else copy.copy(starting.get(self.model))
        if cache is not None:
            inputs[CACHE_NAME] = cache
        while_waited_for = StoppingCriteriaList([self.request])
        ids = self.model.generate(input_ids, generation_config, stopping_criteria=while_waited_for, **inputs)
        if cache is not None and branches and learns_from_answers(self.model):
            self.snapshots.keep(self.request.user, ids[0, : cache.get_seq_length()].cpu(), cache)
        return ids

    def _can_branch(self, config: GenerationConfig, inputs: dict) -> bool:
        return (
            self.snapshots is not None
            and config.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
            and config.num_return_sequences in (None, 1)
            and config.use_cache is not False
            and config.cache_implementation is None
            and bool(inputs.get("attention_mask", torch.ones(1)).all())
        )

    def _read_prompt(self, input_ids: Tensor) -> Cache | None:
        """Returns a cache that has read all but the last tokens of a prompt, from the longest snapshot on; None for a
        model whose cache cannot branch. New snapshots are kept where the prompt parts from others, and near its end.
        """
        ids, user, snapshots = input_ids[0].cpu(), self.request.user, self.snapshots
        found, shared = snapshots.find(user, ids)
        self._tell_of_changes(ids)
        cache = empty_cache(self.model) if found is None else snapshots.branch(found)
        at = 0 if found is None else len(found.ids)
        logger.warning(f"[Snapshot] {at} of {len(ids)} tokens were read before")
        last = len(ids) - OPENING
        for end in sorted({min(shared, last), last}) if cache is not None else ():
            if end - at >= OPENING:
                read(self.model, cache, input_ids[:, at:end], self.request.check)
                snapshots.keep(user, ids[:end], copy.copy(cache), self.request.chat if end == last else None)
                at = end
        return cache

    def _tell_of_changes(self, ids: Tensor) -> None:
        earlier = self.request.earlier_chat
        same = [x.ids for x in self.snapshots.kept if earlier is not None and x.chat == earlier]
        if same and (first := max(num_common(x, ids) for x in same)) < min(map(len, same)) - OPENING:
            logger.warning_once(REWRITTEN.format(length=min(map(len, same)), first=first))


class TextUntilStop:
    """A queue of streamed text without the first stop string and what follows it."""

    def __init__(self, queue: asyncio.Queue, stops: list[str]):
        self.queue, self.stops, self.ended = queue, stops, False
        self.held = ""  # the beginning of a stop string, perhaps
        self.ready: list = []

    async def get(self) -> Any:
        while not self.ready:
            self._take(await self.queue.get())
        return self.ready.pop(0)

    def get_nowait(self) -> Any:
        while not self.ready:
            self._take(self.queue.get_nowait())
        return self.ready.pop(0)

    def _take(self, item: Any) -> None:
        if type(item) is not str:  # the end, an error, reasoning or a call of a tool
            if hasattr(item, "msg"):  # transformers writes it between quotes
                item.msg = json.dumps(item.msg)[1:-1]
            self.ready += [self.held, item] if self.held else [item]
            self.held = ""
        elif not self.ended:
            text = self.held + item
            at = _find_stop(text, self.stops)
            self.ended = at is not None
            lengths = range(max(map(len, self.stops), default=0), 0, -1)
            starts = (n for n in lengths if any(text[-n:] == x[:n] for x in self.stops))
            shown = text[:at] if self.ended else text[: len(text) - next(starts, 0)]
            self.held = "" if self.ended else text[len(shown) :]
            self.ready += [shown] if shown else []


def _stop_strings(config: GenerationConfig) -> list[str]:
    stops = config.stop_strings or []
    return [stops] if isinstance(stops, str) else list(stops)


def _find_stop(text: str, stops: list[str]) -> int | None:
    """Returns where the first stop string begins, None if there is none."""
    return min((at for x in stops if (at := text.find(x)) >= 0), default=None)
