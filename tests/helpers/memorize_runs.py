"""Random inputs of `memorize` in float64, and its results with the gradients of all of them."""

from dataclasses import replace

import torch

from titans_hf import MemoryInputs, MemoryState, UpdateRule
from titans_hf.memory_network import layer_shapes
from titans_hf.memory_state import tensors_of

B, H, D, CHUNK = 3, 2, 4, 4


def make_state(depth: int, num_seen: list[int]) -> MemoryState:
    def layers():
        return tuple(0.7 * torch.randn(B, H, *shape, dtype=torch.float64) for shape in layer_shapes(D, depth, 2))

    return MemoryState(layers(), layers(), layers(), torch.tensor(num_seen))


def make_decay_target(depth: int) -> tuple[torch.Tensor, ...]:
    return tuple(0.3 * torch.randn(H, *shape, dtype=torch.float64) for shape in layer_shapes(D, depth, 2))


def make_inputs(length: int, momentum: bool = True, forget: bool = True) -> MemoryInputs:
    queries, keys, values = (torch.randn(B, H, length, D, dtype=torch.float64) for _ in range(3))
    inner_lr = 0.5 * torch.rand(B, H, length, dtype=torch.float64)
    log_momentum_decay = torch.rand(B, H, length, dtype=torch.float64).log()
    log_retain = torch.rand(B, H, length, dtype=torch.float64).log() / 4
    if not momentum:
        log_momentum_decay = torch.full_like(log_momentum_decay, -torch.inf)
    if not forget:
        log_retain = torch.zeros_like(log_retain)
    normalize = torch.nn.functional.normalize
    queries, keys = normalize(queries, dim=-1), normalize(keys, dim=-1)
    return MemoryInputs(queries, keys, values, inner_lr, log_momentum_decay, log_retain)


def without_momentum(inputs: MemoryInputs, state: MemoryState) -> tuple[MemoryInputs, MemoryState]:
    """Returns the inputs and the state of a memory that has no momentum."""
    return inputs._replace(log_momentum_decay=None), replace(state, momentum=())


def run(fn, inputs: MemoryInputs, state, rule: UpdateRule, decay_target=(), seed=0):
    """Returns outputs and state of `fn`, and the gradients of a random function of them with respect to all inputs."""
    inputs = inputs.map(lambda x: x.clone().requires_grad_(bool(x.isfinite().all())))
    state = state.map(lambda x: x.clone().requires_grad_(x.is_floating_point()))
    decay_target = tuple(x.clone().requires_grad_() for x in decay_target)
    retrieved, surprise, after = fn(inputs, state, rule, chunk_size=CHUNK, decay_target=decay_target)
    outputs = [retrieved, *after.weights, *after.momentum]
    generator = torch.Generator().manual_seed(seed)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in outputs)
    sources = [x for x in inputs if x is not None and x.requires_grad]
    sources += [*state.weights, *state.momentum, *state.anchor, *decay_target]
    gradients = torch.autograd.grad(loss, sources, allow_unused=True, materialize_grads=True)
    anchor = after.anchor if rule.needs_anchor(len(after.weights)) else ()  # the reference always has one
    return [*outputs, surprise, *anchor, after.num_seen], gradients


def assert_same(ours, theirs, tolerance: float = 1e-14):
    for a, b in zip(tensors_of(ours), tensors_of(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, b.abs().max().item()))
