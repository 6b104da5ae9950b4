"""Generates the answers of a server: side by side, from snapshots, up to a limit, while the client is there.

The server of transformers asks its `GenerateManager` for each answer: here a `TitansGenerateManager`.
"""

import asyncio
import copy
import functools
import json
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from math import inf
from types import SimpleNamespace
from typing import Any

import regex
import torch
from fastapi import HTTPException
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.cache_utils import Cache
from transformers.cli.serving.utils import DirectStreamer, GenerateManager
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from titans_hf import MemoryCache, TitansForCausalLM
from titans_hf.cli.serving.requests import REQUEST, ServedRequest
from titans_hf.cli.serving.slots import Slot, Slots
from titans_hf.cli.serving.snapshots import OPENING, Snapshots
from titans_hf.cli.shared.memories import new_cache
from titans_hf.recalling.settings import Memory

LEAST_LIMIT = 4096
LEAST_TEMPERATURE = 1e-3  # below it logits overflow
MOST_STOPS, MOST_STOP_LETTERS = 16, 512  # transformers compares each letter with the whole vocabulary: a second
TOKENS_OF_A_CALL = 1024  # of a prompt, between the steps of those that generate


class TitansGenerateManager(GenerateManager):
    """Answers the requests to a model in threads, as many at once as there are slots. max_tokens: None by default."""

    def __init__(self, slots: int, max_tokens: int | None):
        self.slots, self.max_tokens, self.submit = slots, max_tokens, ThreadPoolExecutor(slots).submit

    def async_submit(self, fn, *args, **kwargs) -> asyncio.Future:
        return asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    def generate_streaming(self, model, processor, inputs, gen_config, **kwargs) -> tuple:
        answering = self._prepare(model, inputs, gen_config)
        queue, streamer = super().generate_streaming(answering, processor, inputs, gen_config, **kwargs)
        return Stream(_until_stop(queue, _stop_pattern(gen_config))), streamer

    async def generate_non_streaming(self, model, processor, inputs, gen_config, **kwargs) -> tuple:
        answering = self._prepare(model, inputs, gen_config)
        text, *others = await super().generate_non_streaming(answering, processor, inputs, gen_config, **kwargs)
        return _stop_pattern(gen_config).split(text, 1)[0], *others

    def _prepare(self, model: PreTrainedModel, inputs: dict, config: GenerationConfig) -> SimpleNamespace:
        """Returns what has the method `generate` for the request of this context. Raises HTTPException (400) for an
        empty prompt, and for settings, of the request or the checkpoint, that would take too much time or memory.
        """
        request = REQUEST.get()
        if not inputs["input_ids"].numel():
            raise HTTPException(400, "the prompt has no token: send a text that is not empty")
        config.num_return_sequences, config.return_dict_in_generate = 1, False  # the server returns one text
        if request.temperature or (request.temperature is None and request.top_p is not None):
            config.do_sample = True  # transformers samples only where the checkpoint says so
        if not config.do_sample:
            config.temperature = None  # else transformers warns of it
        limit = self.max_tokens or max(LEAST_LIMIT, getattr(model.config, "max_position_embeddings", 0))
        length = config.max_length if config.max_new_tokens is None else config.max_new_tokens
        if length is not None and length > limit and not request.asks_length:
            length = config.max_new_tokens = limit
        stops = [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings or []
        for name, value, least, most in (
            ("max_tokens", length, 1, limit),
            ("num_beams", config.num_beams, 1, self.slots),
            ("temperature", config.temperature, LEAST_TEMPERATURE, inf),
            ("the number of stop strings", len(stops), 0, MOST_STOPS),
            ("the number of letters of all stop strings", sum(map(len, stops)), 0, MOST_STOP_LETTERS),
        ):
            if value is not None and not least <= value <= most:
                raise HTTPException(400, f"`{name}` is {value}, but may be from {least} to {most}")
        return SimpleNamespace(generate=functools.partial(model.served.generate, request))


class ServedModel:
    """A model that answers the requests of many threads. It runs in a thread of its own, and all snapshots stay there.
    Raises ValueError and FileNotFoundError for a `memory` that the model cannot load.
    """

    def __init__(self, model: PreTrainedModel, snapshots: int, memory: str | None = None):
        self.model, self.memory = model, memory
        has_memory = isinstance(model, TitansForCausalLM) or isinstance(getattr(model, "memory", None), Memory)
        self.start = new_cache(model) if has_memory else None  # copied for each request
        if memory is not None and not has_memory:
            raise ValueError(f"--memory {memory}: {model.name_or_path} is a {model.config.model_type} without a memory")
        if memory is not None:
            self.start = type(self.start).from_pretrained(memory, model)
            self.start.start_prompt()
        self.thread = ThreadPoolExecutor(1)
        self.slots = Slots(model, self.thread.submit)
        self.snapshots = Snapshots(snapshots)
        self.seeds = random.Random(torch.initial_seed())

    def generate(self, request: ServedRequest, input_ids: Tensor, generation_config, **inputs) -> Tensor:
        """Generates from input_ids (1, T) as the model does. Raises HTTPException (503) once nobody waits for it."""
        request.check()
        criteria = StoppingCriteriaList([request.check])
        inputs |= {"generation_config": generation_config, "stopping_criteria": criteria}
        seed = self.seeds.getrandbits(63) if request.seed is None else request.seed
        if not self._takes_slot(generation_config, inputs):
            return self._run(self._generate_alone, seed, input_ids, inputs)
        if generation_config.stop_strings:  # `generate()` has no tokenizer for them beside `custom_generate`
            criteria.append(StopStringCriteria(inputs["tokenizer"], generation_config.stop_strings))
            inputs["generation_config"] = copy.copy(generation_config)
            inputs["generation_config"].stop_strings = None
        start = self._read_prompt(request, input_ids)
        slots: list[Slot] = []
        source = torch.Generator(self.model.device).manual_seed(seed)
        decode = functools.partial(self._decode, slots, source, inputs.get("streamer"))
        try:
            ids = self.model.generate(input_ids, cache=start, custom_generate=decode, **inputs)
        finally:
            caches = [self.slots.leave(slot) for slot in slots]
        cache, is_remembering = caches[0], isinstance(start, MemoryCache)
        if self.snapshots.most:
            if is_remembering:
                self._run(cache.read_unread, self.model)
            self._run(self.snapshots.keep, request.owner, ids[0, : cache.get_seq_length()].cpu(), cache)
        return ids

    def _decode(
        self,
        slots: list[Slot],
        source: torch.Generator,
        streamer: DirectStreamer | None,
        model: PreTrainedModel,
        input_ids: Tensor,
        **given,
    ) -> Tensor:
        """Samples as `generate()` does: the prompt is read alone, later tokens beside those of other requests."""
        cache = copy.copy(given["cache"])  # `generate()` changes its own at its end
        rest = input_ids[:, cache.get_seq_length() :]
        logits = self._call(input_ids=rest, use_cache=True, logits_to_keep=1, cache=cache).logits
        slots.append(slot := Slot(cache))
        while True:
            scores = given["logits_processor"](input_ids, logits[:, -1].float())
            if given["generation_config"].do_sample:
                token = torch.multinomial(scores.softmax(-1), 1, generator=source)
            else:
                token = scores.argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, token], 1)
            if streamer is not None:
                streamer.put(token[0].cpu())
            if bool(given["stopping_criteria"](input_ids, None).all()):
                if streamer is not None:
                    streamer.end()
                return input_ids
            logits = self.slots.logits(slot, token)

    def _takes_slot(self, config: GenerationConfig, inputs: dict) -> bool:
        return (
            self.start is not None
            and config.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
            and config.use_cache is not False
            and config.cache_implementation is None
            and bool(inputs.get("attention_mask", torch.ones(1)).all())
        )

    def _generate_alone(self, seed: int, input_ids: Tensor, inputs: dict) -> Tensor:
        if self.memory is not None:
            inputs["cache"] = copy.copy(self.start)
            inputs["cache"].batch_repeat_interleave(inputs["generation_config"].num_beams or 1)
        torch.manual_seed(seed)
        return self.model.generate(input_ids, **inputs)

    def _run(self, fn, *args) -> Any:
        return self.thread.submit(fn, *args).result()

    def _call(self, **arguments) -> CausalLMOutputWithPast:
        return self._run(copy_context().run, functools.partial(torch.no_grad()(self.model), **arguments))

    def _read_prompt(self, request: ServedRequest, input_ids: Tensor) -> Cache:
        """Returns a cache that has read all but the last tokens of a prompt, from the longest snapshot. Snapshots are
        kept where the prompt parts from others, and near its end.
        """
        ids, last = input_ids[0].cpu(), input_ids.shape[1] - OPENING
        if not self.snapshots.most:
            return copy.copy(self.start)
        found, at, shared = self._run(self.snapshots.branch, request.owner, ids)
        cache = copy.copy(self.start) if found is None else found
        for end in sorted({min(shared, last), last}):
            if end - at < OPENING:
                continue
            # A token after the multiples: it is the label of a chunk that ends there.
            cuts = tuple(range(TOKENS_OF_A_CALL - at % TOKENS_OF_A_CALL + 1, end - at, TOKENS_OF_A_CALL))
            for piece in input_ids[:, at:end].tensor_split(cuts, 1):
                request.check()
                self._call(input_ids=piece, use_cache=True, logits_to_keep=1, cache=cache)
            self._run(self.snapshots.keep, request.owner, ids[:end], copy.copy(cache))
            at = end
        return cache


class Stream(asyncio.Queue):
    """What an iterator yields, as the queue of a stream. It counts as empty, so that transformers waits for `get`."""

    def __init__(self, items: AsyncIterator[Any]):
        super().__init__()
        self.items = items

    async def get(self) -> Any:
        return await anext(self.items)


async def _until_stop(queue: asyncio.Queue, stops: regex.Pattern) -> AsyncIterator[Any]:
    """Yields streamed text without the first stop string and what follows it."""
    held, ended = "", False  # held: the beginning of a stop string, perhaps
    while True:
        item = await queue.get()
        is_text = type(item) is str  # else the end, an error, reasoning or a call of a tool
        text = "" if ended else held + item if is_text else held
        found = stops.search(text, partial=is_text)
        shown = text[: found.start()] if found else text
        held = text[len(shown) :] if found and found.partial else ""
        ended = ended or bool(found and not found.partial)
        if hasattr(item, "msg"):  # transformers writes it between quotes
            item.msg = json.dumps(item.msg)[1:-1]
        for x in ([shown] if shown else []) + ([] if is_text else [item]):
            yield x


def _stop_pattern(config: GenerationConfig) -> regex.Pattern:
    """Returns what finds the first stop string; without any, it finds nothing."""
    stops = [config.stop_strings] if isinstance(config.stop_strings, str) else config.stop_strings or []
    return regex.compile("|".join(map(regex.escape, stops)) or "(?!)")
