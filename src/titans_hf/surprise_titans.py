"""How much each token taught the memory, on request: `output_surprise=True` in a call and in `generate()`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .token_grid import TokenGrid


class Writes(NamedTuple):
    """What a memory did with the tokens on the slots of a grid: (R, H, G) each."""

    surprise: Tensor
    inner_lr: Tensor
    log_momentum_decay: Tensor
    log_retain: Tensor


@dataclass(frozen=True)
class LayerSurprise:
    """What each token (B, H, T) did to the memory of a layer: its properties, computed when they are asked for, without
    a gradient and 0 at padding. Persistent tokens are not among them.

    parts: per call the slots in order, and where the tokens lie.
    """

    parts: tuple[tuple[Sequence[Writes], TokenGrid], ...]

    @property
    def gradient_norm(self) -> Tensor:
        """The surprise: the norm of the gradient of |M(k) - v|^2 (eq. 12), limited as it is when it is written."""
        return self._of_tokens(lambda writes: writes.surprise)

    @property
    def inner_lr(self) -> Tensor:
        """theta (eq. 10), by which the gradient is multiplied."""
        return self._of_tokens(lambda writes: writes.inner_lr)

    @property
    def momentum_decay(self) -> Tensor:
        """eta (eq. 10), the share of the momentum that stays."""
        return self._of_tokens(lambda writes: writes.log_momentum_decay.exp())

    @property
    def forget(self) -> Tensor:
        """alpha (eq. 13), the share of the weights that goes."""
        return self._of_tokens(lambda writes: -writes.log_retain.expm1())

    def _of_tokens(self, quantity: Callable[[Writes], Tensor]) -> Tensor:
        calls = []
        for writes, grid in self.parts:
            slots = torch.cat([quantity(x).detach() for x in writes], dim=-1)
            if grid.idle is not None:
                slots = slots.masked_fill(grid.idle[:, None, None], 0)
            calls.append(grid.take(slots.mT).mT)
        return torch.cat(calls, dim=-1)

    @classmethod
    def joined(cls, calls: Iterable["LayerSurprise"]) -> "LayerSurprise":
        """That of calls that follow each other."""
        return cls(tuple(part for call in calls for part in call.parts))


@dataclass
class TitansModelOutput(BaseModelOutputWithPast):
    """surprise: one `LayerSurprise` a layer."""

    surprise: tuple[LayerSurprise, ...] | None = None


@dataclass
class TitansCausalLMOutput(CausalLMOutputWithPast):
    """surprise: one `LayerSurprise` a layer."""

    surprise: tuple[LayerSurprise, ...] | None = None


__all__ = ["LayerSurprise", "TitansCausalLMOutput", "TitansModelOutput"]
