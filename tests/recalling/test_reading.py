"""A model with `remember` reads a text in one way, however the text is cut, batched, padded or continued."""

import copy
import pickle

import pytest
import torch
from remember_models import SETTINGS, TOKENS, close, remembering, small_model
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    MixtralConfig,
    modeling_flash_attention_utils,
)
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from titans_hf import MemoryCache, forget, remember
from titans_hf.recalling import reading


@pytest.fixture(scope="module")
def model():
    return remembering()


@torch.no_grad()
def whole(model, ids, **arguments):
    return model(ids, **arguments).logits


@pytest.mark.parametrize("window", [9, 40])
def test_the_slow_reference(window, monkeypatch):
    """Logits are those of one call over sinks and text with a 4-D mask: each token has the sink of its block."""
    monkeypatch.setattr(reading, "SINK_TOKENS", 16)
    model, ids, cache = small_model(), TOKENS[0], DynamicCache()
    blocks = [max(0, x - window) for x in range(0, 90, 16)]
    for block in blocks:
        sink = DynamicCache()
        whole(model, torch.tensor([[1]]), position_ids=torch.tensor([[block]]), cache=sink)
        for layer, x in enumerate(sink.layers):
            cache.update(x.keys, x.values, layer)
    query, key = torch.arange(90)[:, None], torch.arange(90)
    of_block = torch.nn.functional.one_hot(query[:, 0] // 16, len(blocks)).bool() & (query >= window)
    allowed = torch.cat([of_block, (key <= query) & (query - key < window)], 1)
    mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)[None, None]
    expected = whole(model, ids[None], attention_mask=mask, position_ids=query.T, cache=cache)
    close(whole(remember(model, window), ids[None]), expected)


def test_a_call_that_fails():
    """After an error in the middle of a call, of all rows or of some, the cache is as it was."""
    model = remembering()
    cache, bad, mask = MemoryCache(model), TOKENS[:2, 20:40].clone(), torch.ones(2, 20, dtype=torch.int64)
    bad[0, 15], mask[1, 2] = 53, 0
    with torch.no_grad():
        model(TOKENS[:2, :20], cache=cache)
        with pytest.raises(IndexError):
            model(bad, cache=cache)
        with pytest.raises(IndexError):
            model(bad, attention_mask=mask, cache=cache)
        close(model(TOKENS[:2, 20:60], cache=cache).logits, whole(model, TOKENS[:2, :60])[:, 20:])


def test_what_does_not_fit(model):
    """A cache of another model, of other rows or of fewer tokens is an error, and so is a crop beyond its record."""
    cache, other = MemoryCache(model), remembering()
    with torch.no_grad():
        with pytest.raises(ValueError, match="`MemoryCache"):
            model(TOKENS, cache=MemoryCache(other))
        model(TOKENS[:2, :5], cache=cache)
        with pytest.raises(ValueError, match="the 2 rows of `cache`, got 4"):
            model(TOKENS[:, :5], cache=cache)
        with pytest.raises(ValueError, match="activate_past_recording"):
            cache.crop(-1)
        cache.activate_past_recording()
        model(TOKENS[:2, 9:20], cache=cache)
        with pytest.raises(ValueError, match="at least -11"):
            cache.crop(-12)


def test_generation(model):
    """`generate()` in every mode is that of a row alone, also with ids that go on after what the cache has read."""
    settings = {"max_new_tokens": 20, "do_sample": False}
    ids, mask = TOKENS[:2, :30].clone(), torch.ones(2, 30, dtype=torch.int64)
    ids[0, :5], mask[0, :5] = 0, 0
    batch = model.generate(ids, attention_mask=mask, **settings)
    assert batch[0, 30:].equal(model.generate(ids[:1, 5:], **settings)[0, 25:])
    pair = model.generate(ids, attention_mask=mask, num_beams=3, **settings)
    assert pair[1].equal(model.generate(ids[1:], num_beams=3, **settings)[0])
    for begin in (0, 13):
        whole(model, ids[1:, :13], cache=(cache := MemoryCache(model)))
        if begin:
            cache.start_prompt()
        assert model.generate(ids[1:, begin:], cache=cache, **settings).equal(batch[1:, begin:])
    assert model.generate(ids[1:], assistant_model=small_model(), **settings).equal(batch[1:])


@pytest.mark.parametrize("given", ["mask", "no mask"])
def test_rows_that_end_early(model, given):
    """A row that ends before the others of its batch reads its end token, and no padding."""
    ids = TOKENS[:2, :20]
    made = model.generate(ids, max_new_tokens=12, do_sample=False)[:, 20:].tolist()
    ends = next(x for x in made[0] if x not in made[1])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    batch, alone = MemoryCache(model), MemoryCache(model)
    masks = {"attention_mask": torch.ones_like(ids)} if given == "mask" else {}
    together = model.generate(ids, cache=batch, **masks, **options)
    by_itself = model.generate(ids[:1], cache=alone, **options)
    length = by_itself.shape[1]
    assert together[:1, :length].equal(by_itself) and batch.num_tokens_seen.tolist() == [length, 31]
    with torch.no_grad():
        model(by_itself[:, -1:], cache=alone)
        close(model(TOKENS[:2, 20:60], cache=batch).logits[:1], model(TOKENS[:1, 20:60], cache=alone).logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_original_up_to_the_window(attention):
    """Up to the window, a model with a memory is the original to the bit; so is one forgotten."""
    model = small_model(attn_implementation=attention)
    before = whole(model, TOKENS[:, :40])
    remember(model, 40)
    assert whole(model, TOKENS[:, :40]).equal(before)
    assert not torch.allclose(whole(model, TOKENS[:, :60])[:, 45:], whole(small_model(), TOKENS[:, :60])[:, 45:])
    assert whole(forget(model), TOKENS[:, :40]).equal(before)
    assert model.config._attn_implementation == attention


def test_another_attention():
    """A model with a memory can be given the other attention, which stays when the memory is taken."""
    model = remembering()
    expected = whole(model, TOKENS)
    model.set_attn_implementation("eager")
    close(whole(model, TOKENS), expected, atol=1e-4)  # eager attention has a softmax in float32
    with pytest.raises(ValueError, match='"unknown"'):
        model.set_attn_implementation("unknown")
    close(whole(model, TOKENS), expected, atol=1e-4)
    assert forget(model).config._attn_implementation == "eager"


def flash_stand_in(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    """FlashAttention as its callers know it: q, k, v (B, T, H, D), causal from the right, and no mask."""
    assert causal and window_size == (-1, -1)
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("kernel", ["flash_stand_in", "flex_attention"])
def test_kernels_without_a_mask(kernel, monkeypatch):
    """With FlashAttention or FlexAttention, a model is its own up to the window, and one softmax beyond it."""
    AttentionInterface.register("flash_stand_in", flash_attention_forward)
    AttentionMaskInterface.register("flash_stand_in", flash_attention_mask)
    imports = {"flash_stand_in": (flash_stand_in, flash_stand_in, None, None, None)}
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda name, *args, **_: imports[name])
    expected, model = whole(remembering(40), TOKENS), small_model(attn_implementation=kernel)
    with torch.compiler.set_stance("force_eager"):
        before = whole(model, TOKENS[:, :40])
        remember(model, 40)
        close(whole(model, TOKENS), expected, atol=1e-10)
        mask = torch.ones_like(TOKENS)
        mask[0, :5] = 0
        close(whole(model, TOKENS, attention_mask=mask)[1:], expected[1:], atol=1e-10)
        remember(forget(model), 40, passages=None)
        assert whole(model, TOKENS[:, :40]).equal(before)
        assert whole(forget(model), TOKENS[:, :40]).equal(before)


def test_loss_logits_and_hidden_states(model):
    """`labels`, `logits_to_keep`, `output_hidden_states` and `return_dict` are those of other models."""
    with torch.no_grad():
        output = model(TOKENS, labels=TOKENS, output_hidden_states=True)
        expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
        assert_close(output.loss, expected.float())  # of float32 logits, as in Transformers
        assert [x.shape for x in output.hidden_states] == [(4, 90, 32)] * 4
        mask = torch.ones(4, 90, dtype=torch.int64)
        mask[:, 80:] = 0
        states = model(TOKENS, attention_mask=mask, output_hidden_states=True).hidden_states
        close(torch.stack(states)[:, :, :80], torch.stack(output.hidden_states)[:, :, :80])
        assert states[0].shape == (4, 90, 32) and not states[0][:, 80:].any()
        close(model(TOKENS, logits_to_keep=3).logits, output.logits[:, -3:])
        close(model(TOKENS, return_dict=False)[0], output.logits)


@pytest.mark.parametrize("mode", ["inference_mode", "checkpointing", "autocast", "bfloat16"])
def test_modes(mode):
    """A model reads and recalls under inference_mode, gradient checkpointing and autocast, and in bfloat16."""
    model = remembering()
    expected = whole(model, TOKENS[:2])
    if mode == "bfloat16":
        model = remember(forget(model).bfloat16(), 12, passages=SETTINGS)
    if mode == "checkpointing":
        model.gradient_checkpointing_enable()
        model.train()
    context = {"inference_mode": torch.inference_mode(), "autocast": torch.autocast("cpu", torch.bfloat16)}
    with context.get(mode, torch.enable_grad()):
        cache = MemoryCache(model)
        logits = torch.cat([model(x, cache=cache).logits for x in TOKENS[:2].split([9, 1, 40, 40], 1)], 1)
        after = model(TOKENS[:2, :5], cache=cache, recall=True).logits
    assert after.isfinite().all() and all(cache.recalled)
    if mode in ("inference_mode", "checkpointing"):
        close(logits, expected)
    else:
        agree = (logits[:, :16].argmax(-1) == expected[:, :16].argmax(-1)).double().mean()
        assert agree > 0.8


def test_copies():
    """A copied or pickled model reads by itself, and forgets; a deep copy of a cache goes its own way."""
    model = remembering()  # of its own: Transformers' hooks of a model that returned hidden states cannot be pickled
    expected = whole(model, TOKENS[:1, :50])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        cache = MemoryCache(other)
        with torch.no_grad():
            other(TOKENS[:1, :30], cache=cache)
            close(other(TOKENS[:1, 30:50], cache=copy.deepcopy(cache)).logits, expected[:, 30:])
            close(other(TOKENS[:1, 30:50], cache=cache).logits, expected[:, 30:])
        assert not any(x._forward_hooks or x._forward_pre_hooks for x in forget(other).modules())
    close(whole(model, TOKENS[:1, :50]), expected)


def test_logits_that_are_not_kept():
    """Of a prompt whose last logits alone are wanted, the head sees no other column."""
    model, columns = remembering(), []
    model.lm_head.register_forward_pre_hook(lambda _, args: columns.append(args[0].shape[1]))
    prompt = TOKENS.flatten()[None].repeat(1, 4)
    expected = whole(model, prompt)[:, -2:]
    columns.clear()
    close(whole(model, prompt, logits_to_keep=2), expected)
    assert max(columns) == 2


def test_auxiliary_loss():
    """A mixture of experts has the loss, auxiliary loss and router logits that it has without a memory."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, output_router_logits=True)
    model, mask = AutoModelForCausalLM.from_config(config).eval(), torch.ones(2, 40, dtype=torch.int64)
    mask[0, 35:] = 0
    ids = TOKENS[:2, :40]
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    with torch.no_grad():
        before = model(**inputs)
        remember(model, 40)
        after = model(**inputs)
    assert_close([after.loss, after.aux_loss], [before.loss, before.aux_loss])
    for x, y in zip(after.router_logits, before.router_logits, strict=True):
        assert_close(x[mask.flatten() > 0], y[mask.flatten() > 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 1}, "`window` must be a whole number of at least 2, got 1"),
        ({"window": None}, "got None. Without a window all text stays in sight: use the model itself"),
        ({"passages": ("passages",)}, "`passages` must be a `Passages`, or None for the window alone"),
        ({"first_token": 53}, "`first_token` must be a token of the model, 0 to 52, got 53"),
    ],
)
def test_bad_arguments(arguments, message):
    """A bad argument is an error that names it, and leaves the model as it was."""
    model = small_model()
    with pytest.raises(ValueError, match=message):
        remember(model, **arguments)
    assert not hasattr(model, "memory") and model.config._attn_implementation == "sdpa"
