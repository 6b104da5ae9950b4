"""Small models with `remember`, in float64."""

import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaConfig

from titans_hf import Passages, remember

TOKENS = torch.randint(3, 53, (4, 90), generator=torch.Generator().manual_seed(7))
SETTINGS = Passages(block=2, before=3, after=11, query=8, again=8, every=6)


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


def remembering(window=12, passages=SETTINGS, **fields):
    return remember(small_model(**fields), window, passages=passages)
