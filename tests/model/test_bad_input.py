"""Bad input: a ValueError that names the argument, before anything has changed."""

import copy
import functools
import itertools

import pytest
import torch
from common import (
    SIZES,
    TWO_VARIANTS,
    VARIANTS,
    assert_same,
    full_logits,
    make_ids,
    make_model,
    read,
    shared_model,
    tensors,
)
from covering import covering, in_one_test
from transformers import DynamicCache

from titans_hf import TitansCache

IDS = make_ids(2, 6, seed=3)


@functools.cache
def nine_tokens_read(model) -> TitansCache:
    return read(model, make_ids(2, 9))[1]


def refuse(model, name: str, cache: TitansCache | None = None, **arguments) -> None:
    """Asserts that the call raises a ValueError that matches `name` and leaves the cache as it was."""
    if cache is None:
        cache = copy.deepcopy(nine_tokens_read(model))
    kept = copy.deepcopy(tensors(cache)) if isinstance(cache, TitansCache) else None
    columns = cache.get_seq_length()
    with pytest.raises(ValueError, match=name), torch.no_grad():
        model(cache=cache, **arguments)
    assert cache.get_seq_length() == columns
    if kept is not None:
        assert len(kept) == len(tensors(cache))
        assert all(torch.equal(a, b) for a, b in zip(kept, tensors(cache), strict=True))


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_refused_calls_leave_the_cache_alone(variant):
    """After refused calls a cache gives the same logits as without them."""
    model, ids = shared_model(variant), make_ids(2, 15)
    cache = read(model, ids[:, :9])[1]
    for arguments in (
        dict(input_ids=IDS + 50),
        dict(input_ids=IDS, attention_mask=torch.ones(2, 7)),
        dict(input_ids=IDS[:1]),
        dict(input_ids=IDS[:, :0]),
    ):
        with pytest.raises((ValueError, IndexError)), torch.no_grad():  # an IndexError of PyTorch for unknown ids
            model(cache=cache, **arguments)
    assert_same(read(model, ids[:, 9:], None, cache)[0], full_logits(model, ids)[:, 9:])


def test_a_call_that_fails_behind_the_model_is_undone():
    """Labels that do not fit fail behind the model and leave the cache as it was, call after call."""
    for _ in range(2):
        refuse(shared_model("mag"), "batch_size", input_ids=IDS, labels=IDS[:, :3])


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_tokens(variant):
    """Inputs of length 0 raise an error that names the argument."""
    model = shared_model(variant)
    refuse(model, "input_ids", input_ids=IDS[:, :0])
    refuse(model, "inputs_embeds", inputs_embeds=torch.zeros(2, 0, 32, dtype=torch.float64))


@covering(
    1,
    {
        "variant": VARIANTS,
        "shape": [(2, 5), (2, 7), (2, 14), (2, 16), (1, 6), (3, 6), (2, 1, 6, 15), (2, 1, 6, 6), (6,)],
    },
)
def test_masks_of_the_wrong_shape(variant, shape):
    """Masks other than (2, 6) or (2, 9 + 6) raise an error."""
    refuse(shared_model(variant), "attention_mask", input_ids=IDS, attention_mask=torch.ones(shape))


@in_one_test("value", [float("-inf"), float("nan"), 0.5, -1.0, 2, -1])
def test_masks_of_other_values(value):
    """A mask has 1 at tokens and 0 at padding. An additive mask would exchange tokens and padding."""
    for at in (0, 5):
        mask = torch.ones(2, 6, dtype=torch.tensor(value).dtype)
        mask[1, at] = value
        refuse(shared_model("mag"), "`attention_mask` must be 1 at tokens", input_ids=IDS, attention_mask=mask)
    for at in (0, 8, 9):  # of nine columns read before, and of the new one
        mask = torch.ones(2, 10, dtype=torch.tensor(value).dtype)
        mask[1, at] = value
        refuse(shared_model("mag"), "`attention_mask` must be 1 at tokens", input_ids=IDS[:, :1], attention_mask=mask)
    nothing_masked = torch.zeros(2, 6)
    refuse(shared_model("mag"), "not additive", input_ids=IDS, attention_mask=nothing_masked)


@pytest.mark.parametrize("variant", VARIANTS)
def test_inputs_of_other_shapes_and_dtypes(variant):
    """Ids must be (B, T) and embeddings (B, T, hidden), with at least one row: some other shapes would be computed."""
    model = shared_model(variant)
    for ids in (IDS[0], IDS[None], IDS[:0]):
        refuse(model, r"`input_ids` must be \(B, T\) with at least one row and one column, but is", input_ids=ids)
    for shape in ((2, 6), (0, 6, 32)):
        embeds = torch.zeros(shape, dtype=torch.float64)
        refuse(
            model,
            r"`inputs_embeds` must be \(B, T, hidden\) with at least one row and one column, but is",
            inputs_embeds=embeds,
        )
    with pytest.raises(
        ValueError, match=r"`input_ids` must be \(B, T\) with at least one row and one column, but is \(6,\)"
    ):
        model.generate(IDS[0], max_new_tokens=2, pad_token_id=0)
    for options in ({}, dict(prompt_lookup_num_tokens=2)):
        with pytest.raises(ValueError, match=r"`input_ids` must be \(B, T\) with at least one row"):
            model.generate(IDS[:0], max_new_tokens=2, pad_token_id=0, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_or_neither_input(variant):
    """Exactly one of `input_ids` and `inputs_embeds` is required."""
    model = shared_model(variant)
    embeds = model.model.embed_tokens(IDS)
    for arguments in (dict(input_ids=IDS, inputs_embeds=embeds), {}):
        refuse(model, "input_ids", **arguments)
        refuse(model, "inputs_embeds", **arguments)


@covering(
    1,
    {
        "variant": VARIANTS,
        "argument,value": [
            ("position_ids", [[5, 4, 3, 2, 1, 0]] * 2),
            ("position_ids", [[0, 1, 2, 2, 3, 4]] * 2),
            ("position_ids", [[0, 1, 2]] * 2),
            ("position_ids", [0, 1, 2, 3, 4, 5]),
            ("position_ids", [[[0, 1, 2, 3, 4, 5]] * 2] * 3),
            ("seq_idx", [[0, 0, 1]] * 2),
            ("cu_seq_lens_q", [0, 3, 6]),  # two rows
        ],
    },
)
def test_documents_that_make_no_sense(variant, argument, value):
    """Inconsistent `position_ids`, `seq_idx` and `cu_seq_lens_q` raise an error."""
    refuse(shared_model(variant), argument, input_ids=IDS, **{argument: torch.tensor(value)})


@in_one_test("value", [[], [[0, 6]], [0, 3], [1, 6], [0, 4, 3, 6], [0, 3, 7]])
def test_cumulative_lengths_that_make_no_sense(value):
    """`cu_seq_lens_q` must rise from 0 to the length of the row."""
    refuse_row = dict(input_ids=IDS[:1], cu_seq_lens_q=torch.tensor(value, dtype=torch.int32))
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        shared_model("mag")(**refuse_row)


def test_cache_of_a_checkpoints_own_code():
    """A TitansCache of the package is told from one of the code that a checkpoint brought, and what to do is said. Both
    classes have the same name.
    """
    other = type("TitansCache", (DynamicCache,), {"__module__": "transformers_modules.x"})()
    with pytest.raises(
        ValueError, match=r"but is a TitansCache of transformers_modules\.x: `model\.cache_class` is the class"
    ):
        shared_model("mag")(IDS, cache=other)
    with pytest.raises(ValueError, match=r"`cache` must be a TitansCache of titans_hf\."):
        shared_model("mag").start_from(other)
    with pytest.raises(ValueError, match=r"`other` must be a TitansCache of titans_hf\."):
        TitansCache(shared_model("mag").config).merge(other)


@covering(1, {"variant": TWO_VARIANTS, "batch_size": [1, 3]})
def test_cache_of_another_batch_size(variant, batch_size):
    """A cache of another batch size raises an error."""
    refuse(shared_model(variant), "`cache`", input_ids=make_ids(batch_size, 4))
    refuse(shared_model(variant), "`cache`", input_ids=make_ids(batch_size, 1))


@in_one_test("variant,other", list(itertools.combinations(VARIANTS, 2)))
def test_cache_of_another_variant(variant, other):
    """A cache of another variant, read or reset, raises an error."""
    cache = read(make_model(other), make_ids(2, 9))[1]
    refuse(shared_model(variant), "`cache`", cache, input_ids=IDS)
    cache.reset()
    refuse(shared_model(variant), "`cache`", cache, input_ids=IDS)


SIZES_THAT_SHOW = dict(
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=1,
    head_dim=12,
    sliding_window=11,
    segment_length=12,
    num_persistent_tokens=2,
    memory_depth=3,
    memory_expansion=3,
    memory_num_heads=2,
    memory_conv_kernel=3,
    memory_chunk_size=8,
)
# Each with a variant that has it.
OTHER_SIZES = [
    ("mac" if name == "segment_length" else "mag" if name == "sliding_window" else variant, name)
    for name, variant in zip(SIZES_THAT_SHOW, itertools.cycle(("mac", "mag", "mal")))
] + [("lmm", "memory_num_heads"), ("lmm", "memory_chunk_size")]


@covering(1, {"variant,name": OTHER_SIZES, "swap": [False, True]})
def test_cache_of_a_model_of_other_sizes(variant, name, swap):
    """A cache of a model that differs in one size raises an error."""
    changes = {name: SIZES_THAT_SHOW[name]}
    if name == "num_attention_heads":
        changes |= dict(head_dim=4, num_key_value_heads=4)
    if name == "segment_length":
        changes |= dict(memory_chunk_size=SIZES["memory_chunk_size"])
    models = [shared_model(variant, num_hidden_layers=1), make_model(variant, **{"num_hidden_layers": 1, **changes})]
    source, target = models[::-1] if swap else models
    cache = read(source, make_ids(2, 9))[1]
    refuse(target, "`cache`", cache, input_ids=IDS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_cache_of_another_kind(variant):
    """A cache of another class raises an error that names `cache`."""
    model = shared_model(variant)
    cache = DynamicCache()
    refuse(model, "`cache`", cache, input_ids=IDS)
    with pytest.raises(ValueError, match="`cache`"):
        model(IDS, cache=((torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8)),) * 2)
    with pytest.raises(ValueError, match="`cache`"):
        model.generate(IDS, cache=DynamicCache(), max_new_tokens=2, pad_token_id=0)
