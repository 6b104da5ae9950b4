"""`generate()`: in every mode, the tokens are those of recomputing the whole sequence at every step."""

import pytest
import torch
from common import ATTENTIONS, TWO_VARIANTS, VARIANTS, assert_same, full_logits, left_pad, make_ids, shared_model
from covering import covering
from transformers import DynamicCache

from titans_hf import TitansCache

GREEDY = dict(do_sample=False, pad_token_id=0)


def is_greedy(model, ids, start: int) -> bool:
    """Whether every token from `start` on is what one forward pass over all of them would have chosen."""
    return torch.equal(full_logits(model, ids)[:, start - 1 : -1].argmax(-1), ids[:, start:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_recomputing(variant):
    """Greedy tokens and logits equal recomputing for 30 tokens, across windows and segments; places can be chosen."""
    model, ids = shared_model(variant), make_ids(2, 11, seed=3)
    expected = ids
    for _ in range(30):
        expected = torch.cat([expected, full_logits(model, expected)[:, -1].argmax(-1, keepdim=True)], 1)
    assert expected[:, 11:].unique().numel() > 5  # otherwise a constant answer would pass
    output = model.generate(ids, max_new_tokens=30, return_dict_in_generate=True, output_logits=True, **GREEDY)
    assert torch.equal(output.sequences, expected)
    assert isinstance(output.cache, TitansCache)
    assert output.cache.get_seq_length() == 40  # the last token has not been read
    logits = torch.stack(output.logits, 1).double()  # `generate()` makes them float32
    assert_same(logits, full_logits(model, expected)[:, 10:-1], 1e-5)
    keep = torch.tensor([0, 3, 16])
    assert_same(full_logits(model, expected, logits_to_keep=keep), full_logits(model, expected)[:, keep])


@covering(1, {"variant": TWO_VARIANTS, "padded": [False, True]})
def test_inputs_embeds(variant, padded):
    """`inputs_embeds` gives the logits and tokens of the ids, padded or not."""
    model = shared_model(variant)
    ids, mask = left_pad([make_ids(29), make_ids(18, seed=1)]) if padded else (make_ids(2, 29), None)
    embeds = model.model.embed_tokens(ids).detach()
    with torch.no_grad():
        logits = model(inputs_embeds=embeds, attention_mask=mask, use_cache=False).logits
    assert torch.equal(logits, full_logits(model, ids, mask))
    options = dict(attention_mask=mask, max_new_tokens=20, **GREEDY)
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(inputs_embeds=embeds, **options), expected[:, 29:])
    assert torch.equal(model.generate(ids, inputs_embeds=embeds, **options), expected)


@covering(2, {"variant": ATTENTIONS, "implementation": ["dynamic", "static"], "padded": [False, True]})
def test_padding_after_an_end_is_not_read(variant, implementation, padded):
    """The padding of a row that ends before the others changes neither its memory nor its next turn."""
    model, lengths = shared_model(variant), [11, 8, 5] if padded else [11] * 3
    ids, mask = left_pad([make_ids(n, seed=n + i) for i, n in enumerate(lengths)])
    given = mask.clone()
    free = model.generate(ids, attention_mask=mask, max_new_tokens=20, **GREEDY)[:, 11:]
    eos = next(x for x in free[:, :12].flatten().tolist() if not (free == x).any(1).all())  # ends some rows only
    settings = dict(eos_token_id=eos, pad_token_id=0, cache_implementation=implementation, return_dict_in_generate=True)
    first = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, **settings)
    assert torch.equal(mask, given)
    ends = [(row[11:] == eos).nonzero() for row in first.sequences]
    answers = [20 if not len(end) else 1 + end[0].item() for end in ends]
    assert min(answers) < max(answers) == 20
    # The last token of the longest answer has not been read.
    read_by_rows = [n + min(length, 19) for n, length in zip(lengths, answers, strict=True)]
    assert first.cache.num_tokens_seen.tolist() == read_by_rows
    mask = torch.cat([mask, torch.stack([(torch.arange(20) < length).long() for length in answers])], 1)
    transcript = torch.cat([first.sequences, make_ids(3, 12, seed=5)], 1)
    mask = torch.cat([mask, torch.ones(3, 12, dtype=torch.int64)], 1)
    second = model.generate(transcript, attention_mask=mask, cache=first.cache, max_new_tokens=9, **GREEDY)
    for row, kept in zip(second, mask.bool(), strict=True):
        alone = torch.cat([row[:43][kept], row[43:]])
        assert is_greedy(model, alone[None], len(alone) - 9)


def test_what_needs_another_cache_is_refused():
    """A cache of keys and values, generate_batch() and a paged cache raise an error."""
    model, ids = shared_model("mag"), make_ids(1, 5)
    with pytest.raises(ValueError, match=r"`cache`.*TitansCache.*DynamicCache"):
        model.generate(ids, cache=DynamicCache(), max_new_tokens=2, **GREEDY)
    with pytest.raises(NotImplementedError, match=r"generate\(\)"):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)
    with pytest.raises(NotImplementedError, match=r"generate\(\)"):
        model.generate(ids, cache_implementation="paged", max_new_tokens=2, **GREEDY)
