"""Small models in float64 whose every path matters, and the comparisons that tests share."""

import functools
import itertools

import pytest
import torch

from titans_hf import TitansCache, TitansConfig, TitansForCausalLM
from titans_hf.memory_state import tensors_of

VARIANTS = ("mac", "mag", "mal", "lmm")
ATTENTIONS = ("mac", "mal", "lmm")  # attention to segments, to windows, and none: for what depends on its cache
TWO_VARIANTS = ("mag", "lmm")  # with attention and without: for code that the variants share
TOLERANCE = 1e-10
SIZES = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, sliding_window=12, segment_length=8, memory_chunk_size=4, num_persistent_tokens=3)
SIZES |= dict(bos_token_id=None, eos_token_id=None, memory_expansion=2)  # layers of a memory have several shapes
# The paper's second version as it stands, but for sizes and the largest step, which no equation gives.
PAPER = dict(memory_recurrence="paper", memory_network="residual", memory_update_rule="chunk")
PAPER |= dict(memory_output_norm="rms", memory_residual=False, memory_conv_noise=1)
PAPER |= dict(rope_parameters={"partial_rotary_factor": 1.0})
# The forms of the memory.
FORMS = {
    "delta": dict(memory_form="delta"),
    "products": dict(memory_activation="product"),
    "deep": dict(memory_update_rule="chunk"),
    "deep, without momentum": dict(memory_update_rule="chunk", memory_momentum=False),
    "deep, three layers": dict(memory_update_rule="chunk", memory_depth=3, memory_activation="relu"),
    "paper's form": dict(memory_output_norm="rms", memory_residual=False),
    "paper's recurrence": dict(memory_recurrence="paper", memory_update_rule="chunk", memory_max_lr=0.05),
    "paper's recurrence with the delta rule": dict(memory_recurrence="paper"),
    "residual network": dict(memory_network="residual"),
    "residual network of one layer": dict(memory_network="residual", memory_depth=1),
    "paper": PAPER,
    "normalised output": dict(memory_output_norm="rms"),
    "gated output": dict(memory_residual=False),
}

# Each setting that has code of its own.
SETTINGS = {
    "base": {},
    **FORMS,
    "chunk is segment": dict(memory_chunk_size=8),
    "three chunks a segment": dict(segment_length=12),
    "chunk of one": dict(memory_chunk_size=1),
    "no persistent tokens": dict(num_persistent_tokens=0),
    "persistent tokens over two chunks": dict(num_persistent_tokens=7),
    "linear memory": dict(memory_depth=1),
    "deep memory": dict(memory_depth=3, memory_expansion=1),
    "no momentum": dict(memory_momentum=False),
    "no forgetting": dict(memory_forget=False),
    "neither": dict(memory_momentum=False, memory_forget=False),
    "memory off": dict(memory_max_lr=0.0),
    "no convolution": dict(memory_conv_kernel=1),
    "convolution over two chunks": dict(memory_conv_kernel=7),
    "plain loss": dict(memory_update_rule="chunk", memory_loss="l2", memory_max_lr=0.05),
    "gelu": dict(memory_activation="gelu"),
    "window of one": dict(sliding_window=1),
    "window of two": dict(sliding_window=2),
    "window beyond the sequence": dict(sliding_window=100),
    "segment beyond the sequence": dict(segment_length=80),
    "other heads": dict(num_key_value_heads=1, head_dim=12, memory_num_heads=2, rope_parameters={"rope_theta": 100.0}),
    "three layers": dict(num_hidden_layers=3),
    "full rotary": dict(rope_parameters={"partial_rotary_factor": 1.0, "rope_theta": 10000.0}),
}


def make_config(variant: str, **changes) -> TitansConfig:
    return TitansConfig(**{**SIZES, "variant": variant, **changes})


@torch.no_grad()
def redraw(model: torch.nn.Module, seed: int = 0, scale: float = 0.2) -> torch.nn.Module:
    """Draws every parameter anew: as initialised, the memory outputs 0 and its gates are independent of the token. At a
    scale of 0.3 a change of the input, and rounding, would grow 1e8 times in MAC."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model


def make_model(variant: str, *, seed: int = 0, dtype=torch.float64, attention: str = "sdpa", **changes):
    config = make_config(variant, **changes)
    config._attn_implementation = attention
    return redraw(TitansForCausalLM(config).to(dtype).eval(), seed)


@functools.cache
def shared_model(variant: str, **changes):
    """Returns one model for all tests that leave it unchanged."""
    return make_model(variant, **changes)


def each_variant(changes: dict[str, dict]) -> list:
    """Returns pytest parameters (variant, changes) for all changes of the config: of attention for the variants that it
    affects, of MAG and MAL one in turn; of the memory alone, whose code is shared, for one variant in turn."""
    shared_by_all = {name for name in TitansConfig.__annotations__ if name.startswith("memory_")}
    shared_by_all -= {"memory_chunk_size", "memory_residual"}
    without_attention = {"sliding_window", "segment_length", "num_key_value_heads", "memory_residual"}
    without_attention |= {"rope_parameters"}
    meaningless = {"mac": {"sliding_window"}, "lmm": without_attention}
    turns, windows, parameters = itertools.cycle(VARIANTS), itertools.cycle(["mag", "mal"]), []
    for name, change in changes.items():
        affected = [v for v in VARIANTS if not change or change.keys() - meaningless.get(v, {"segment_length"})]
        if change and change.keys() <= shared_by_all:
            affected = [next(turns)]
        elif change and "mal" in affected:
            affected.remove(next(windows))
        parameters += [pytest.param(variant, change, id=f"{variant}-{name}") for variant in affected]
    return parameters


def make_ids(*shape: int, seed: int = 0, vocab_size: int = 50) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def full_logits(model, ids, mask=None, **kwargs) -> torch.Tensor:
    return model(input_ids=ids, attention_mask=mask, use_cache=False, **kwargs).logits


@torch.no_grad()
def read(model, ids, sizes=None, cache: TitansCache | None = None) -> tuple[torch.Tensor, TitansCache]:
    """Returns the logits of `ids`, read in calls of the given sizes (default: one call), and the cache afterwards."""
    sizes = [ids.shape[1]] if sizes is None else list(sizes)
    assert sum(sizes) == ids.shape[1]
    cache = TitansCache(model.config) if cache is None else cache
    logits = [model(input_ids=piece, cache=cache).logits for piece in ids.split(sizes, 1)]
    return torch.cat(logits, 1), cache


def left_pad(rows: list[torch.Tensor], fill: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads rows (T_i,) of different lengths on the left; returns ids and mask (B, T)."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([row.new_full((width - len(row),), fill), row]) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in rows])
    return ids, mask


def tensors(cache: TitansCache) -> list[torch.Tensor]:
    return [x for layer in cache.layers if layer.state is not None for x in tensors_of(layer.state)]


def assert_same(actual, expected, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def assert_same_cache(actual: TitansCache, expected: TitansCache, tolerance: float = TOLERANCE) -> None:
    assert_same(tensors(actual), tensors(expected), tolerance)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(actual, expected, tolerance: float = 1e-9) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        assert_same(gradient, expected[name], tolerance * max(1.0, expected[name].abs().max().item()))
