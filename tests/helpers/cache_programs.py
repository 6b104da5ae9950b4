"""What random programs do to the rows of any cache."""

import copy

import torch
from common import make_ids

MAX_ROWS = 4


class RowOperations:
    """Operations on `cache` and on `rows`, what each of its rows has read, chosen by `random`."""

    def take(self, index: list[int]) -> None:
        self.rows = [list(self.rows[i]) for i in index]

    def reorder(self) -> None:
        index = [self.random.randrange(len(self.rows)) for _ in self.rows]
        self.cache.reorder_cache(torch.tensor(index))
        self.take(index)

    def select(self) -> None:
        index = sorted(self.random.sample(range(len(self.rows)), self.random.randint(1, len(self.rows))))
        self.cache.batch_select_indices(self.selection(index))
        self.take(index)

    def selection(self, index: list[int]) -> torch.Tensor:
        return torch.tensor(index)

    def repeat(self) -> None:
        if 2 * len(self.rows) <= MAX_ROWS:
            self.cache.batch_repeat_interleave(2)
            self.take([i for i in range(len(self.rows)) for _ in range(2)])

    def branch(self) -> None:
        """Continues with a copy, after the original has read other tokens."""
        branch = self.random.choice([copy.copy, copy.deepcopy])(self.cache)
        with torch.no_grad():
            self.model(make_ids(len(self.rows), 5), cache=self.cache)
        self.cache = branch
