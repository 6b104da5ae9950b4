"""Padding: on either side or within, every row has the logits it has alone."""

import pytest
import torch
from common import ATTENTIONS, TWO_VARIANTS, assert_same, full_logits, left_pad, make_ids, shared_model

from titans_hf import generation_titans


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_every_pad_length_up_to_two_segments(variant):
    """Every number of padding tokens from 0 to 16 gives the logits without."""
    model, row = shared_model(variant), make_ids(23, seed=5)
    rows = [row[:length] for length in range(7, 24)]  # padding from 0 to 16
    ids, mask = left_pad(rows)
    expected = full_logits(model, row[None])[0]
    for row, logits in zip(rows, full_logits(model, ids, mask), strict=True):
        assert_same(logits[-len(row) :], expected[: len(row)])


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
    for ends, rows in ((9, 2), (0, 2), (5, 1), (5, 2)):
        generation_titans.logger.warning_once.cache_clear()
        caplog.clear()
        mask = torch.ones(rows, 9, dtype=torch.long)
        mask[-1, ends:] = 0
        model.generate(ids[:rows], attention_mask=mask, **options)
        assert ("A prompt ends in padding" in caplog.text) == (ends == 5)
