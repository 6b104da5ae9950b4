"""Small models with `remember`, in float64."""

import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaConfig

from titans_hf.remember import remember
from titans_hf.remember.fast_weights import random_fast_weights
from titans_hf.remember.passages import Passages
from titans_hf.remember.token_list import TokenList

TOKENS = torch.randint(3, 53, (4, 90), generator=torch.Generator().manual_seed(7))
SETTINGS = Passages(block=2, before=3, after=11, query=8, every=6, copies=3)
KINDS = ("v_proj", "o_proj", "up_proj", "gate_proj", "down_proj")


def close(a, b, atol=1e-12):
    assert_close(a, b, atol=atol, rtol=0)


def small_config(**fields) -> LlamaConfig:
    base = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    base |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1}
    return LlamaConfig(**(base | {"eos_token_id": None, "max_position_embeddings": 4096} | fields))


def small_model(**fields):
    """A Llama of float64 whose weights are large enough that window and memory matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(**fields)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.add_(0.15 * torch.randn_like(p))
    return model


def small_fast_weights(model, **step):
    fast = random_fast_weights(model, (1, 2), rank=3, rate=0.5)
    generator = torch.Generator().manual_seed(3)
    fast.start = {name: torch.randn(out, 3, generator=generator) / 20 for name, out in fast.outputs.items()}
    step = {"chunk": 8, "max_gradient": None, "start_rate": 0.5} | step
    for name, value in step.items():
        setattr(fast.step, name, value)
    return fast


def small_list(**fields):
    """A list that is trusted: without a fit it would hardly change a logit."""
    chosen = TokenList.random(32, 8, **({"entries": 20, "threshold": 1.0} | fields))
    torch.manual_seed(1)
    numbers = {
        "gate_bias": torch.tensor([-1.0]),
        "gate_weight": torch.randn(5) * 0.3,
        "entry_weight": torch.tensor([9.0, *[1.0] * 4]),
    }
    chosen.read_out = chosen.read_out._replace(**numbers)
    return chosen


def remembering(window=12, memory=("fast_weights", "list"), **fields):
    model = small_model(**fields)
    parts = {"passages": SETTINGS, "fast_weights": small_fast_weights(model), "token_list": small_list()}
    return remember(model, window, memory, **parts)
