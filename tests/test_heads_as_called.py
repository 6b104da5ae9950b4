"""Heads as a user and Trainer call them: padding that would be judged, calls that fail, accumulated gradients."""

import pytest
import torch
from common import assert_same, make_config, make_ids, redraw
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

HEADS = (AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering)


def make_head(auto_class) -> torch.nn.Module:
    return redraw(auto_class.from_config(make_config("mag", num_labels=3, pad_token_id=0)).double().eval())


@pytest.mark.parametrize("pad_token_id", [0, None])
def test_texts_end_where_their_masks_end_without_known_padding(pad_token_id):
    """Embeddings, and ids of a model without `pad_token_id`, are classified by the last token of their mask; several
    texts of such ids without one are refused. Otherwise the class would be that of padding.
    """
    model, ids = make_head(AutoModelForSequenceClassification), 1 + make_ids(2, 9, vocab_size=49)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    expected = torch.cat([model(ids[:1]).logits, model(ids[1:, :7]).logits])
    model.config.pad_token_id = pad_token_id
    given = dict(inputs_embeds=model.model.embed_tokens(ids).detach()) if pad_token_id == 0 else dict(input_ids=ids)
    assert_same(model(**given, attention_mask=mask).logits, expected)
    assert_same(model(**{name: x[:1] for name, x in given.items()}).logits, expected[:1])
    if pad_token_id is None:
        with pytest.raises(ValueError, match="`attention_mask` must be given for several texts"):
            model(**given)
    else:
        assert_same(model(**given).logits, torch.cat([expected[:1], model(ids[1:]).logits]))


@pytest.mark.parametrize("positional", [True, False])
def test_a_text_ends_where_its_mask_ends(positional):
    """A text is classified by the last token of its mask, whatever the ids of padding: otherwise the output at padding,
    which is undefined, would be taken for its class.
    """
    model, ids = make_head(AutoModelForSequenceClassification), 1 + make_ids(2, 9, vocab_size=49)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    given, alone = ids.clone(), model(ids[1:, :7]).logits[0]
    output = model(ids, mask) if positional else model(input_ids=ids, attention_mask=mask)
    assert_same(output.logits, torch.stack([model(ids[:1]).logits[0], alone]))
    assert_same(model(ids.masked_fill(mask == 0, 0), mask).logits[1], alone)
    assert_same(model(ids, mask.flip(1)).logits[1], model(ids[1:, 2:]).logits[0])
    assert torch.equal(ids, given)
    cache = model.cache_class(model.config)
    model(ids[:, :4], past_key_values=cache)
    assert_same(model(ids[:, 4:], mask, past_key_values=cache).logits, output.logits)  # the mask of all columns


@pytest.mark.parametrize("auto_class", HEADS)
def test_a_head_that_fails_leaves_the_cache(auto_class):
    """A cache is as it was after a call whose labels do not fit: otherwise the same call again would read its tokens
    twice.
    """
    model, ids = make_head(auto_class), 1 + make_ids(2, 9, vocab_size=49)
    bad = torch.full((2,), 99)
    labels = dict(start_positions=bad.double(), end_positions=bad.double())
    if auto_class is not AutoModelForQuestionAnswering:
        labels = dict(labels=bad if auto_class is AutoModelForSequenceClassification else bad[:, None].expand(2, 9))
    cache = model.cache_class(model.config)
    model(ids, past_key_values=cache)
    state = cache.layers[0].state
    with pytest.raises((IndexError, RuntimeError)):
        model(ids, past_key_values=cache, **labels)
    assert cache.get_seq_length() == 9 and cache.layers[0].state is state


@pytest.mark.parametrize("auto_class", HEADS)
def test_accumulated_gradients_of_a_head(auto_class, tmp_path):
    """A head trains the same in one batch of four and in four of one: otherwise its learning rate would grow with the
    accumulation.
    """
    config = make_config("mag", num_labels=3, pad_token_id=0)
    rows = [{"input_ids": ids} for ids in 1 + make_ids(4, 9, vocab_size=49)]
    for i, row in enumerate(rows):
        if auto_class is AutoModelForQuestionAnswering:
            row |= {"start_positions": i, "end_positions": 8 - i}
        else:
            row["labels"] = i % 3 if auto_class is AutoModelForSequenceClassification else torch.arange(9) % 3
    runs = []
    for size in (4, 1):
        options = dict(per_device_train_batch_size=size, gradient_accumulation_steps=4 // size, max_steps=1)
        options |= dict(use_cpu=True, report_to="none", save_strategy="no", optim="sgd", max_grad_norm=0.0)
        torch.manual_seed(0)
        model = auto_class.from_config(config)
        trainer = Trainer(model, TrainingArguments(tmp_path, learning_rate=0.1, **options), train_dataset=rows)
        loss = trainer.train().training_loss
        runs.append((loss, model.state_dict()))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-5)
    for name, parameter in runs[0][1].items():
        torch.testing.assert_close(runs[1][1][name], parameter, atol=1e-6, rtol=1e-4)
