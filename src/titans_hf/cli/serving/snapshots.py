"""Snapshots: copies of a model's cache by the token ids that it has read, from which later requests continue."""

import copy
import shutil
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging

from titans_hf import TitansCache, TitansForCausalLM, cache_files
from titans_hf.cli.serving.requests import ServedRequest
from titans_hf.remember import MemoryCache, files
from titans_hf.remember.parts import Memory

logger = logging.get_logger(__name__)
# A chat template opens the answer with a few tokens, which it writes in another way once the answer is there: the
# snapshot of a prompt is so many tokens before its end. Fewer tokens than these are not worth a snapshot.
OPENING = 16
IN_FOLDER = 16  # snapshots that a folder holds, for each in memory
REWRITTEN = (
    "A chat came back changed, and is read again from the change on. Either the client has changed its messages, or "
    "the chat template writes earlier messages in another way (it drops thinking blocks, or tells the time): one "
    "that does not is answered faster. This is said once."
)


def kind_of_cache(model: PreTrainedModel) -> type[Cache] | None:
    """Returns the class of the model's memories; None for a model without."""
    if isinstance(getattr(model, "memory", None), Memory):
        return MemoryCache
    return TitansCache if isinstance(model, TitansForCausalLM) else None


@dataclass(eq=False)
class Snapshot:
    """A cache that has read `ids` (T,) for one user; `cache` is None while it lies in the folder.

    chat: a hash of the messages that end soon after `ids`; None for others.
    """

    user: tuple
    ids: Tensor
    cache: Cache | None
    chat: int | None
    folder: Path | None = None


class Snapshots:
    """The snapshots of a model that were used last: `most` in memory, and more in `folder` where there is one."""

    def __init__(self, model: PreTrainedModel, most: int, folder: Path | None):
        self.model, self.most, self.folder = model, most, folder
        self.kept: list[Snapshot] = []  # those used last at the end

    def branch(self, request: ServedRequest, ids: Tensor) -> tuple[Cache | None, int, int]:
        """Returns a copy of the cache of the user's snapshot that has read most of the first of ids (T,), but not all,
        None if there is none; how many it has read; and how many ids begin as those of any of the user's snapshots.
        """
        common = [(num_common(x.ids, ids), x) for x in self.kept if x.user == request.owner]
        usable = [x for number, x in common if number == len(x.ids) < len(ids)]
        found = max(usable, key=lambda x: len(x.ids), default=None)
        at = 0 if found is None else len(found.ids)
        logger.warning(f"[Snapshot] {at} of {len(ids)} tokens were read before")
        chat = request.chat(before_last_answer=True)
        earlier = [x for x in self.kept if x.chat is not None and x.chat == chat]
        if earlier and all(num_common(x.ids, ids) < len(x.ids) - OPENING for x in earlier):
            logger.warning_once(REWRITTEN)
        shared = max((number for number, _ in common), default=0)
        return None if found is None else self._copy(found), at, shared

    def _copy(self, snapshot: Snapshot) -> Cache:
        self.kept.remove(snapshot)
        if snapshot.cache is None:
            kind = kind_of_cache(self.model)
            snapshot.cache = kind.from_pretrained(snapshot.folder, self.model, model_fingerprint=self.fingerprint)
        self._append(snapshot)
        return copy.copy(snapshot.cache)

    def keep(self, user: tuple, ids: Tensor, cache: Cache, chat: int | None = None) -> None:
        """Keeps a cache that has read ids (T,), which must not be used otherwise."""
        for x in [x for x in self.kept if x.user == user and torch.equal(x.ids, ids)]:
            self._drop(x)
        self._append(Snapshot(user, ids.clone(), cache, chat))

    def _append(self, snapshot: Snapshot) -> None:
        self.kept.append(snapshot)
        held = [x for x in self.kept if x.cache is not None]
        for old in held[: -self.most]:
            self._spill(old) if self.folder is not None else self._drop(old)
        for old in self.kept[: -IN_FOLDER * self.most]:
            self._drop(old)

    def _drop(self, snapshot: Snapshot) -> None:
        self.kept.remove(snapshot)
        if snapshot.folder is not None:
            shutil.rmtree(snapshot.folder, ignore_errors=True)

    def _spill(self, snapshot: Snapshot) -> None:
        if snapshot.folder is None:
            Path(self.folder).mkdir(exist_ok=True)
            snapshot.folder = Path(tempfile.mkdtemp(dir=self.folder))
            snapshot.cache.save_pretrained(snapshot.folder, self.model, model_fingerprint=self.fingerprint)
        snapshot.cache = None

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What a saved cache of the model depends on: weights are read for it, once."""
        module = cache_files if kind_of_cache(self.model) is TitansCache else files
        return module.fingerprint(self.model)


def num_common(a: Tensor, b: Tensor) -> int:
    """Returns how many first elements of (M,) and (N,) are equal."""
    length = min(len(a), len(b))
    return int((a[:length] == b[:length]).long().cumprod(0).sum())
