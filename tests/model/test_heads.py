"""Transformers' heads on a Titans body, resized vocabularies, embeddings as input, and recorded states."""

import pytest
import torch
from common import ATTENTIONS, assert_same, left_pad, make_config, make_ids, redraw
from covering import covering
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

HEADS = (AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering)
LENGTHS = (41, 30, 13, 1)  # of a batch; beyond three windows, five segments and ten chunks


def make_head(auto_class, variant: str, **changes) -> torch.nn.Module:
    config = make_config(variant, num_labels=3, pad_token_id=0, **changes)
    return redraw(auto_class.from_config(config).double().eval())


def answers(output) -> torch.Tensor:
    """Logits of any head, those of the tokens as (B, T, labels)."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)
    return output.logits


def padded_batch(side: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Returns rows (T,) of several lengths without the padding token 0, and ids and mask (B, T), padded on one side."""
    rows = [1 + make_ids(n, seed=n, vocab_size=49) for n in LENGTHS]
    if side == "left":
        return rows, *left_pad(rows)
    return rows, *(x.flip(-1) for x in left_pad([row.flip(0) for row in rows]))


@covering(
    2, {"variant": ATTENTIONS, "auto_class": HEADS, "side,masked": [("left", True), ("right", True), ("right", False)]}
)
def test_padding(variant, auto_class, side, masked):
    """A row's logits are those it has alone, with padding on either side."""
    model, (rows, ids, mask) = make_head(auto_class, variant), padded_batch(side)
    with torch.no_grad():
        batch = answers(model(ids, attention_mask=mask if masked else None))
        for row, found, real in zip(rows, batch, mask.bool(), strict=True):
            alone = answers(model(row[None]))[0]
            assert_same(found if auto_class is AutoModelForSequenceClassification else found[real], alone)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_of_an_answer_does_not_depend_on_padding(side):
    """The loss of an answer does not depend on padding, and no answer lies in it."""
    model, row = make_head(AutoModelForQuestionAnswering, "mag"), 1 + make_ids(1, 12, vocab_size=49)
    positions = torch.tensor([2]), torch.tensor([5])
    with torch.no_grad():
        output = model(row, start_positions=positions[0], end_positions=positions[1])
        alone, logits = output.loss, (output.start_logits, output.end_logits)
        assert_same(alone, sum(cross_entropy(x, y) for x, y in zip(logits, positions, strict=True)) / 2)
        for width in (4, 40):
            padding = torch.zeros(1, width, dtype=torch.int64)
            parts = [padding, row] if side == "left" else [row, padding]
            ids, mask = torch.cat(parts, dim=1), torch.cat([(x > 0).long() for x in parts], dim=1)
            start, end = (x + (width if side == "left" else 0) for x in positions)
            output = model(ids, attention_mask=mask, start_positions=start, end_positions=end)
            assert_same(output.loss, alone)
            assert mask[0, output.start_logits.argmax()] and mask[0, output.end_logits.argmax()]


def test_a_text_ends_where_its_mask_ends():
    """A text is classified by the last token of its mask; without a padding token several texts need a mask."""
    model, ids = make_head(AutoModelForSequenceClassification, "mag"), 1 + make_ids(2, 9, vocab_size=49)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    embeds, padded = model.model.embed_tokens(ids).detach(), ids.masked_fill(mask == 0, 0)
    first, second, short = model(ids[:1]).logits[0], model(ids[1:]).logits[0], model(ids[1:, :7]).logits[0]
    for output in (model(ids, mask), model(inputs_embeds=embeds, attention_mask=mask), model(padded)):
        assert_same(output.logits, torch.stack([first, short]))
    assert_same(model(inputs_embeds=embeds).logits, torch.stack([first, second]))
    assert_same(model(ids, mask.flip(1)).logits[1], model(ids[1:, 2:]).logits[0])
    cache = model.cache_class(model.config)
    model(ids[:, :4], cache=cache)
    assert_same(model(ids[:, 4:], mask, cache=cache).logits[1], short)  # the mask of all columns
    model.config.pad_token_id = None
    assert_same(model(ids, mask).logits[1], short)
    assert_same(model(ids[:1]).logits[0], first)
    with pytest.raises(ValueError, match="`attention_mask` must be given for several texts"):
        model(ids)


@pytest.mark.parametrize("auto_class", HEADS)
def test_a_head_that_fails_leaves_the_cache(auto_class):
    """A cache is as it was after a call whose labels do not fit."""
    model, ids = make_head(auto_class, "mag"), 1 + make_ids(2, 9, vocab_size=49)
    bad = torch.full((2,), 99)
    labels = dict(start_positions=bad.double(), end_positions=bad.double())
    if auto_class is not AutoModelForQuestionAnswering:
        labels = dict(labels=bad if auto_class is AutoModelForSequenceClassification else bad[:, None].expand(2, 9))
    cache = model.cache_class(model.config)
    model(ids, cache=cache)
    state = cache.layers[0].state
    with pytest.raises((IndexError, RuntimeError)):
        model(ids, cache=cache, **labels)
    assert cache.get_seq_length() == 9 and cache.layers[0].state is state
