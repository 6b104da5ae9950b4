"""The state of a neural memory and the gates of its update.

States are trees of tensors: dataclasses and tuples of tensors, of None and of further trees. `map_tensors`,
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
    """What learns in the memory of every batch row and head.

    weights (M), momentum (S; empty without momentum), anchor (with the deep rule the weights at the start of the
    current chunk, where gradients are taken, eq. 16; else empty): tuples with one tensor (B, H, d_in, d_out) for each
    layer that learns, in float32 (float64 in a float64 model). With the delta rule only the last layer learns.
    num_seen: (B,) int64, tokens read by each row, padding excluded.

    Never changed in place; not frozen, because Transformers' exporters set the fields of a copy.
    """

    weights: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    anchor: tuple[Tensor, ...]
    num_seen: Tensor

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


class Gates(NamedTuple):
    """theta, log eta (None without momentum) and log(1 - alpha) of each token, or the gradients with respect to them:
    (B, H, T), or (B, H, T, layers).
    """

    inner_lr: Tensor
    log_momentum_decay: Tensor | None
    log_retain: Tensor


Update = tuple[Tensor | None, Gates]  # of one memory: surprise (None if not asked for) and gates of a grid's tokens


def where_rows(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Selects `new` in the batch rows where `rows` (B,) is True, and `old` in the other rows; new and old (B, ...)."""
    return torch.where(rows.view(-1, *[1] * (new.dim() - 1)), new, old)


def zero_of(x: Tensor) -> Tensor:
    """Returns a 0 that depends on x in the autograd graph, so that the gradient of x is 0 and not None."""
    return x[..., :0].sum()
