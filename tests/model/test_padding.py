"""Padding: on either side or within, every row has the logits it has alone."""

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
)
from covering import covering

from titans_hf import TitansCache, generation_titans


def rows_of(*lengths: int) -> list[torch.Tensor]:
    return [make_ids(length, seed=length) for length in lengths]


def continue_alone(model, parts: list[torch.Tensor]) -> torch.Tensor:
    """Returns the logits of the last part, read after the others as one row without padding."""
    return full_logits(model, torch.cat(parts)[None])[0, -len(parts[-1]) :]


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_every_pad_length_up_to_two_segments(variant):
    """Every number of padding tokens from 0 to 16 gives the logits without."""
    model, row = shared_model(variant), make_ids(23, seed=5)
    rows = [row[:length] for length in range(7, 24)]  # padding from 0 to 16
    ids, mask = left_pad(rows)
    expected = full_logits(model, row[None])[0]
    for row, logits in zip(rows, full_logits(model, ids, mask), strict=True):
        assert_same(logits[-len(row) :], expected[: len(row)])


@covering(1, {"variant": TWO_VARIANTS, "masked": [True, False]})
def test_right_padding(variant, masked):
    """Padding on the right, masked or not, leaves earlier logits unchanged."""
    model, rows = shared_model(variant), rows_of(31, 24, 13, 1)
    ids, mask = (x.flip(1) for x in left_pad([row.flip(0) for row in rows], fill=7))
    for row, logits in zip(rows, full_logits(model, ids, mask if masked else None), strict=True):
        assert_same(logits[: len(row)], full_logits(model, row[None])[0])


@covering(1, {"variant": ATTENTIONS, "dtype": [torch.int64, torch.bool, torch.float32]})
def test_padding_anywhere(variant, dtype):
    """Masked tokens within a row leave the others' logits unchanged, for a mask of any dtype."""
    model, ids = shared_model(variant), make_ids(3, 33)
    mask = torch.rand(3, 33, generator=torch.Generator().manual_seed(0)) < 0.6
    logits = full_logits(model, ids, mask.to(dtype))
    for row, real, ours in zip(ids, mask, logits, strict=True):
        assert_same(ours[real], full_logits(model, row[real][None])[0])


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_out_of_step(variant, attention):
    """Rows at different phases of chunk, segment and window have their own logits in later calls."""
    model, rows = make_model(variant, attention=attention), rows_of(18, 12, 5, 1)
    ids, mask = left_pad(rows)
    later = make_ids(4, 22, seed=9)
    alone = torch.stack([continue_alone(model, [row, more]) for row, more in zip(rows, later, strict=True)])
    for pieces in ([1] * 22, [22], [3, 1, 14, 4]):
        cache, parts, grown = TitansCache(model.config), [], mask
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, cache=cache)
            for piece in later.split(pieces, 1):
                grown = torch.cat([grown, torch.ones_like(piece)], 1)
                parts.append(model(input_ids=piece, attention_mask=grown, cache=cache).logits)
        assert_same(torch.cat(parts, 1), alone)
        assert cache.num_tokens_seen.tolist() == [len(row) + 22 for row in rows]


@covering(1, {"variant": ATTENTIONS, "whole_mask": [True, False]})
def test_padded_second_turn(variant, whole_mask):
    """A padded second turn has the logits of the rows alone, with the mask of both turns or of the new one."""
    model, first, second = shared_model(variant), rows_of(17, 6, 11), rows_of(3, 21, 10)
    (ids_1, mask_1), (ids_2, mask_2) = left_pad(first), left_pad(second, fill=3)
    third = make_ids(3, 13, seed=2)
    cache = TitansCache(model.config)
    with torch.no_grad():
        model(input_ids=ids_1, attention_mask=mask_1, cache=cache)
        mask = torch.cat([mask_1, mask_2], 1) if whole_mask else mask_2
        logits_2 = model(input_ids=ids_2, attention_mask=mask, cache=cache).logits
        logits_3 = model(input_ids=third, cache=cache).logits
    for i in range(3):
        assert_same(logits_2[i, -len(second[i]) :], continue_alone(model, [first[i], second[i]]))
        assert_same(logits_3[i], continue_alone(model, [first[i], second[i], third[i]]))
    assert cache.get_seq_length() == ids_1.shape[1] + ids_2.shape[1] + 13


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_rows_that_are_all_padding(variant):
    """A row without tokens in some calls keeps its state and logits."""
    model, rows = shared_model(variant), make_ids(2, 20)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, 3:11] = 0
    expected = full_logits(model, rows[1:][mask[1:] == 1][None])[0]
    for lengths in ([3, 8, 9], [3] + [1] * 17):
        cache, parts = TitansCache(model.config), []
        with torch.no_grad():
            for part, part_of_mask in zip(rows.split(lengths, 1), mask.split(lengths, 1), strict=True):
                parts.append(model(input_ids=part, attention_mask=part_of_mask, cache=cache).logits)
        logits = torch.cat(parts, 1)
        assert_same(logits[0], full_logits(model, rows[:1])[0])
        assert_same(logits[1][mask[1] == 1], expected)
        assert cache.layers[-1].state.memory.num_seen.tolist() == [20, 12]


@covering(1, {"variant": ATTENTIONS, "first": [1, 6]})
def test_a_call_of_padding_alone(variant, first):
    """A call of padding alone leaves later logits unchanged."""
    model, ids = shared_model(variant), make_ids(2, 20)
    cache = TitansCache(model.config)
    with torch.no_grad():
        for before in (0, 8):  # at the very start, then where every row is at the start of a chunk and segment
            model(
                input_ids=make_ids(2, first, seed=4),
                attention_mask=torch.zeros(2, first, dtype=torch.int64),
                cache=cache,
            )
            if not before:
                model(input_ids=ids[:, :8], cache=cache)
        logits = model(input_ids=ids[:, 8:], cache=cache).logits
    assert_same(logits, full_logits(model, ids)[:, 8:])


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_mask_of_ones_is_no_mask(variant):
    """A mask of ones gives bit-identical logits to none."""
    model, ids = shared_model(variant), make_ids(2, 30)
    cache = TitansCache(model.config)
    with torch.no_grad():
        first = model(input_ids=ids[:, :13], attention_mask=torch.ones(2, 13), cache=cache).logits
        rest = model(input_ids=ids[:, 13:], attention_mask=torch.ones(2, 30), cache=cache).logits
    assert torch.equal(torch.cat([first, rest], 1), read(model, ids, [13, 17])[0])


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_generate_without_a_cache_reads_padding_on_the_right(variant):
    """Without a cache generate() continues right-padded rows as alone."""
    model = shared_model(variant)
    ids, options = make_ids(2, 9), dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    generated = model.generate(ids, attention_mask=mask, use_cache=False, **options)
    alone = torch.cat([ids[1:, :5], generated[1:, 9:]], dim=1)
    assert torch.equal(generated[0], model.generate(ids[:1], **options)[0])
    # the first token follows the padding, whose output is undefined; those after it are greedy
    assert torch.equal(full_logits(model, alone)[:, 5:-1].argmax(-1), alone[:, 6:])


def test_a_prompt_that_ends_in_padding_is_told(caplog):
    """generate() warns of a row whose last column is padding, and of no other."""
    model, ids, options = shared_model("mag"), 1 + make_ids(2, 9, vocab_size=49), dict(max_new_tokens=2, pad_token_id=0)
    for ends, rows, told in ((9, 2, False), (0, 2, False), (5, 1, True), (5, 2, True)):
        generation_titans.logger.warning_once.cache_clear()
        caplog.clear()
        mask = torch.ones(rows, 9, dtype=torch.long)
        mask[-1, ends:] = 0
        model.generate(ids[:rows], attention_mask=mask, **options)
        assert ("A prompt ends in padding" in caplog.text) == told
