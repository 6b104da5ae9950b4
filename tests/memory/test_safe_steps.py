"""The largest steps that a config takes by default are safe: whatever the tokens are, nothing grows exponentially."""

import pytest
import torch
from torch.nn.functional import normalize

from titans_hf import TitansConfig
from titans_hf.memory_deep import deep_rule
from titans_hf.memory_rule import delta_rule, features
from titans_hf.neural_memory import LARGEST_ETA_OF_DELTA_RULE, NeuralMemory

SIZE = 32


def adversarial_tokens(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws keys and values (8, 1, length, SIZE) of length 1 in which keys repeat, in float64."""
    generator, place = torch.Generator().manual_seed(0), torch.arange(length)

    def draw(rows: int) -> torch.Tensor:
        return normalize(torch.randn(rows, SIZE, generator=generator, dtype=torch.float64), dim=-1)

    keys, values = draw(2), draw(2)
    near = normalize(keys[0] + 0.3 * draw(2), dim=-1)
    plane = normalize(torch.randn(length, 2, generator=generator, dtype=torch.float64) @ draw(2), dim=-1)
    signs = torch.where(place % 2 == 0, 1.0, -1.0)[:, None]
    bursts, longer, by_chunk = (place % 35 >= 5).long(), (place % 48 >= 8).long(), place // 64 % 2
    rows = [
        (keys[:1].expand(length, -1), values[:1].expand(length, -1)),
        (keys[:1].expand(length, -1), draw(length)),
        (keys[:1].expand(length, -1), values[0] * signs),
        (keys[bursts], values[bursts]),
        (keys[longer], values[longer]),
        (keys[by_chunk], values[by_chunk]),
        (near[by_chunk], torch.stack([values[0], -values[0]])[by_chunk]),
        (plane, draw(length)),
    ]
    return tuple(torch.stack(parts)[:, None] for parts in zip(*rows, strict=True))


def read_all(config: TitansConfig, length: int, dtype: torch.dtype, eta: float):
    """Reads the tokens with the largest steps and without forgetting: the output and the keys."""
    torch.manual_seed(0)
    memory = NeuralMemory(config).double()
    keys, values = (x.to(dtype) for x in adversarial_tokens(length))
    keys.requires_grad_(dtype == torch.float64)
    initial, state = memory.initial_weights(dtype), memory.initial_state(len(keys), dtype)
    theta = torch.full(keys.shape[:3], config.memory_max_lr * (1 - eta * config.memory_momentum), dtype=dtype)
    gates = theta, torch.full_like(theta, eta).log() if config.memory_momentum else None, torch.zeros_like(theta)
    if memory.is_deep:
        rule = dict(network=memory.network, loss=memory.loss, clips=True, chunk_size=config.memory_chunk_size)
        given = [[x.to(dtype) for x in part] for part in (state.weights, state.momentum, state.anchor)]
        return deep_rule(keys, keys, values, *gates, initial, *given, **rule)[0], keys
    h = features(keys, initial[:-1], config.memory_activation)
    m, s = (x[0].to(dtype) if x else None for x in (state.weights, state.momentum))
    return delta_rule(h, h, values, *gates, initial[-1], m, s)[0], keys


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("rule,eta", [("chunk", 0.9), ("delta", LARGEST_ETA_OF_DELTA_RULE)])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_gradients_and_rounding_do_not_grow(depth, rule, eta, momentum):
    """After 768 tokens with repeated keys gradients stay below 30; with steps that overshoot they reach 1e3 to 1e17."""
    settings = dict(memory_update_rule=rule, memory_depth=depth, memory_momentum=momentum, memory_chunk_size=16)
    config = TitansConfig(variant="lmm", hidden_size=SIZE, memory_num_heads=1, memory_expansion=2, **settings)
    retrieved, keys = read_all(config, 768, torch.float64, eta)
    late = retrieved[:, :, -64:]
    direction = torch.randn(late.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    direction /= direction.flatten(1).norm(dim=1)[:, None, None, None]
    (gradient,) = torch.autograd.grad((late * direction).sum(), keys)
    assert gradient.flatten(1).norm(dim=1).max() < 30 and retrieved.norm(dim=-1).max() < 10
    with torch.no_grad():
        rounded, _ = read_all(config, 768, torch.float32, eta)
    assert (rounded - retrieved).norm(dim=-1).max() < 1e-3 * retrieved.norm(dim=-1).max()
