"""Snapshots: copies of a model's cache by the token ids that it has read, from which later requests continue."""

import copy

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils import logging

from titans_hf import TitansCache

logger = logging.get_logger(__name__)
# A chat template opens the answer with a few tokens, which it writes in another way once the answer is there: the
# snapshot of a prompt is so many tokens before its end. Fewer tokens than these are not worth a snapshot.
OPENING = 16


class Snapshots:
    """The `most` snapshots of a model that were used last: a user, ids (T,), and the cache that has read them."""

    def __init__(self, most: int):
        self.most = most
        self.kept: list[tuple[tuple, Tensor, Cache]] = []  # those used last at the end

    def branch(self, user: tuple, ids: Tensor) -> tuple[Cache | None, int, int]:
        """Returns a copy of the cache of the user's snapshot that has read most of the first of ids (T,), but not all,
        None if there is none; how many it has read; and how many ids begin as those of any of the user's snapshots.
        """
        common = [(num_common(x[1], ids), x) for x in self.kept if x[0] == user]
        usable = [x for number, x in common if number == len(x[1]) < len(ids)]
        found = max(usable, key=lambda x: len(x[1]), default=None)
        if found is not None:
            self.keep(*found)
        at, cache = (0, None) if found is None else (len(found[1]), copy.copy(found[2]))
        sizes = [x.num_bytes if isinstance(x, TitansCache) else sum(x.num_bytes().values()) for *_, x in self.kept]
        logger.warning(
            f"[Snapshot] {at} of {len(ids)} tokens were read before; {len(sizes)} snapshots: {sum(sizes) / 1e6:,.1f} MB"
        )
        return cache, at, max((number for number, _ in common), default=0)

    def keep(self, user: tuple, ids: Tensor, cache: Cache) -> None:
        """Keeps a cache that has read ids (T,), which must not be used otherwise."""
        others = [x for x in self.kept if x[0] != user or not torch.equal(x[1], ids)]
        self.kept = [*others, (user, ids.clone(), cache)][-self.most :]


def num_common(a: Tensor, b: Tensor) -> int:
    """Returns how many first elements of (M,) and (N,) are equal."""
    length = min(len(a), len(b))
    return int((a[:length] == b[:length]).long().cumprod(0).sum())
