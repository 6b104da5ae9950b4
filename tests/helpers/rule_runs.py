"""Random arguments of the memory's rules in float64, and results with the gradients of all arguments."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

B, H, D = 3, 2, 4


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def draw_tokens(length: int, keys: int = D, layers: int | None = None, momentum: bool = True) -> list[Tensor | None]:
    """Draws q, k, v, theta, log eta and log(1 - alpha) of all tokens, with gates for each of some layers if asked for.
    Keys are on both sides of length 1, eta is below 1/3 and below 1 - alpha.
    """
    q, k, v = (
        normalize(draw(B, H, length, keys), dim=-1),
        normalize(draw(B, H, length, keys), dim=-1),
        draw(B, H, length, D),
    )
    shape = (B, H, length) if layers is None else (B, H, length, layers)
    theta, eta, alpha = (torch.rand(*shape, dtype=torch.float64) for _ in range(3))
    log_eta = (0.01 + 0.32 * eta).log() if momentum else None
    return [q, k * (0.5 + torch.rand(B, H, length, 1)), v, 0.5 * theta, log_eta, (1 - 0.6 * alpha).log()]


def leaves_of(tree) -> list[Tensor]:
    """Returns the floating-point tensors of nested lists."""
    if isinstance(tree, Tensor):
        return [tree] if tree.is_floating_point() else []
    return [x for part in tree or [] for x in leaves_of(part)]


def with_gradients(fn: Callable, arguments: Sequence, **options) -> list[Tensor]:
    """Returns the tensors that `fn` computes, and the gradients of a random function of them by all arguments."""
    leaves = [x.requires_grad_() for x in leaves_of(arguments)]
    results = leaves_of(fn(*arguments, **options))
    generator = torch.Generator().manual_seed(0)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in results)
    return results + list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-14) -> None:
    """Compares tensors to `tolerance` of the largest entry of each."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, b.abs().max().item()))
