"""Bad input: a ValueError that names the argument, before anything has changed."""

import copy
import functools
import itertools

import pytest
import torch
from common import VARIANTS, assert_same, make_ids, make_model, read, shared_model, tensors
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
        assert_same(tensors(cache), kept, 0)


@in_one_test("value", [float("-inf"), float("nan"), 0.5, -1.0, 2, -1])
def test_masks_of_other_values(value):
    """A mask has 1 at tokens and 0 at padding. An additive mask would exchange tokens and padding."""
    message = "`attention_mask` must be 1 at tokens"
    # The whole mask; and of ten columns, nine read before and the new one.
    for width, at in ((6, 0), (6, 5), (10, 0), (10, 8), (10, 9)):
        mask = torch.ones(2, width, dtype=torch.tensor(value).dtype)
        mask[1, at] = value
        refuse(shared_model("mag"), message, input_ids=IDS[:, : 6 if width == 6 else 1], attention_mask=mask)
    refuse(shared_model("mag"), "not additive", input_ids=IDS, attention_mask=torch.zeros(2, 6))  # masks nothing


SHAPING = {"memory_depth": 3, "memory_expansion": 3, "memory_num_heads": 2, "memory_conv_kernel": 3}
SHAPING |= {"memory_chunk_size": 8, "num_persistent_tokens": 2}
NOT_IDS = r"`input_ids` must be \(B, T\) with at least one row and one column, but is"
NOT_EMBEDDINGS = r"`inputs_embeds` must be \(B, T, hidden\) with at least one row and one column, but is"
EMBEDDINGS = torch.zeros(2, 6, 32, dtype=torch.float64)


@in_one_test(
    "message,arguments",
    [
        *((NOT_IDS, dict(input_ids=x)) for x in (IDS[0], IDS[None], IDS[:0], IDS[:, :0])),
        *((NOT_EMBEDDINGS, dict(inputs_embeds=x)) for x in (EMBEDDINGS[0], EMBEDDINGS[:0], EMBEDDINGS[:, :0])),
        ("`input_ids` and `inputs_embeds`", dict(input_ids=IDS, inputs_embeds=EMBEDDINGS)),
        ("`input_ids` and `inputs_embeds`", {}),
        ("`cache`", dict(input_ids=make_ids(1, 4))),
        ("`cache`", dict(input_ids=make_ids(3, 1))),
        *(
            ("attention_mask", dict(attention_mask=torch.ones(shape)))  # not (2, 6) or (2, 9 + 6)
            for shape in [(2, 5), (2, 7), (2, 14), (2, 16), (1, 6), (3, 6), (2, 1, 6, 15), (2, 1, 6, 6), (6,)]
        ),
        ("position_ids", dict(position_ids=[[5, 4, 3, 2, 1, 0]] * 2)),
        ("position_ids", dict(position_ids=[[0, 1, 2, 2, 3, 4]] * 2)),
        ("position_ids", dict(position_ids=[[0, 1, 2]] * 2)),
        ("position_ids", dict(position_ids=[0, 1, 2, 3, 4, 5])),
        ("position_ids", dict(position_ids=[[[0, 1, 2, 3, 4, 5]] * 2] * 3)),
        ("seq_idx", dict(seq_idx=[[0, 0, 1]] * 2)),
        ("cu_seq_lens_q", dict(cu_seq_lens_q=[0, 3, 6])),  # of one row
    ],
)
def test_arguments_that_make_no_sense(message, arguments):
    """Ids, embeddings, documents and rows of another shape are refused: some would be computed."""
    arguments = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in arguments.items()}
    if not {"input_ids", "inputs_embeds"} & arguments.keys() and arguments:
        arguments["input_ids"] = IDS
    refuse(shared_model("mag"), message, **arguments)


def test_generate_checks_its_inputs():
    """generate() refuses ids of another shape, with and without drafts."""
    for ids, options in ((IDS[0], {}), (IDS[:0], {}), (IDS[:0], dict(prompt_lookup_num_tokens=2))):
        with pytest.raises(ValueError, match=NOT_IDS):
            shared_model("mag").generate(ids, max_new_tokens=2, pad_token_id=0, **options)


@in_one_test("value", [[], [[0, 6]], [0, 3], [1, 6], [0, 4, 3, 6], [0, 3, 7]])
def test_cumulative_lengths_that_make_no_sense(value):
    """`cu_seq_lens_q` must rise from 0 to the length of the row."""
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        shared_model("mag")(input_ids=IDS[:1], cu_seq_lens_q=torch.tensor(value, dtype=torch.int32))


def test_a_cache_of_another_class():
    """A cache of another class is refused wherever a cache is given, and what to do is said."""
    model, options = shared_model("mag"), dict(max_new_tokens=2, pad_token_id=0)
    own_code = type("TitansCache", (DynamicCache,), {"__module__": "transformers_modules.x"})
    uses = {
        "cache": (lambda x: model(IDS, cache=x), model.start_from, lambda x: model.generate(IDS, cache=x, **options)),
        "other": (TitansCache(model.config).merge,),
    }
    for other in (DynamicCache(), own_code()):
        for name, functions in uses.items():
            message = rf"`{name}` must be a TitansCache of titans_hf\..*: `model\.cache_class` is the class that fits"
            for function in functions:
                with pytest.raises(ValueError, match=message):
                    function(other)


@covering(1, {"variant": ("mac", "mag", "mal", "lmm"), "name": SHAPING, "swap": [False, True]})
def test_cache_of_a_model_of_other_sizes(variant, name, swap):
    """A cache of a model that differs in one size raises an error, if the size matters in its variant."""
    models = [make_model(variant, num_hidden_layers=1, **changes) for changes in ({}, {name: SHAPING[name]})]
    source, target = models[::-1] if swap else models
    refuse(target, "`cache`", read(source, make_ids(2, 9))[1], input_ids=IDS)


def test_cache_of_another_kind():
    """A cache of another variant, window, segment or rule is refused by name, in a call, a start and a mean."""
    kinds = {"mag": (dict(sliding_window=11), dict(memory_update_rule="chunk")), "mac": (dict(segment_length=12),)}
    others = [(x, make_model(x, **changes)) for x, of_variant in kinds.items() for changes in of_variant]
    others += [(variant, shared_model(other)) for variant, other in itertools.combinations(VARIANTS, 2)]
    for variant, other in others:
        model, cache = shared_model(variant), read(other, make_ids(2, 9))[1]
        refuse(model, "`cache` does not fit the model", cache, input_ids=IDS)
        with pytest.raises(ValueError, match="of the same model, but its"):
            read(model, make_ids(2, 9))[1].merge(cache)
        with pytest.raises(ValueError, match=r"its .* is .*, not"):
            model.start_from(read(other, make_ids(1, 9))[1])
        cache.reset()
        refuse(model, "`cache` does not fit the model", cache, input_ids=IDS)
