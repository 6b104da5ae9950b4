"""The state of a neural memory, the inputs of its update, and the result of an update.

States and inputs are trees of tensors: dataclasses and tuples of tensors, of None and of further trees. `map_tensors`,
`named_tensors` and `with_tensors` walk any of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


def map_tensors(fn: Callable[..., Tensor], tree: Any, *others: Any) -> Any:
    """Returns a tree with fn(x) for every tensor x of `tree`, with the tensors of `others` as further arguments."""
    if tree is None or isinstance(tree, Tensor):
        return None if tree is None else fn(tree, *others)
    if names := getattr(type(tree), "__match_args__", None):  # the fields of a dataclass or a NamedTuple
        children = ([getattr(part, name) for part in (tree, *others)] for name in names)
        return type(tree)(*(map_tensors(fn, *parts) for parts in children))
    return tuple(map_tensors(fn, *parts) for parts in zip(tree, *others, strict=True))


def named_tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a tree in the order of `map_tensors`, each with its path, as "memory.weights.0"."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif tree is not None:
        names = getattr(type(tree), "__match_args__", None) or range(len(tree))
        for name in names:
            child = tree[name] if isinstance(name, int) else getattr(tree, name)
            yield from named_tensors(child, f"{path}.{name}" if path else str(name))


def shapes_of(tree: Any) -> str:
    """Formats the class of a tree with the names and shapes of its tensors, in place of their numbers."""
    return f"{type(tree).__name__}({', '.join(f'{name} {tuple(x.shape)}' for name, x in named_tensors(tree))})"


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors of a tree, in the order in which `with_tensors` takes them."""
    return [x for _, x in named_tensors(tree)]


def with_tensors(tree: Any, tensors: Iterable[Tensor]) -> Any:
    """Returns a tree of the same form with other tensors."""
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), tree)


@dataclass
class MemoryState:
    """The memory of every batch row and head; tuples hold one tensor per layer of the memory network.

    weights (M), momentum (S; empty without momentum), anchor (the weights at the start of the current chunk, where
    gradients are taken, eq. 16; empty where `UpdateRule.needs_anchor` is False): (B, H, d_in, d_out) in float32
    (float64 in a float64 model).
    num_seen: (B,) int64, tokens read by each row, padding excluded.

    Inside the scan over chunks, batch and heads are one dimension, (N, d_in, d_out), and `num_seen` is None. Gradients
    with respect to a state have the same form. Never changed in place; not frozen, because Transformers' exporters set
    the fields of a copy.
    """

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    anchor: tuple[Tensor, ...]
    num_seen: Tensor | None = None

    __repr__ = shapes_of

    @classmethod
    def initial(
        cls,
        weights: Sequence[Tensor],
        batch_size: int,
        dtype: torch.dtype,
        has_anchor: bool = True,
        has_momentum: bool = True,
    ) -> "MemoryState":
        """Returns the state before the first token, from learned initial weights (H, d_in, d_out)."""
        rows = tuple(weight.to(dtype).expand(batch_size, *weight.shape) for weight in weights)
        num_seen = torch.zeros(batch_size, dtype=torch.int64, device=weights[0].device)
        momentum = tuple(map(torch.zeros_like, rows)) if has_momentum else ()
        return cls(rows, momentum, rows if has_anchor else (), num_seen)

    def map(self, fn: Callable[..., Tensor], *others: "MemoryState") -> "MemoryState":
        """Applies `fn` to every tensor (batch dimension first), with the tensors of `others` as further arguments."""
        return map_tensors(fn, self, *others)

    def with_count_reset(self) -> "MemoryState":
        """Returns the state with no token counted: the next token starts a new chunk."""
        anchor = self.weights if self.anchor else ()
        return MemoryState(self.weights, self.momentum, anchor, torch.zeros_like(self.num_seen))


class MemoryInputs(NamedTuple):
    """The inputs of the memory's update for T tokens (of a call, or of one chunk), in the state's dtype; or the
    gradients with respect to them.

    queries, keys, values: (B, H, T, D). inner_lr (theta), log_momentum_decay (log eta), log_retain (log(1 - alpha)):
    (B, H, T), or (B, H, T, L) with separate gates for each layer of the memory network; -inf is the logarithm of 0.
    log_momentum_decay is None without momentum.
    filled: (B, H, T) bool, False at slots without a token; None if every slot holds one.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    inner_lr: Tensor
    log_momentum_decay: Tensor | None
    log_retain: Tensor
    filled: Tensor | None = None

    @property
    def has_gates_per_layer(self) -> bool:
        """True if the gates have a dimension for the layers of the memory network."""
        return self.inner_lr.dim() == self.keys.dim()

    def map(self, fn: Callable[[Tensor], Tensor]) -> "MemoryInputs":
        """Applies `fn` to every tensor."""
        return map_tensors(fn, self)


class Gates(NamedTuple):
    """theta, log eta (None without momentum) and log(1 - alpha) of each token, or the gradients with respect to them:
    (B, H, T), or (B, H, T, layers).
    """

    inner_lr: Tensor
    log_momentum_decay: Tensor | None
    log_retain: Tensor


Update = tuple[Tensor | None, Gates]  # of one memory: surprise (None if not asked for) and gates of a grid's tokens


class MemorizeOutput(NamedTuple):
    """The result of an update of the memory: retrieved (B, H, T, D) in the state's dtype; surprise (B, H, T), the norm
    of each token's gradient, detached, None if a call does not need it; and the state after the last token.
    """

    retrieved: Tensor
    surprise: Tensor | None
    state: MemoryState


def where_rows(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Selects `new` in the batch rows where `rows` (B,) is True, and `old` in the other rows; new and old (B, ...)."""
    return torch.where(rows.view(-1, *[1] * (new.dim() - 1)), new, old)


def zero_of(x: Tensor) -> Tensor:
    """Returns a 0 that depends on x in the autograd graph, so that the gradient of x is 0 and not None."""
    return x[..., :0].sum()
