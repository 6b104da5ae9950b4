"""Attention implementations that a user registers with transformers."""

import pytest
import torch
from common import assert_same, full_logits, make_ids, make_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, flash_attention_mask, sdpa_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

FORMS = {"added": (eager_attention_forward, eager_mask), "boolean": (sdpa_attention_forward, sdpa_mask)}
VARIANTS = ("mac", "mag", "mal")


def register(name: str, attention, mask) -> str:
    AttentionInterface.register(name, attention)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    return name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_registered_function_gets_its_form_of_masks_and_arguments(variant, form):
    """An implementation gets masks in its form, and in every call the keywords that the model does not read."""
    (function, mask), found = FORMS[form], []

    def attention(*args, softcap=None, **kwargs):
        found.append(softcap)
        return function(*args, **kwargs)

    ids, model = make_ids(2, 40), make_model(variant, attention=register(form, attention, mask))
    tolerance = 1e-4 if form == "added" else 1e-10  # that softmax is in float32
    assert_same(full_logits(model, ids), full_logits(make_model(variant), ids), tolerance)
    found.clear()
    output = model(ids, output_attentions=True, softcap=30.0)
    assert not any(weights is not None for weights in output.attentions or ())
    assert len(found) >= 2 and set(found) == {30.0}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_registered_function_gets_the_keywords_of_transformers_alone(variant):
    """A function without `**kwargs` can be registered, as with every model of Transformers."""

    def attention(module, query, key, value, attention_mask, scaling, dropout=0.0):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling)

    ids, model = make_ids(2, 40), make_model(variant, attention=register("strict", attention, sdpa_mask))
    assert_same(full_logits(model, ids), full_logits(make_model(variant), ids))


@pytest.mark.parametrize("mask", [None, flash_attention_mask])
def test_an_implementation_without_masks_is_refused(mask):
    """An implementation that is registered without a form of masks raises an error."""
    model = make_model("mag", attention=register("alone" if mask is None else "another", eager_attention_forward, mask))
    with pytest.raises(ValueError, match="must be registered with `eager_mask` or `sdpa_mask`"):
        model(make_ids(1, 9))
    assert torch.isfinite(full_logits(make_model("mag"), make_ids(1, 9))).all()
