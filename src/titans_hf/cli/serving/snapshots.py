"""Snapshots: copies of a model's cache by the token ids that it has read, from which later requests continue."""

import copy
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from titans_hf import TitansCache, TitansForCausalLM
from titans_hf.cache_files import fingerprint
from titans_hf.cache_titans import CACHE_NAME

PIECE = 1024  # tokens that are read between two looks at whether the client is still there
# A chat template opens the answer with a few tokens, which it writes in another way once the answer is there: the
# snapshot of a prompt is so many tokens before its end. Fewer tokens than these are not worth a snapshot.
OPENING = 16
IN_FOLDER = 16  # snapshots that a folder holds, for each in memory


def empty_cache(model: PreTrainedModel) -> Cache | None:
    """Returns the cache from which a request of this model starts; None for a model whose cache cannot branch."""
    if isinstance(model, TitansForCausalLM):
        return TitansCache(model.config) if model._starting_cache is None else copy.copy(model._starting_cache)
    return None


def num_bytes(cache: Cache) -> int:
    """Returns the bytes of all tensors of a cache."""
    return cache.num_bytes


@dataclass(eq=False)
class Snapshot:
    """A cache that has read `ids` (T,) for one user; `cache` is None while it lies in the folder.

    chat: a hash of the messages that were answered; None for a prompt or a text.
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
        kind = type(empty_cache(self.model))
        return kind.from_pretrained(snapshot.folder, self.model, **self._options())

    def _options(self) -> dict:
        if not hasattr(self, "fingerprint"):
            self.fingerprint = fingerprint(self.model)  # of all weights, once
        return {"model_fingerprint": self.fingerprint}


def num_common(a: Tensor, b: Tensor) -> int:
    """Returns how many first elements of (M,) and (N,) are equal."""
    length = min(len(a), len(b))
    return int((a[:length] == b[:length]).long().cumprod(0).sum())


def read(model: PreTrainedModel, cache: Cache, ids: Tensor, before_each: Callable[[], object] = bool) -> None:
    """Reads ids (1, T) into a cache, in pieces; `before_each` is called before each of them."""
    for piece in ids.split(PIECE, dim=1):
        before_each()
        model(input_ids=piece, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
