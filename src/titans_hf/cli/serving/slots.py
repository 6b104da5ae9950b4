"""Requests side by side: the next tokens of all that are being answered come from one call of the model, a row each.

Each request runs `generate()` in a thread of its own, which asks for the logits of its token here. The call is made
once all of them have asked, on the model's thread. A request joins after its prompt, and leaves when it ends.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


class Turn:
    """Lets one request at a time compute outside of the model, by the model's `lock`, with its own random numbers."""

    def __init__(self, lock: threading.Lock, device: torch.device, seed: int):
        self.lock, self.seed, self.state = lock, seed, None
        self.source = torch if device.type == "cpu" else torch.get_device_module(device)

    def __enter__(self) -> None:
        self.lock.acquire()
        torch.manual_seed(self.seed) if self.state is None else self.source.set_rng_state(self.state)

    def __exit__(self, *error) -> None:
        self.state = self.source.get_rng_state()
        self.lock.release()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the turn to others in the block."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


class Slot(Turn):
    """A request that is being answered. cache: what `generate()` holds; only its count of columns while the batch has
    its row. has_read: it has read its prompt. ids (1, 1), context, logits: what it has asked for last.
    """

    def __init__(self, cache: Cache, *turn):
        super().__init__(*turn)
        self.cache, self.has_read, self.ids, self.context, self.logits = cache, False, None, None, None


class Slots:
    """The batch of a model, used on the model's thread alone: `submit` runs a function there."""

    def __init__(self, model: PreTrainedModel, submit: Callable[..., Future]):
        self.model, self.submit = model, submit
        self.asked: list[Slot] = []
        self.rows: list[Slot] = []
        self.cache: Cache | None = None  # of all rows

    def logits(self, slot: Slot, ids: Tensor) -> Tensor:
        """Returns the logits (1, 1, V) after a token (1, 1)."""
        slot.ids, slot.context, slot.logits = ids, copy_context(), Future()
        self.submit(self._step, slot)
        return slot.logits.result()

    def leave(self, slot: Slot) -> Cache | None:
        """Ends a request, and returns its cache; None after an error."""
        return slot.cache if slot.logits is None else self.submit(self._take, slot).result()

    @torch.no_grad()
    def _step(self, *new: Slot) -> None:
        """Notes who asks, and calls the model if all rows, or new ones alone, have asked."""
        self.asked += new
        if not self.asked or not {*self.rows} <= {*self.asked}:
            return
        asked, self.asked = self.asked, []
        try:
            for slot in asked:
                if slot not in self.rows:
                    self._join(slot)
            # The first row stands for all: they generate, so that none is in its prompt.
            first = self.rows[0]
            self.cache.start_prompt(first.cache.get_seq_length())
            ids = torch.cat([slot.ids for slot in self.rows])
            output = first.context.run(self.model, input_ids=ids, use_cache=True, cache=self.cache)
        except Exception as error:
            self.rows, self.cache = [], None
            for slot in asked:
                slot.logits.set_exception(error)
            return
        for slot, logits in zip(self.rows, output.logits.split(1), strict=True):
            slot.cache.start_prompt(slot.cache.get_seq_length() + 1)
            slot.logits.set_result(logits)

    def _join(self, slot: Slot) -> None:
        if self.cache is None:
            self.cache = copy.copy(slot.cache)
        else:
            self.cache.append_rows(slot.cache)
        length = slot.cache.get_seq_length()
        slot.cache.reset()  # the batch has its tensors
        slot.cache.start_prompt(length)
        self.rows.append(slot)

    def _take(self, slot: Slot) -> Cache | None:
        if slot not in self.rows:
            return None
        at, cache = self.rows.index(slot), copy.copy(self.cache)
        cache.batch_select_indices(torch.tensor([at]))
        cache.start_prompt(slot.cache.get_seq_length())
        del self.rows[at]
        if self.rows:
            self.cache.batch_select_indices(torch.tensor([i for i in range(len(self.rows) + 1) if i != at]))
        else:
            self.cache = None
        self.submit(self._step)  # all others may have asked
        return cache
