"""Outputs and states are finite for any input and any gates."""

import torch
from common import VARIANTS
from covering import covering

from titans_hf import TitansCache, TitansConfig, TitansForCausalLM
from titans_hf.memory_state import tensors_of


def make_reckless(variant: str, depth: int, dtype: torch.dtype, rule: str = "delta") -> TitansForCausalLM:
    """Makes a model with the largest step size and no forgetting; with the chunk rule, momentum is near 1."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    spans = dict(sliding_window=64, segment_length=64, memory_chunk_size=64)
    config = TitansConfig(**sizes, **spans, variant=variant, memory_depth=depth, memory_update_rule=rule)
    model = TitansForCausalLM(config)
    memory = model.model.layers[0].mixer.memory
    for gate, logit in ((memory.inner_lr, 30.0), (memory.momentum, 7.0), (memory.forget, -30.0)):
        if gate is not None:
            torch.nn.init.constant_(gate.bias, logit)
    return model.to(dtype).eval()


def make_inputs(kind: str, length: int, size: int) -> torch.Tensor:
    """(1, length, size) embeddings."""
    inputs = torch.randn(1, length, size, generator=torch.Generator().manual_seed(0))
    if kind != "random":
        of_period = {"constant": [0], "alternating": [0, 1], "bursts": [0] * 5 + [1] * 30}[kind]
        inputs = inputs[:, of_period * (length // len(of_period) + 1)][:, :length]
    return 1e3 * torch.nn.functional.normalize(inputs, dim=-1)


@covering(
    2,
    {
        "variant": VARIANTS,
        "rule,depth": [("delta", 1), ("delta", 4), ("chunk", 2), ("chunk", 4)],
        "kind": ["constant", "alternating", "bursts", "random"],
        "dtype": [torch.float32, torch.bfloat16],
    },
)
def test_huge_embeddings_stay_finite(variant, rule, depth, kind, dtype):
    """Logits, cache and weights stay limited after 2,000 embeddings of norm 1000, also where a key comes in bursts."""
    model = make_reckless(variant, depth, dtype, rule)
    inputs, cache = make_inputs(kind, 2_000, 16).to(dtype), TitansCache(model.config)
    with torch.no_grad():
        logits = model(inputs_embeds=inputs, cache=cache).logits
        last = model(inputs_embeds=inputs[:, -1:], cache=cache).logits
    state = cache.layers[0].state
    assert all(x.isfinite().all() for x in (logits, last, *tensors_of(state)))
    assert max(x.abs().max() for x in state.memory.weights) < 4 * 2_000  # at most linear growth
    assert {x.dtype for x in (*state.memory.weights, *state.memory.momentum)} == {torch.float32}


@covering(1, {"length": [2, 200], "variant": VARIANTS})
def test_gradients_are_finite_where_the_memory_is_extreme(variant, length):
    """Gradients are finite for extreme memories."""
    model = make_reckless(variant, 3, torch.float32).train()
    model(inputs_embeds=make_inputs("alternating", length, 16), labels=torch.ones(1, length).long()).loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
