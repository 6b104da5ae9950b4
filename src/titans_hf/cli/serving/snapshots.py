"""Snapshots: copies of a model's cache by the token ids that it has read, from which later requests continue."""

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
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
    folder: TemporaryDirectory | None = None  # is removed with the snapshot


class Snapshots:
    """The snapshots of a model that were used last: `most` in memory, and more in `folder` where there is one. One that
    cannot be written or read is dropped, and its text is read anew.
    """

    def __init__(self, model: PreTrainedModel, most: int, folder: str | Path | None):
        self.model, self.most, self.folder = model, most, folder
        self.kept: list[Snapshot] = []  # those used last at the end

    def branch(self, request: ServedRequest, ids: Tensor) -> tuple[Cache | None, int, int]:
        """Returns a copy of the cache of the user's snapshot that has read most of the first of ids (T,), but not all,
        None if there is none; how many it has read; and how many ids begin as those of any of the user's snapshots.
        """
        common = [(num_common(x.ids, ids), x) for x in self.kept if x.user == request.owner]
        usable = sorted((x for number, x in common if number == len(x.ids) < len(ids)), key=lambda x: -len(x.ids))
        found = next(filter(self._use, usable), None)
        at = 0 if found is None else len(found.ids)
        held = [x.cache for x in self.kept if x.cache is not None]
        size = sum(x.num_bytes if isinstance(x, TitansCache) else sum(x.num_bytes().values()) for x in held) / 1e6
        logger.warning(f"[Snapshot] {at} of {len(ids)} tokens were read before; {len(held)} snapshots: {size:,.1f} MB")
        chat = request.chat(before_last_answer=True)
        earlier = [x for x in self.kept if x.chat is not None and x.chat == chat]
        if earlier and all(num_common(x.ids, ids) < len(x.ids) - OPENING for x in earlier):
            logger.warning_once(REWRITTEN)
        shared = max((number for number, _ in common), default=0)
        return None if found is None else copy.copy(found.cache), at, shared

    def _use(self, snapshot: Snapshot) -> bool:
        """Notes that a snapshot is used, and loads it if need be. Returns False if it cannot be loaded."""
        self.kept.remove(snapshot)
        if snapshot.cache is None:
            kind, facts = kind_of_cache(self.model), self.fingerprint
            try:
                snapshot.cache = kind.from_pretrained(snapshot.folder.name, self.model, model_fingerprint=facts)
            except (OSError, ValueError) as error:
                logger.warning(f"[Snapshot] one is dropped: {error}")
                return False
        self._append(snapshot)
        return True

    def keep(self, user: tuple, ids: Tensor, cache: Cache, chat: int | None = None) -> None:
        """Keeps a cache that has read ids (T,), which must not be used otherwise."""
        self.kept = [x for x in self.kept if x.user != user or not torch.equal(x.ids, ids)]
        self._append(Snapshot(user, ids.clone(), cache, chat))

    def _append(self, snapshot: Snapshot) -> None:
        self.kept.append(snapshot)
        held = [x for x in self.kept if x.cache is not None]
        for old in held[: -self.most]:
            if self.folder is None or not self._spill(old):
                self.kept.remove(old)
        self.kept = self.kept[-IN_FOLDER * self.most :]

    def _spill(self, snapshot: Snapshot) -> bool:
        """Moves a snapshot to the folder. Returns False if it cannot be written."""
        if snapshot.folder is None:
            try:
                Path(self.folder).mkdir(exist_ok=True)
                folder = TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True)
                snapshot.cache.save_pretrained(folder.name, self.model, model_fingerprint=self.fingerprint)
            except (OSError, ValueError) as error:
                logger.warning(f"[Snapshot] one is dropped: {error}")
                return False
            snapshot.folder = folder
        snapshot.cache = None
        return True

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What a saved cache of the model depends on: weights are read for it, once."""
        if kind_of_cache(self.model) is TitansCache:
            return cache_files.model_fingerprint(self.model)
        return files.memory_fingerprint(self.model)


def num_common(a: Tensor, b: Tensor) -> int:
    """Returns how many first elements of (M,) and (N,) are equal."""
    length = min(len(a), len(b))
    return int((a[:length] == b[:length]).long().cumprod(0).sum())
