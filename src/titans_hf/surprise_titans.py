"""The surprise of each token and the gates of its update, on request: `output_surprise=True` in a call."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .memory_gates import Gates
from .token_grid import TokenGrid


class TokenUpdates(NamedTuple):
    """Surprise and gates of the memory's updates with the tokens on the slots of a grid: (R, H, G) each, or gates
    (R, H, G, layers) with `memory_gates="layer"`. The surprise may be None if the grid does not ask for it.
    """

    surprise: Tensor | None
    gates: Gates


@dataclass(frozen=True)
class LayerSurprise:
    """The update that each token causes in one memory: the surprise and the gates theta, eta and alpha, (B, H, T)
    each, persistent tokens excluded.

    The properties are computed when they are read; they carry no gradient and are 0 at padding. With
    `memory_gates="layer"`, a gate is the mean over the layers of the network.

    parts: for each call, the updates (in MAC one per segment, in order) and the grid that its tokens are on.
    """

    parts: tuple[tuple[Sequence[TokenUpdates], TokenGrid], ...]

    @property
    def num_columns(self) -> int:
        """Number T of columns."""
        return sum(grid.num_columns for _, grid in self.parts)

    @property
    def gradient_norm(self) -> Tensor:
        """The surprise: the norm of the gradient of |M(k) - v|^2 (eq. 12), clipped as in the update."""
        return self._of_tokens(lambda updates: updates.surprise)

    @property
    def inner_lr(self) -> Tensor:
        """theta (eq. 10), the factor of the gradient."""
        return self._of_tokens(lambda updates: updates.gates.inner_lr)

    @property
    def momentum_decay(self) -> Tensor:
        """eta (eq. 10), the factor of the previous momentum; 0 without momentum."""
        return self._of_tokens(_momentum_decay)

    @property
    def forget(self) -> Tensor:
        """alpha (eq. 13): 1 - alpha is the factor of the previous weights."""
        return self._of_tokens(lambda updates: -updates.gates.log_retain.expm1())

    def _of_tokens(self, quantity: Callable[[TokenUpdates], Tensor]) -> Tensor:
        """Gathers a quantity of the updates (R, H, G) or (R, H, G, layers) for the tokens of all calls: (B, H, T)."""
        calls = []
        for updates, grid in self.parts:
            parts = [quantity(x) for x in updates]
            parts = parts or [torch.zeros(grid.num_rows, 0, grid.num_slots, device=grid.row_starts.device)]
            slots = torch.cat([x if x.dim() == 3 else x.mean(-1) for x in parts], dim=-1)
            if grid.is_padding is not None:
                slots = slots.masked_fill(grid.is_padding[:, None, None], 0)
            calls.append(grid.gather(slots.mT).mT)
        return torch.cat(calls, dim=-1)

    @classmethod
    def joined(cls, calls: Iterable["LayerSurprise"]) -> "LayerSurprise":
        """Concatenates the surprise of consecutive calls."""
        return cls(tuple(part for call in calls for part in call.parts))


def _momentum_decay(updates: TokenUpdates) -> Tensor:
    logarithm = updates.gates.log_momentum_decay
    return torch.zeros_like(updates.gates.inner_lr) if logarithm is None else logarithm.exp()


class SurpriseCollector:
    """Collects the surprise of consecutive calls of a model: pass it to each as `output_surprise`."""

    def __init__(self):
        self.calls: list[tuple[LayerSurprise, ...]] = []

    def joined(self, num_columns: int | None = None) -> tuple[LayerSurprise, ...]:
        """Returns one `LayerSurprise` per layer, with the tokens of all calls; with `num_columns`, without a last call
        beyond them, which `generate()` has undone: on MPS it decodes a token more than it returns.
        """
        calls = self.calls
        if num_columns is not None and sum(call[0].num_columns for call in calls) > num_columns:
            calls = calls[:-1]
        return tuple(map(LayerSurprise.joined, zip(*calls, strict=True)))


__all__ = ["LayerSurprise", "SurpriseCollector"]
