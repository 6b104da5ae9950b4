"""Snapshots: copies of a model's cache by the token ids that it has read, from which later requests continue."""

import copy
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from titans_hf import TitansCache, TitansForCausalLM, cache_files
from titans_hf.cache_titans import CACHE_NAME
from titans_hf.remember import MemoryCache, memory_files
from titans_hf.remember.memory import Memory

PIECE = 1024  # tokens that are read between two looks at whether the client is still there
# A chat template opens the answer with a few tokens, which it writes in another way once the answer is there: the
# snapshot of a prompt is so many tokens before its end. Fewer tokens than these are not worth a snapshot.
OPENING = 16
IN_FOLDER = 16  # snapshots that a folder holds, for each in memory


starting: WeakKeyDictionary[PreTrainedModel, Cache] = WeakKeyDictionary()  # caches of saved memories


def empty_cache(model: PreTrainedModel) -> Cache | None:
    """Returns the cache from which a request of this model starts, a copy of the saved memory if there is one; None for
    a model whose cache grows without limit.
    """
    if model in starting:
        return copy.copy(starting[model])
    kind = kind_of_cache(model)
    return None if kind is None else kind(model.config if kind is TitansCache else model)


def kind_of_cache(model: PreTrainedModel) -> type[Cache] | None:
    """Returns the class of the model's memories; None for a model without."""
    if isinstance(model, TitansForCausalLM):
        return TitansCache
    return MemoryCache if isinstance(getattr(model, "memory", None), Memory) else None


def learns_from_answers(model: PreTrainedModel) -> bool:
    """Returns whether a cache that has generated a text is that of a model which has read the text."""
    return isinstance(model, TitansForCausalLM) or model.memory.learn_from == "all"


def bytes_of_snapshot(model: PreTrainedModel) -> int:
    """Returns the bytes of a cache with a full window, for which it reads as many tokens; 0 without snapshots."""
    cache = empty_cache(model)
    if cache is None:
        return 0
    window = model.config.kv_cache_length if isinstance(cache, TitansCache) else model.memory.window or 0
    read(model, cache, torch.zeros(1, window + 1, dtype=torch.long, device=model.device))
    return cache.num_bytes if isinstance(cache, TitansCache) else sum(cache.num_bytes().values())


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

    def find(self, user: tuple, ids: Tensor) -> tuple[Snapshot | None, int]:
        """Returns the user's snapshot that has read most of the first of ids (T,), but not all, and the number of first
        tokens that ids have in common with any of the user's.
        """
        common = [(num_common(x.ids, ids), x) for x in self.kept if x.user == user]
        usable = [x for number, x in common if number == len(x.ids) < len(ids)]
        found = max(usable, key=lambda x: len(x.ids), default=None)
        return found, max((number for number, _ in common), default=0)

    def branch(self, snapshot: Snapshot) -> Cache:
        """Returns a copy of the snapshot's cache, which is now the one used last."""
        self.kept.remove(snapshot)
        if snapshot.cache is None:
            snapshot.cache = self._load(snapshot)
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

    def close(self) -> None:
        """Removes all snapshots."""
        for snapshot in list(self.kept):
            self._drop(snapshot)

    def _drop(self, snapshot: Snapshot) -> None:
        self.kept.remove(snapshot)
        if snapshot.folder is not None:
            shutil.rmtree(snapshot.folder, ignore_errors=True)

    def _spill(self, snapshot: Snapshot) -> None:
        if snapshot.folder is None:
            snapshot.folder = Path(tempfile.mkdtemp(prefix="snapshot-", dir=self.folder))
            snapshot.cache.save_pretrained(snapshot.folder, self.model, **self._options())
        snapshot.cache = None

    def _load(self, snapshot: Snapshot) -> Cache:
        return kind_of_cache(self.model).from_pretrained(snapshot.folder, self.model, **self._options())

    def _options(self) -> dict:
        if not hasattr(self, "fingerprint"):
            of_memory = cache_files if kind_of_cache(self.model) is TitansCache else memory_files
            self.fingerprint = of_memory.fingerprint(self.model)  # of all weights, once
        return {"model_fingerprint": self.fingerprint}


def num_common(a: Tensor, b: Tensor) -> int:
    """Returns how many first elements of (M,) and (N,) are equal."""
    length = min(len(a), len(b))
    return int((a[:length] == b[:length]).long().cumprod(0).sum())


def read(model: PreTrainedModel, cache: Cache, ids: Tensor, before_each: Callable[[], object] = bool) -> None:
    """Reads ids (1, T) into a cache, in pieces; `before_each` is called before each of them."""
    for piece in ids.split(PIECE, dim=1):
        before_each()
        with torch.no_grad():
            model(input_ids=piece, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
