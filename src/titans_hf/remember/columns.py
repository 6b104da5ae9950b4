"""The columns of a call of a model with a memory.

Shapes: R rows, T columns.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class CallColumns(NamedTuple):
    """ids (R, T) int64; real, starts, learns and learning (R, T) bool: whether a column is a token, begins a document,
    may be learned, and was read with learning on.
    """

    ids: Tensor
    real: Tensor
    starts: Tensor
    learns: Tensor
    learning: Tensor

    @classmethod
    def none(cls, rows: int) -> "CallColumns":
        empty = torch.zeros(rows, 0, dtype=torch.bool)
        return cls(empty.long(), empty, empty, empty, empty)

    def map(self, function: Callable[[Tensor], Tensor]) -> "CallColumns":
        return CallColumns(*map(function, self))

    def at(self, begin: int, end: int) -> "CallColumns":
        return self.map(lambda x: x[:, begin:end])

    def join(self, other: "CallColumns") -> "CallColumns":
        return CallColumns(*(torch.cat([x.to(y.device), y], 1) for x, y in zip(self, other, strict=True)))
