"""`remember` inside of other people's programs: threads, trainers, PEFT, accelerate, torch.compile."""

import torch
from remember_models import small_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from titans_hf.remember import forget, remember

TOKENS = torch.randint(3, 53, (4, 90), generator=torch.Generator().manual_seed(7))


def test_a_call_changes_nothing_that_other_threads_read():
    """While a call computes, the configuration and all flags of the model are what they were before it; an attention
    function sees its own name, by which some functions look for their kernel.
    """
    model, seen = small_model(), []

    def flags():
        return [(x.training, getattr(x, "gradient_checkpointing", None)) for x in model.modules()]

    def watched(module, *args, **kwargs):
        seen.append((module.config._attn_implementation, model.config._attn_implementation, flags()))
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("watched", watched)
    AttentionMaskInterface.register("watched", sdpa_mask)
    model.set_attn_implementation("watched")
    model.train()
    model.activation_checkpointing_enable()
    remember(model, 12, ())
    seen.clear()
    before = flags()
    model(TOKENS)
    assert len(seen) > 3 and all(x == ("watched", "remember_watched", before) for x in seen)
    assert forget(model).model.layers[0].gradient_checkpointing
