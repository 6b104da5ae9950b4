"""`remember` inside of other people's programs: threads, trainers, PEFT, accelerate, torch.compile."""

import inspect

import pytest
import torch
from remember_models import TOKENS, close, remembering, small_model
from torch.testing import assert_close
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from titans_hf import MemoryCache, forget, remember


def test_a_call_changes_nothing_that_other_threads_read():
    """While a call computes, configuration and flags stay; an attention function sees its own name."""
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
    remember(model, 12)
    seen.clear()
    before = flags()
    model(TOKENS)
    assert len(seen) > 3 and all(x == ("watched", "remember_watched", before) for x in seen)
    assert forget(model).model.layers[0].gradient_checkpointing


def test_the_backbone_alone_is_not_the_model():
    """A trainer that calls backbone and head itself, as TRL's do, would train the model without its memory."""
    model = remembering()
    with pytest.raises(RuntimeError, match="LlamaModel was called without its memory"):
        model.base_model(TOKENS)
    forget(model).base_model(TOKENS)


def test_adapters_of_rows():
    """PEFT gives each row of a call an adapter; rows that are read apart would have another row's."""
    peft = pytest.importorskip("peft")
    model = remember(peft.get_peft_model(small_model(), peft.LoraConfig(target_modules=["q_proj"])).eval(), 12)
    model(TOKENS)
    with pytest.raises(ValueError, match="PEFT's `adapter_names` must be None"):
        model(TOKENS, adapter_names=["default", "__base__"] * 2)


def test_a_forward_of_the_instance():
    """torch.compile and accelerate put a forward on the model itself, and accelerate unwraps it again."""
    model, other = remembering(), small_model()
    expected, own = model(TOKENS).logits, other(TOKENS).logits
    assert inspect.unwrap(model.forward.__func__)(model, TOKENS, token_type_ids=TOKENS).logits.equal(expected)
    model.forward = model.forward
    assert forget(model)(TOKENS).logits.equal(own)
    other.forward = other.forward
    with pytest.raises(ValueError, match=r"`model\.forward` was replaced"):
        remember(other, 12)


def test_the_gradient_of_a_batch():
    """It is the sum of its texts' gradients, whatever the lengths, and the cache goes on as each text's own."""
    model, lengths = remembering(), torch.tensor([30, 7, 0, 41])
    cache = MemoryCache(model)
    mask = (torch.arange(41) < lengths[:, None]).long()

    def gradient(ids, mask, **arguments):
        model.zero_grad()
        output = model(ids, attention_mask=mask, output_hidden_states=True, **arguments)
        (output.logits * mask[..., None]).square().sum().backward()
        return torch.cat([x.grad.flatten() for x in model.parameters()]), output.hidden_states[-1]

    whole, states = gradient(TOKENS[:, :41], mask, cache=cache)
    alone = [gradient(TOKENS[i : i + 1, :n], mask[i : i + 1, :n]) for i, n in enumerate(lengths) if n]
    assert_close(whole, sum(x for x, _ in alone), atol=1e-9, rtol=1e-9)
    close(states[3:], alone[-1][1])
    assert cache.seen.equal(lengths)
    with torch.no_grad():
        read_on = model(TOKENS[:, 41:60], cache=cache).logits[3:]
        close(read_on, model(TOKENS[3:, :60]).logits[:, 41:])


def test_continuous_batching_is_refused():
    """The refusal advises a batch with padding, not another attention, which would not help."""
    with pytest.raises(NotImplementedError, match="padded batch"):
        remembering().generate_batch([[5, 6, 7]])
