"""Fast weights: a term of low rank on linear layers of a frozen model, trained while the model reads.

    y = W x + B (A x)                         A (r, in) is fixed, B (out, r) belongs to one row of the batch
    L = (1 / C) sum of -log p(x_{i+1})        over the C tokens x_i of a chunk, keys and values of earlier chunks fixed
    c' = c - theta_0 <dL/dB, B_0>             the share of the start B_0 that the row takes, 0 at first: a sum over
                                              all matrices, since dL/dc = <dL/dB, B_0>
    B <- B + (c' - c) B_0 - theta dL/dB       the step: Titans eq. 10 and 13 with the model's own loss, without momentum
                                              and forgetting

The step of a chunk is taken when the token after it arrives, because that is the last label. A chunk's keys and values
are kept as they were computed before its step. B and the steps are float32 at least; B (A x) is computed in the
model's dtype. A gradient whose norm over all matrices of a row exceeds `max_gradient` is scaled down to it.

Sources: dynamic evaluation (Krause et al. 2018), test-time training (Sun et al. 2024), Titans (Behrouz et al. 2024).
Shapes: R rows, T tokens, r rank, `in` and `out` the sizes of a linear layer.
"""

import functools
import re
from collections.abc import Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.generic import maybe_autocast

from ..cache_files import check_tensor

BASE_LAYER = ".base_layer"  # PEFT's name of the layer inside of an adapted layer
IGNORED = -100  # the label of a token that is not learned
SHARES = (-1.0, 2.0)  # bounds of c, for bursts of garbage: texts of four kinds stayed within 0 and 1.4
SHARE = "start"  # the name of c in the state
TOKENS_AT_ONCE = 8  # whose distributions a processor's cache holds
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LARGEST = 1e6  # of a rate and of other numbers without a natural limit
LIMITS = {  # of the fields of `Step`: least, most, and kinds other than int and float
    "chunk": (1, 2**16, (int,)),
    "max_gradient": (0, LARGEST),
    "start_rate": (0, LARGEST),
}
OPTIONAL = ("max_gradient", "start_rate")
_ACTIVE: ContextVar["tuple[FastWeights, dict[str, Tensor]] | None"] = ContextVar("fast_weights", default=None)


@dataclass
class Step:
    """How a step is taken: chunk C (tokens), max_gradient (None: no limit), start_rate theta_0 (None: c is 1)."""

    chunk: int = 64
    max_gradient: float | None = 20.0
    start_rate: float | None = 2.0


@dataclass
class FastWeights:
    """Fast weights of some linear layers of a model.

    directions: A (r, in) by the layer's name. rates: theta by the same names. start: B_0 (out, r), zeros if missing.
    """

    directions: dict[str, Tensor]
    rates: dict[str, float]
    outputs: dict[str, int]
    start: dict[str, Tensor] = field(default_factory=dict)
    step: Step = field(default_factory=Step)

    def check(self, model: PreTrainedModel) -> None:
        """Raises ValueError for a number that no fit makes, and for a layer that the model does not have."""
        for name, limits in LIMITS.items():
            x = getattr(self.step, name)
            if x is not None or name not in OPTIONAL:
                check_number(f"`step` {name}", x, *limits)
        if not self.directions:
            raise ValueError("it has no fast weights")
        for name, x in self.directions.items():
            size, out = layer_sizes(model, name)
            check_tensor(f"A.{name}", x, (None, size), FLOATS)
            check_number(f"rate.{name}", self.rates[name], 0, LARGEST)
            if self.outputs[name] != out:
                raise ValueError(f"{name} has {out} outputs, not {self.outputs[name]}")
            if name in self.start:
                check_tensor(f"B_0.{name}", self.start[name], (out, len(x)), FLOATS)

    def attach(self, model: PreTrainedModel) -> list:
        """Adds the terms to a model's linear layers by hooks, which it returns. They act only inside `active`."""
        modules, hooks = dict(model.named_modules()), []
        for name in self.directions:
            layer = modules.get(name + BASE_LAYER, modules[name])
            hooks.append(layer.register_forward_hook(functools.partial(_add_term, name)))
        return hooks

    def add_term(self, name: str, inputs: Tensor, output: Tensor, weights: Tensor) -> Tensor:
        """Computes y + B (A x) from x (R, T, in), y (R, T, out), or (R * T, ...), and B (R, out, r); in y's dtype."""
        if (directions := self.directions[name]).device != inputs.device:
            directions = self.directions[name] = directions.to(inputs.device)
        rows, dtype = len(weights), output.dtype
        x, y = (z.reshape(rows, -1, z.shape[-1]) for z in (inputs, output))
        with maybe_autocast(inputs.device.type, enabled=False):
            low = x.to(dtype) @ directions.to(dtype).mT  # (R, T, in) @ (in, r)
            added = torch.baddbmm(y, low, weights.to(inputs.device, dtype).mT)  # (R, T, r) @ (R, r, out)
        return added.view_as(output)

    @contextmanager
    def active(self, weights: dict[str, Tensor]):
        """Uses B (R, out, r) by name in the calls of the model inside of the block."""
        token = _ACTIVE.set((self, weights))
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    def initial_state(self, rows: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Returns the state before the first token: B (R, out, r) by "B.name"; c (R, 1, 1) by SHARE, if there is a
        start.
        """
        state, share = {}, 1.0 if self.step.start_rate is None else 0.0
        self.start = {name: x.to(device) for name, x in self.start.items()}
        if self.start:
            state[SHARE] = torch.full((rows, 1, 1), share, dtype=dtype, device=device)
        for name, directions in self.directions.items():
            shape = (rows, self.outputs[name], len(directions))
            zeros = torch.zeros(shape, dtype=dtype, device=device)
            start = self.start.get(name)
            state[f"B.{name}"] = zeros if start is None else zeros + share * start.to(zeros)
        return state

    def weights(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns B by name, from a state."""
        return {name: state[f"B.{name}"] for name in self.directions}

    @torch.no_grad()
    def gradient_of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Computes dL / d logits (R, C, V), (p - 1 at the label) / C, from labels (R, C), IGNORED where not learned."""
        gradient, dtype = torch.empty_like(logits), torch.promote_types(logits.dtype, torch.float32)
        labels = labels.to(logits.device).flatten()[:, None]
        shares = (labels != IGNORED).to(dtype) / self.step.chunk
        size = TOKENS_AT_ONCE if logits.device.type == "cpu" else max(1, labels.numel())
        blocks = (x.split(size) for x in (gradient.flatten(0, 1), logits.flatten(0, 1), labels.clamp(min=0), shares))
        for out, of_block, label, share in zip(*blocks, strict=True):
            p = of_block.softmax(-1, dtype=dtype).mul_(share)
            out.copy_(p.scatter_add_(1, label, -share))
        return gradient

    def take_step(self, state: dict[str, Tensor], gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns the state after a step, from dL/dB (R, out, r) in the order of `directions`."""
        device, scale = gradients[0].device, torch.ones(())
        if self.step.max_gradient is not None:
            in_order = [g for _, g in sorted(zip(self.directions, gradients, strict=True), key=lambda x: x[0])]
            squares = torch.stack([g.square().sum((1, 2)).to(device) for g in in_order])
            scale = (self.step.max_gradient / squares.sum(0).sqrt()).clamp(max=1.0)  # (R,)
            scale = torch.nan_to_num(scale, nan=0.0)[:, None, None]
        by_name, new = {}, {}
        for name, gradient in zip(self.directions, gradients, strict=True):
            gradient = gradient.to(state[f"B.{name}"].dtype).nan_to_num()
            by_name[name] = scale.to(gradient) * gradient
        if self.start:
            old = share = state[SHARE]
            if self.step.start_rate is not None:
                pairs = [(by_name[name], self.start[name]) for name in sorted(self.start)]  # the order changes digits
                dots = [(g * start.to(g)).sum((1, 2)).to(device) for g, start in pairs]
                share = old - self.step.start_rate * torch.stack(dots).sum(0).to(old)[:, None, None]
                share = share.clamp(*SHARES)
            new[SHARE] = share
        for name, gradient in by_name.items():
            after = state[f"B.{name}"]
            if name in self.start:
                start = self.start[name].to(after)
                after = after + (share - old).to(start) * start
            new[f"B.{name}"] = after - self.rates[name] * gradient
        return new


def _add_term(name: str, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
    """A forward hook of a linear layer: adds the term of the fast weights that are active."""
    if (active := _ACTIVE.get()) is None:
        return None
    fast_weights, weights = active
    return fast_weights.add_term(name, args[0], output, weights[name])


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Returns name and list of a model's decoder layers: a list of as many modules as the model has layers."""
    number = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return name, module
    raise ValueError(f"`model` is a {type(model).__name__}, whose {number} decoder layers were not found.")


def linear_layers(
    model: PreTrainedModel, layers: Sequence[int], kinds: Sequence[str] | None = None
) -> dict[str, tuple[int, int]]:
    """Returns the sizes (in, out) by name of the linear layers in some decoder layers: those of `kinds` ("v_proj",
    ...), or all but queries, keys and routers, which hold nothing of what was read.

    Experts of a mixture are left out: their inputs are not the tokens of the call in order. A layer with an adapter of
    PEFT keeps its name; the adapter's term is added after the fast weights' term.
    """
    root, found = decoder_layers(model)[0], {}
    left_out = re.compile("expert" if kinds else r"expert|router|(^|\.)[qk]_")
    for index in layers:
        for name, module in model.get_submodule(f"{root}.{index}").named_modules():
            name = f"{root}.{index}.{name}".removesuffix(BASE_LAYER)
            is_wanted = not left_out.search(name) and (kinds is None or name.rpartition(".")[2] in kinds)
            is_inside = any(name.startswith(f"{x}.") for x in found)  # an adapter's own layer
            if is_wanted and not is_inside and (sizes := linear_sizes(module)):
                found[name] = sizes
    return found


def layer_sizes(model: PreTrainedModel, name: str) -> tuple[int, int]:
    """Returns the sizes (in, out) of a linear layer by its name. Raises ValueError if the model has none of it."""
    modules = dict(model.named_modules())
    sizes = linear_sizes(modules.get(name + BASE_LAYER, modules.get(name)))
    if sizes is None:
        raise ValueError(f"the model has no linear layer {name}")
    return sizes


def check_number(name: str, x: Any, least: float, most: float, kinds: tuple[type, ...] = (int, float)) -> None:
    """Raises ValueError that names it for anything but a number of some `kinds` from `least` to `most`."""
    if isinstance(x, bool) or not isinstance(x, kinds) or not least <= x <= most:
        whole = "" if float in kinds else "whole "
        raise ValueError(f"{name} must be a {whole}number from {least} to {most}, got {x!r:.80}")


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Returns the sizes (in, out) of a linear layer, None for another module."""
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):  # GPT-2's, whose weight is (in, out)
        return module.nx, module.nf
    return None


def random_fast_weights(
    model: PreTrainedModel, layers: Sequence[int], kinds: Sequence[str] | None = None, *, rank: int, rate: float
) -> FastWeights:
    """Returns fast weights of `linear_layers` with random directions, A ~ N(0, 1 / in): they need no fit."""
    sizes = linear_layers(model, layers, kinds)
    generator = torch.Generator().manual_seed(0)
    directions = {x: torch.randn(rank, i, generator=generator) / i**0.5 for x, (i, _) in sizes.items()}
    return FastWeights(directions, dict.fromkeys(sizes, rate), {x: o for x, (_, o) in sizes.items()})
