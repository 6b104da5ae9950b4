"""Requests side by side: the next tokens of all that are being answered come from one call of the model, a row each.

Each request samples in a thread of its own, and asks for the logits of its token here. The call is made once all of
them have asked, on the model's thread. A request joins after its prompt, and leaves when it ends.
"""

import copy
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


class Slot:
    """A request that is being answered. cache: what it has read; None while its row is in the batch. length: columns
    that it has read. ids (1, 1), context, logits: what it has asked for last, from its first question on.
    """

    ids: Tensor
    context: Context
    logits: Future

    def __init__(self, cache: Cache):
        self.cache, self.length = cache, cache.get_seq_length()


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
        return self.submit(self._take, slot).result()

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
            ids = torch.cat([slot.ids for slot in self.rows])
            # Any row's context serves all: each says that the tokens are those of an answer.
            output = asked[0].context.run(self.model, input_ids=ids, use_cache=True, cache=self.cache)
        except Exception as error:
            self.rows, self.cache = [], None
            for slot in asked:
                slot.logits.set_exception(error)
            return
        for slot, logits in zip(self.rows, output.logits.split(1), strict=True):
            slot.length += 1
            slot.logits.set_result(logits)

    def _join(self, slot: Slot) -> None:
        if self.cache is None:
            self.cache = slot.cache
        else:
            self.cache.append_rows(slot.cache)
        slot.cache = None
        self.rows.append(slot)

    def _take(self, slot: Slot) -> Cache | None:
        if slot not in self.rows:
            return slot.cache
        at, cache = self.rows.index(slot), copy.copy(self.cache)
        cache.batch_select_indices(torch.tensor([at]))
        cache.start_prompt(slot.length)
        del self.rows[at]
        if self.rows:
            self.cache.batch_select_indices(torch.tensor([i for i in range(len(self.rows) + 1) if i != at]))
        else:
            self.cache = None
        self.submit(self._step)  # all others may have asked
        return cache
