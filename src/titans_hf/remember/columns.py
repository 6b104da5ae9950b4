"""The columns of a call of a model with a memory.

Shapes: R rows, T columns.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class CallColumns(NamedTuple):
    """ids (R, T) int64; real, starts, learns, learning and recalls (R, T) bool: whether a column is a token, begins a
    document, may be learned, was read with learning on, and whether the row recalls a passage after it.
    """

    ids: Tensor
    real: Tensor
    starts: Tensor
    learns: Tensor
    learning: Tensor
    recalls: Tensor

    @classmethod
    def none(cls, rows: int) -> "CallColumns":
        return cls.of_text(torch.zeros(rows, 0, dtype=torch.int64))

    @classmethod
    def of_text(cls, ids: Tensor) -> "CallColumns":
        """Returns columns (R, T) of text that is not learned."""
        no = torch.zeros(ids.shape, dtype=torch.bool)
        return cls(ids, ~no, no, no, no, no)

    def quiet(self) -> "CallColumns":
        """Returns the columns with learning off."""
        no = torch.zeros_like(self.learns)
        return self._replace(learns=no, learning=no, recalls=no)

    def map(self, function: Callable[[Tensor], Tensor]) -> "CallColumns":
        return CallColumns(*map(function, self))

    def at(self, begin: int, end: int) -> "CallColumns":
        return self.map(lambda x: x[:, begin:end])

    def join(self, other: "CallColumns") -> "CallColumns":
        return CallColumns(*(torch.cat([x.to(y.device), y], 1) for x, y in zip(self, other, strict=True)))
