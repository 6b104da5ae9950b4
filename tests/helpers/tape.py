"""A CPU's stand-in for a CUDA graph: the operations of one call are replayed on the memory of that call."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from launches import FREE, reads_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Records the operations of a function without arguments, as `memory_graphs.CudaRecording` does on a GPU. A value
    that the host waits for, or a tensor of the host's values, is an error, as it ends the recording of a CUDA graph."""

    number_of_replays: ClassVar[int] = 0
    is_possible = staticmethod(lambda device: True)

    def __init__(self, run: Callable[[], Any], device: torch.device | None = None):
        super().__init__()
        self.operations, self.kept = [], []  # all that is kept stays at its place in memory
        with self:
            self.results = run()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function._schema.name.split("::")[1], kwargs or {}
        if reads_of(name, args) or name == "lift_fresh":
            raise RuntimeError(f"{name}: the host would wait for a value, or send one")
        result = function(*args, **kwargs)
        self.kept.append((args, kwargs, result))
        if not (function.is_view or name in FREE):
            given = {x.untyped_storage().data_ptr() for x in tensors_in((args, kwargs))}
            new = [None if x.untyped_storage().data_ptr() in given else x for x in tensors_in(result)]
            self.operations.append((function, args, kwargs, new))
        return result

    def replay(self) -> None:
        """Computes everything once more."""
        Tape.number_of_replays += 1
        with torch.no_grad(), _disable_current_modes():  # who counts launches counts this call as one
            for function, args, kwargs, places in self.operations:
                for place, x in zip(places, tensors_in(function(*args, **kwargs)), strict=True):
                    if place is not None:
                        place.copy_(x)


def tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
