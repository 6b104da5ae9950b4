"""What a batch does to the states of its texts.

Shapes: R rows, N tokens of a text.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from .window import RowLayer

NO_TOKEN = -1  # in `text`, before a row's first token


class Rows(Cache):
    """What the texts of R rows have left in a model. A copy shares all tensors: none is changed in place.

    layers: keys and values of the window, states of recurrent layers. seen (R,) int64, on the CPU: tokens that each row
    has read. asked (R,) int64, on the CPU: how many of them, the last, belong to the prompt; negative where the prompt
    begins after tokens that are to be read again. text (R, N) int32: the ids, of which the rows' last stand in one
    column; None where nothing is looked for in it. sinks: keys and values of the sink, by block of positions.
    """

    def __init__(self, layers: list, keeps_text: bool, number: int = 0, device: torch.device | str = "cpu"):
        super().__init__(layers=layers)
        self.layers: list = layers
        self.seen = self.asked = torch.zeros(number, dtype=torch.int64)
        self.text = torch.zeros(number, 0, dtype=torch.int32, device=device) if keeps_text else None
        self.sinks: dict[int, list] = {}
        self.device = torch.device(device)

    def __len__(self) -> int:
        return len(self.seen)

    def empty(self, number: int, device: torch.device | str) -> "Rows":
        """Returns rows of the same kind that have read nothing."""
        layers = [x.empty() if isinstance(x, RowLayer) else x for x in self.layers]
        return Rows(layers, self.text is not None, number, device)

    def __copy__(self) -> "Rows":
        return self.map(lambda x: x)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Rows":
        """Returns a copy with `function` of each tensor that has a row dimension."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        with torch.inference_mode(False):  # tensors of inference_mode could not be part of a later step's graph
            new.layers = [x.map(function) if isinstance(x, RowLayer) else x for x in self.layers]
            new.seen, new.asked = function(self.seen), function(self.asked)
            new.text = None if self.text is None else function(self.text)
        return new

    def take(self, rows: Tensor) -> "Rows":
        """Returns some rows (I,) int64."""
        new = self.map(lambda x: x.index_select(0, rows.to(x.device)))
        new.trim()
        return new

    def as_branch(self) -> "Rows":
        """Returns a copy that may see passages, and looks for none."""
        new = copy.copy(self)
        new.text = None
        return new

    def trim(self) -> None:
        """Drops columns in which no row has a token."""
        most = max(self.seen.tolist(), default=0)
        self.text = None if self.text is None else self.text[:, max(0, self.text.shape[1] - most) :]
        self.layers = [x.trimmed(most) if isinstance(x, RowLayer) else x for x in self.layers]

    def put(self, rows: Tensor, other: "Rows") -> None:
        """Replaces some rows (I,) int64 by those of another object."""
        pairs = zip(self.layers, other.layers, strict=True)
        self.layers = [x.with_rows(rows, y, len(self)) if isinstance(x, RowLayer) else x for x, y in pairs]
        self.seen = self.seen.index_copy(0, rows, other.seen)
        self.asked = self.asked.index_copy(0, rows, other.asked)
        if self.text is not None:
            width = max(x.text.shape[1] for x in (self, other))
            own, new = (pad(x.text, (width - x.text.shape[1], 0), value=NO_TOKEN) for x in (self, other))
            self.text = own.index_copy(0, rows.to(own.device), new.to(own))

    def join(self, other: "Rows") -> "Rows":
        """Returns the rows of both."""
        places = torch.cat([torch.arange(len(self)), torch.zeros(len(other), dtype=torch.int64)])
        new = self.map(lambda x: x[places.to(x.device)])
        new.put(torch.arange(len(self), len(places)), other)
        new.sinks = self.sinks | other.sinks
        return new

    def clear(self, rows: Tensor) -> None:
        """Lets some rows (I,) int64 have read nothing. A prompt that is still to come stays."""
        new = self.take(rows)
        new.seen, new.asked = torch.zeros_like(new.seen), new.asked.clamp(max=0)
        new.layers = [x.cleared() if isinstance(x, RowLayer) else x for x in new.layers]
        new.text = None if new.text is None else new.text[:, :0]
        self.put(rows, new)
        self.trim()

    def count(self, ids: Tensor, most: int) -> None:
        """Counts tokens (R, T) that the layers have read, and keeps the last `most` of the text."""
        self.seen, self.asked = self.seen + ids.shape[1], self.asked + ids.shape[1]
        if self.text is not None:
            self.text = torch.cat([self.text, ids.to(self.text)], 1)[:, -most:]
