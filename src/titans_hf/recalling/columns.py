"""The columns of a call of a model with a memory.

Shapes: R rows, T columns.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Columns(NamedTuple):
    """ids (R, T) int64; real, starts and recalls (R, T) bool, on the CPU: whether a column is a token, begins a
    document, and whether the row recalls after it.
    """

    ids: Tensor
    real: Tensor
    starts: Tensor
    recalls: Tensor

    @classmethod
    def of_text(cls, ids: Tensor) -> "Columns":
        """Returns columns (R, T) of text."""
        no = torch.zeros(ids.shape, dtype=torch.bool)
        return cls(ids, ~no, no, no)

    @classmethod
    def none(cls, rows: int) -> "Columns":
        return cls.of_text(torch.zeros(rows, 0, dtype=torch.int64))

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Columns":
        return Columns(*map(function, self))

    def at(self, begin: int, end: int) -> "Columns":
        return self.map(lambda x: x[:, begin:end])

    def of_rows(self, rows: Tensor) -> "Columns":
        """Returns the columns of some rows (I,) int64."""
        return self.map(lambda x: x[rows.to(x.device)])

    def join(self, other: "Columns") -> "Columns":
        return Columns(*(torch.cat([x.to(y.device), y], 1) for x, y in zip(self, other, strict=True)))

    def beside(self, other: "Columns") -> "Columns":
        """Returns the rows of both; the shorter of the two gets padding in front."""
        most = max(self.width, other.width)
        pairs = ((pad(x.to(self.ids.device), (most - x.shape[1], 0)) for x in y) for y in (self, other))
        ids, *others = (torch.cat(x) for x in zip(*pairs, strict=True))
        return Columns(ids, *(x.cpu() for x in others))

    def without_recalls(self) -> "Columns":
        return self._replace(recalls=torch.zeros_like(self.recalls))

    def tokens_after(self, seen: Tensor) -> Tensor:
        """Returns how many tokens (R,) of their last document rows have read after the columns, before which it was
        `seen` (R,).
        """
        is_last = self.starts.flip(1).cumsum(1).flip(1) == 0  # after the last start of a document
        is_last |= self.starts & (self.starts.flip(1).cumsum(1).flip(1) == 1)
        return torch.where(self.starts.any(1), 0, seen) + (self.real & is_last).sum(1)
