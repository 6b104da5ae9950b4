"""The cache: its constant size, learning at every token, operations on its rows, and prompts after what was read."""

import copy

import pytest
import torch
from common import (
    ATTENTIONS,
    TWO_VARIANTS,
    VARIANTS,
    assert_same,
    full_logits,
    left_pad,
    make_ids,
    make_model,
    read,
    shared_model,
    tensors,
)
from covering import covering

from titans_hf import TitansCache


def storage_bytes(cache: TitansCache) -> int:
    """Returns the bytes of all storages that the cache's tensors refer to: a view keeps its whole storage allocated."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors(cache)}
    return sum(storages.values())


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_size_does_not_grow(variant):
    """The cache and the storages of its tensors have the same size after 200 and 2,000 tokens."""
    model = make_model(variant, dtype=torch.float32, memory_chunk_size=32, segment_length=32)
    short, long = (read(model, make_ids(1, length))[1] for length in (200, 2000))
    assert short.num_bytes == long.num_bytes == sum(x.numel() * x.element_size() for x in tensors(long)) > 10_000
    stepped = read(model, make_ids(1, 40), [1] * 40)[1]
    assert stepped.num_bytes == short.num_bytes
    assert storage_bytes(long) <= storage_bytes(short)
    assert storage_bytes(long) <= long.num_bytes


def test_a_window_holds_what_was_read():
    """The cache of a window has a key for every column read, 11 at most; where steps are compiled, always 11."""
    model = shared_model("mag")
    for compileable, expected in ((False, [5, 6, 11, 11]), (True, [11] * 4)):
        cache, found = TitansCache(model.config, compileable=compileable), []
        for length in (5, 1, 6, 30):
            read(model, make_ids(2, length), None, cache)
            found.append(cache.layers[-1].state.kv_cache.window.keys.shape[1])
        assert found == expected


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_size_is_per_row(variant):
    """The size of a cache is proportional to its rows."""
    model = shared_model(variant)
    assert read(model, make_ids(3, 9))[1].num_bytes == 3 * read(model, make_ids(1, 9))[1].num_bytes


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_every_token_is_learned(variant):
    """Every decoded token changes the weights and momentum of every head."""
    model, cache = shared_model(variant), TitansCache(shared_model(variant).config)
    read(model, make_ids(2, 9), None, cache)
    for token in make_ids(2, 10, seed=3).split(1, 1):
        before = [layer.state.memory for layer in cache.layers]
        read(model, token, None, cache)
        for old, layer in zip(before, cache.layers, strict=True):
            new = layer.state.memory
            for a, b in zip((*old.weights, *old.momentum), (*new.weights, *new.momentum), strict=True):
                assert ((a - b).abs().amax((2, 3)) > 1e-6).all()


@covering(1, {"variant": TWO_VARIANTS, "forget": [False, True]})
def test_nothing_is_learned_at_rate_zero(variant, forget):
    """With memory_max_lr = 0 the weights stay the initial ones and the momentum 0."""
    model = make_model(variant, memory_max_lr=0.0, memory_forget=forget)
    cache = TitansCache(model.config)
    for sizes in ([13], [1] * 5):
        read(model, make_ids(2, sum(sizes)), sizes, cache)
        for layer, decoder in zip(cache.layers, model.model.layers, strict=True):
            memory = layer.state.memory
            assert not any(x.any() for x in memory.momentum)
            for now, start in zip(memory.weights, decoder.mixer.memory.initial_weights.parameters(), strict=True):
                assert torch.equal(now, start.expand_as(now))


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_reset_forgets_everything(variant):
    """A cache that was reset gives the logits of a new one."""
    model, ids = shared_model(variant), make_ids(2, 21)
    cache = read(model, make_ids(2, 30, seed=8))[1]
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.num_bytes == 0 and not cache.is_initialized
    assert_same(read(model, ids, [5, 16], cache)[0], full_logits(model, ids))


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_offload_and_prefetch_keep_the_state(variant):
    """Offloading a cache and fetching it again keeps the logits."""
    model, ids = shared_model(variant), make_ids(2, 30)
    cache = read(model, ids[:, :17])[1]
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert_same(read(model, ids[:, 17:], None, cache)[0], full_logits(model, ids)[:, 17:])


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_lengths_count_columns(variant):
    """get_seq_length() and get_mask_sizes() count all columns that were read, in every layer."""
    model, cache = shared_model(variant), TitansCache(shared_model(variant).config)
    assert cache.get_seq_length() == 0 and len(cache) == 2 and not cache.is_initialized
    for sizes, total in (([7], 7), ([1, 1], 9), ([30], 39)):
        read(model, make_ids(2, sum(sizes)), sizes, cache)
        assert {cache.get_seq_length(layer) for layer in (0, 1)} == {total}
        assert cache.get_mask_sizes(3, 0) == (total + 3, 0)
    assert cache.get_max_length() == -1 and cache.is_initialized
    assert not cache.is_compileable and not any(cache.is_sliding)


def test_update_is_refused():
    """update() raises NotImplementedError."""
    with pytest.raises(NotImplementedError, match="TitansCache"):
        TitansCache(shared_model("mag").config).update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_state_is_float32_at_least(variant):
    """The memory's states are float32 or wider for every model dtype."""
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64,) * 2):
        cache = read(make_model(variant, dtype=dtype), make_ids(1, 20), [9, 1, 10])[1]
        for layer in cache.layers:
            memory = layer.state.memory
            parts = (*memory.weights, *memory.momentum, *memory.anchor, *layer.state.segment_weights)
            assert {x.dtype for x in parts} == {expected}


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_use_cache_makes_one(variant):
    """`use_cache` and `cache` decide which cache is returned, as in every Transformers model."""
    model, ids = shared_model(variant), make_ids(1, 9)
    with torch.no_grad():
        assert isinstance(model(ids).cache, TitansCache)  # config.use_cache
        assert model(ids, use_cache=False).cache is None
        cache = TitansCache(model.config)
        assert model(ids, cache=cache, use_cache=True).cache is cache


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_a_prompt_after_what_was_read(variant):
    """After start_prompt() generate() takes the prompt and its mask alone, padded or not."""
    model, ids, prompt = shared_model(variant), make_ids(2, 21), make_ids(2, 7, seed=1)
    options = dict(max_new_tokens=9, do_sample=False, pad_token_id=0)
    whole = model.generate(torch.cat([ids, prompt], dim=1), **options)
    cache = read(model, ids)[1]
    cache.start_prompt()
    mask = torch.ones_like(prompt)
    mask[1, :3] = 0
    assert torch.equal(model.generate(prompt, cache=copy.copy(cache), **options), whole[:, 21:])
    padded = model.generate(prompt, attention_mask=mask, cache=copy.copy(cache), **options)
    assert torch.equal(padded[0], whole[0, 21:])
    alone = model.generate(torch.cat([ids[1:], prompt[1:, 3:]], dim=1), **options)
    assert torch.equal(padded[1, 7:], alone[0, 25:])
    cache.activate_past_recording()
    with pytest.raises(RuntimeError, match=r"start_prompt\(\) cannot be undone"):
        cache.start_prompt()


@covering(2, {"variant": ATTENTIONS, "recording": [False, True], "where": ["layer", "head"]})
def test_a_call_that_fails_leaves_the_cache(variant, recording, where):
    """A call that is interrupted between two layers or in the LM head leaves the cache as it was."""
    model, ids = make_model(variant), make_ids(2, 21)
    cache = TitansCache(model.config)
    if recording:
        cache.activate_past_recording()
    read(model, ids[:, :13], cache=cache)
    before = {name: x for layer in cache.layers for name, x in layer.named_tensors().items()}

    def interrupt(*args):
        raise KeyboardInterrupt

    module = model.model.layers[1] if where == "layer" else model.lm_head
    hook = module.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        read(model, ids[:, 13:], cache=cache)
    hook.remove()
    after = {name: x for layer in cache.layers for name, x in layer.named_tensors().items()}
    assert all(after[name] is x for name, x in before.items()) and after.keys() == before.keys()
    assert_same(read(model, ids[:, 13:], cache=cache)[0], full_logits(model, ids)[:, 13:])


def test_weights_of_the_memory():
    """`memory_weights` gives what the memory holds, per layer; reading on leaves the returned tensors as they are."""
    model = make_model("mag", token_memory_features=24, tie_word_embeddings=True)
    cache = TitansCache(model.config)
    assert cache.memory_weights(1) == ()
    read(model, make_ids(2, 9), None, cache)
    weights = cache.memory_weights(1)
    assert cache.memory_weights(2)[0].shape == (2, 1, 24, 32)
    assert [x.shape[:2] for x in weights] == [(2, 4)] * model.config.memory_depth
    kept = [x.clone() for x in weights]
    read(model, make_ids(2, 1), None, cache)
    assert all(map(torch.equal, weights, kept)) and not torch.equal(cache.memory_weights(1)[0], kept[0])


def test_a_cache_is_printed():
    """`print(cache)` says tokens per row, bytes, and which memories there are."""
    model = make_model("mag", token_memory_features=24, tie_word_embeddings=True)
    cache = TitansCache(model.config)
    layers = "memories of 2 layers and the token memory"
    assert str(cache) == f"TitansCache: nothing read yet\n{layers}"
    ids, mask = left_pad([make_ids(19), make_ids(11)])
    model(ids, attention_mask=mask, cache=cache)
    size = sum(x.nbytes for x in tensors(cache))
    assert str(cache) == f"TitansCache: tokens read by 2 rows: 19, 11; {size:,} bytes\n{layers}"
    cache = TitansCache(model.config)
    cache.activate_past_recording()
    read(model, make_ids(9, 3), None, cache)
    cache.crop(-1)  # back to the columns before the first token
    assert "9 rows: 0, 0, 0, 0, 0, 0, 0, 0, ...;" in str(cache)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_the_cache_has_two_names():
    """`past_key_values`, its name before transformers 5.24, is the cache too: no call ignores it. Both are refused."""
    model, ids, options = shared_model("mag"), make_ids(1, 30), {"max_new_tokens": 4, "do_sample": False}
    cache = read(model, ids[:, :20])[1]
    with torch.no_grad():
        for call in (model, model.model):
            found = [call(ids[:, 20:], **{name: copy.copy(cache)}) for name in ("cache", "past_key_values")]
            assert torch.equal(found[0][0], found[1][0])
            assert isinstance(found[0].cache, TitansCache) and found[0].cache is found[0].past_key_values
    generated = [model.generate(ids, **{name: copy.copy(cache)}, **options) for name in ("cache", "past_key_values")]
    assert torch.equal(*generated) and torch.equal(generated[0], model.generate(ids, **options))
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="`past_key_values` must be None with `cache`"):
            call(ids[:, 20:], cache=cache, past_key_values=cache)


def test_a_cache_by_an_unknown_name_is_an_error():
    """A cache under a name that is not read, as after one more change of the name, raises an error: generation would
    otherwise be wrong without a word.
    """
    model, ids = shared_model("mag"), make_ids(1, 30)
    cache = read(model, ids[:, :20])[1]
    for call in (model, model.model, model.generate):
        with pytest.raises(ValueError, match="`kv_state` is a TitansCache, but a cache is only read as `cache`"):
            call(ids[:, 20:], kv_state=cache)


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_operations(variant):
    """Reordering, selecting and repeating rows of a cache gives the logits of rows read in that order."""
    model, ids, more = shared_model(variant), make_ids(3, 21), make_ids(5, 8, seed=1)
    index = torch.tensor([2, 0, 0])
    operations = {
        "reorder_cache": (lambda cache: cache.reorder_cache(index), [2, 0, 0]),
        "batch_select_indices": (lambda cache: cache.batch_select_indices(torch.tensor([1, 2])), [1, 2]),
        "batch_repeat_interleave": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    }
    for operation, rows in operations.values():
        cache = read(model, ids)[1]
        assert operation(cache) is None
        later = more[torch.arange(len(rows)) % 5]
        expected = full_logits(model, torch.cat([ids[rows], later], 1))[:, 21:]
        assert_same(read(model, later, [1, 7], cache)[0], expected)
    cache = read(model, ids)[1]
    cache.batch_select_indices(torch.tensor([True, False, True]))
    expected = full_logits(model, torch.cat([ids[[0, 2]], more[:2]], 1))[:, 21:]
    assert_same(read(model, more[:2], None, cache)[0], expected)
