"""A model with `remember` reads a text in one way, however the text is cut, batched, padded or continued."""

import copy
import pickle

import pytest
import torch
from remember_models import TOKENS, close, remembering, small_fast_weights, small_list, small_model
from remember_reference import mix_slowly, read_slowly
from test_titans import titans, with_memory
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    MixtralConfig,
    modeling_flash_attention_utils,
)
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from titans_hf.remember import MemoryCache, forget, reading, remember
from titans_hf.remember.token_list import TokenList


@pytest.fixture(scope="module")
def model():
    return remembering()


@torch.no_grad()
def whole(model, ids, **arguments):
    return model(ids, **arguments).logits


@pytest.mark.parametrize("length,start_rate", [(7, 0.5), (8, None), (9, 0.5), (41, 0.5), (41, None)])
def test_the_slow_reference(length, start_rate, monkeypatch):
    """Logits and fast weights are those of weights merged by hand, full keys under a mask, and loops over the list."""
    monkeypatch.setattr(reading, "SINK_TOKENS", 16)
    model, ids = small_model(), TOKENS[0, :length]
    fast, chosen = small_fast_weights(model, start_rate=start_rate), small_list()
    first = whole(model, ids[None, :7])
    own, weights = read_slowly(model, fast, 12, ids, first_token=1, sink_block=16)
    remember(model, 12, ("fast_weights",), fast_weights=fast)
    cache, inputs = MemoryCache(model), []
    with torch.no_grad():
        logits = model(ids[None], cache=cache).logits[0]
    close(logits, own)
    assert ((logits[:7] - first[0]).abs().max() < 1e-12) == (start_rate is not None)  # the start's share is learned
    for name, x in weights.items():
        close(cache.state[f"B.{name}"][0], x)
    forget(model)
    remember(model, 12, fast_weights=fast, token_list=chosen)
    keys = TokenList.keys
    monkeypatch.setattr(TokenList, "keys", lambda self, x: inputs.append(x[0]) or keys(self, x))
    close(whole(model, ids[None])[0], mix_slowly(chosen, ids, torch.cat(inputs), own))


def test_the_share_of_the_start_is_bounded():
    """A burst of large gradients leaves the share at one of its bounds."""
    model = small_model()
    fast = small_fast_weights(model, start_rate=1e6, max_gradient=1.0)
    cache = MemoryCache(remember(model, 12, ("fast_weights",), fast_weights=fast))
    whole(model, TOKENS, cache=cache)
    share = cache.state["start"].flatten()
    assert ((share == -1) | (share == 2)).all() and all(x.isfinite().all() for x in cache.state.values())


def test_a_chunk_is_read_whole_once(monkeypatch):
    """A call that ends a chunk computes the chunk's tokens in one pass, also those that were read before."""
    model, lengths = remembering(None), []
    forward = model.memory.forward
    model.memory.forward = lambda *args, **given: lengths.append(given["input_ids"].shape[1]) or forward(*args, **given)
    cache = MemoryCache(model)
    logits = [whole(model, ids, cache=cache) for ids in TOKENS[:1].split([5, 5, 7, 73], 1)]
    assert lengths == [5, 8, 2, 8, 1, *[8] * 9, 2]
    close(torch.cat(logits, 1), whole(model, TOKENS[:1]))


@pytest.mark.parametrize("window", [12, None])
def test_a_call_that_fails(window):
    """After an error in the middle of a call, of all rows or of some, the cache is as it was; no key is held twice."""
    model, is_shared = remembering(window), []
    cache, bad, mask = MemoryCache(model), TOKENS[:2, 20:40].clone(), torch.ones(2, 20, dtype=torch.int64)
    bad[0, 15], mask[1, 2] = 53, 0
    with torch.no_grad():
        model(TOKENS[:2, :20], cache=cache)
        layer = cache.layers[0]
        note = lambda *_: is_shared.append(layer.before.keys.data_ptr() == layer.keys.data_ptr())  # noqa: E731
        hook = model.lm_head.register_forward_pre_hook(note)
        with pytest.raises(IndexError):
            model(bad, cache=cache)
        hook.remove()
        with pytest.raises(IndexError):
            model(bad, attention_mask=mask, cache=cache)
        close(model(TOKENS[:2, 20:60], cache=cache).logits, whole(model, TOKENS[:2, :60])[:, 20:])
    assert all(is_shared) == (window is None) and all(x.before is None for x in cache.layers)


def test_what_does_not_fit(model):
    """A cache of another model, of other rows or of fewer tokens is an error, and so is a crop beyond its record."""
    cache, resized = MemoryCache(model), remembering()
    with torch.no_grad():
        with pytest.raises(ValueError, match="`MemoryCache"):
            model(TOKENS, cache=MemoryCache(resized))
        model(TOKENS[:2, :5], cache=cache)
        with pytest.raises(ValueError, match="the 2 rows of `cache`, got 4"):
            model(TOKENS[:, :5], cache=cache)
        with pytest.raises(ValueError, match="activate_past_recording"):
            cache.crop(-1)
        cache.activate_past_recording()
        model(TOKENS[:2, 9:20], cache=cache)
        with pytest.raises(ValueError, match="at least -11"):
            cache.crop(-12)
        cache = resized(TOKENS[:2, :5]).cache
        resized.resize_token_embeddings(60)
        with pytest.raises(ValueError, match="made for 53 tokens, and the model has 60"):
            resized(TOKENS[:2, :5], cache=cache)


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
    assert together[:1, :length].equal(by_itself) and batch.seen.tolist() == [length, 31]
    with torch.no_grad():
        model.set_memory_learning(False)  # as for the tokens of `generate()`
        model(by_itself[:, -1:], cache=alone)
        model.set_memory_learning(True)
        close(model(TOKENS[:2, 20:60], cache=batch).logits[:1], model(TOKENS[:1, 20:60], cache=alone).logits)


def test_columns_of_prompt_lookup():
    """Columns that assisted generation takes back cost no second reading of the whole prompt at each step."""
    model, columns = remembering(None, ("list",)), []
    own = model.memory.forward
    model.memory.forward = lambda *args, **given: columns.append(given["input_ids"].shape[1]) or own(*args, **given)
    settings = {"max_new_tokens": 30, "do_sample": False}
    made = model.generate(TOKENS[:1], prompt_lookup_num_tokens=4, **settings)
    assert sum(columns) < 5 * 90
    assert made.equal(model.generate(TOKENS[:1], **settings))


def test_own_samples_are_not_learned():
    """The fast weights learn the prompt alone, or with learn_from="all" the samples too."""
    weights = {}
    for learn_from in ("read", "all"):
        model = remembering()
        model.memory.learn_from = learn_from
        caches = cache, prompt, everything = [MemoryCache(model) for _ in range(3)]
        made = model.generate(TOKENS[:1, :20], cache=cache, max_new_tokens=40, do_sample=False)
        cache.read_unread(model)
        whole(model, TOKENS[:1, :20], cache=prompt)
        whole(model, made[:, :-1], cache=everything)
        weights[learn_from] = [next(iter(x.state.values())) for x in caches]
        entries = [int((x.state["list.tokens"] >= 0).sum()) for x in caches]
        assert entries[0] == entries[1 if learn_from == "read" else 2]
    close(weights["all"][0], weights["all"][2])
    # The chunk that the prompt has begun is learned as far as the prompt goes: 3 of its 8 labels.
    assert not weights["read"][0].equal(weights["read"][1])
    assert not weights["read"][0].equal(weights["read"][2])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_original_up_to_the_window(attention):
    """Up to the window, a model whose memory is off or not there is the original to the bit; so is one forgotten."""
    for memory in ((), ("fast_weights", "list")):
        model = small_model(attn_implementation=attention)
        before = whole(model, TOKENS[:, :40])
        fast = small_fast_weights(model)
        remember(model, 40, memory, fast_weights=fast, token_list=small_list())
        model.set_memory_learning(False)
        assert whole(model, TOKENS[:, :40]).equal(before)
        assert not whole(model, TOKENS[:, :60])[:, 45:].equal(before)
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
    memory = ("fast_weights", "list") if kernel == "flash_stand_in" else ("list",)  # Flex has no backward on a CPU
    expected, model = whole(remembering(40, memory), TOKENS), small_model(attn_implementation=kernel)
    with torch.compiler.set_stance("force_eager"):
        before = whole(model, TOKENS[:, :40])
        remember(model, 40, memory, fast_weights=small_fast_weights(model), token_list=small_list())
        close(whole(model, TOKENS), expected, atol=1e-10)
        mask = torch.ones_like(TOKENS)
        mask[0, :5] = 0
        close(whole(model, TOKENS, attention_mask=mask)[1:], expected[1:], atol=1e-10)
        remember(forget(model), 40, ())
        assert whole(model, TOKENS[:, :40]).equal(before)
        assert whole(forget(model), TOKENS[:, :40]).equal(before)


@pytest.mark.parametrize("make", [remembering, lambda: with_memory(titans(variant="mag"))])
def test_memory_off_writes_nothing(make):
    """With learning off the state of the memory stays. That it is not learned later is in test_operations.py."""
    model, mask = make(), torch.ones(2, 30, dtype=torch.int64)
    cache = MemoryCache(model)
    mask[1, :3] = 0
    whole(model, TOKENS[:2, :30], cache=cache, attention_mask=mask)
    before = {name: x for name, x in cache.state.items() if name[0] in "BS" or "tokens" in name}
    model.set_memory_learning(False)
    whole(model, TOKENS[:2, 30:61], cache=cache)
    assert all(cache.state[name].equal(x) for name, x in before.items())


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
    """The memory learns under inference_mode, gradient checkpointing and autocast, and in bfloat16."""
    model = remembering()
    expected = whole(model, TOKENS[:2])
    if mode == "bfloat16":
        model = forget(model).bfloat16()
        remember(model, 12, fast_weights=small_fast_weights(model), token_list=small_list())
    if mode == "checkpointing":
        model.gradient_checkpointing_enable()
        model.train()
    context = {"inference_mode": torch.inference_mode(), "autocast": torch.autocast("cpu", torch.bfloat16)}
    with context.get(mode, torch.enable_grad()):
        cache = MemoryCache(model)
        logits = torch.cat([model(x, cache=cache).logits for x in TOKENS[:2].split([9, 1, 40, 40], 1)], 1)
    assert all(x.isfinite().all() for x in cache.state.values())
    if mode in ("inference_mode", "checkpointing"):
        close(logits, expected)
    else:
        assert cache.state["B.model.layers.1.mlp.up_proj"].dtype != torch.bfloat16
        agree = (logits[:, :16].argmax(-1) == expected[:, :16].argmax(-1)).double().mean()
        assert agree > 0.8


def test_copies():
    """A copied or pickled model learns by itself, and forgets; a deep copy of a cache goes its own way."""
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
    """Of a prompt whose last logits alone are wanted, the head sees no other column, or those of a piece at most."""
    for memory in ((), ("list",)):
        model, columns = remembering(None, memory), []
        model.lm_head.register_forward_pre_hook(lambda _, args, columns=columns: columns.append(args[0].shape[1]))
        prompt = TOKENS.flatten()[None].repeat(1, 4)
        expected = whole(model, prompt)[:, -2:]
        columns.clear()
        close(whole(model, prompt, logits_to_keep=2), expected)
        assert max(columns) == (2 if memory == () else reading.TOKENS_OF_A_PIECE)


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
        remember(model, 40, ())
        after = model(**inputs)
    assert_close([after.loss, after.aux_loss], [before.loss, before.aux_loss])
    for x, y in zip(after.router_logits, before.router_logits, strict=True):
        assert_close(x[mask.flatten() > 0], y[mask.flatten() > 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 1}, "`window` must be None or a whole number of at least 2, got 1"),
        ({"memory": ("lists",)}, "`memory` may hold 'passages', 'fast_weights', 'list', got"),
        ({"learn_from": "x"}, "`learn_from` must be"),
        ({"first_token": 53}, "`first_token` must be a token of the model, 0 to 52, got 53"),
    ],
)
def test_bad_arguments(arguments, message):
    """A bad argument is an error that names it, and leaves the model as it was."""
    model = small_model()
    with pytest.raises(ValueError, match=message):
        remember(model, **arguments)
    assert not hasattr(model, "memory") and model.config._attn_implementation == "sdpa"
