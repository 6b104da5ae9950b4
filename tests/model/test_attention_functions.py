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


@pytest.fixture
def register():
    """Registers implementations until the test ends."""
    names = []

    def register(name: str, attention, mask) -> str:
        AttentionInterface.register(name, attention)
        if mask is not None:
            AttentionMaskInterface.register(name, mask)
        names.append(name)
        return name

    yield register
    for name in names:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name, None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_masks_are_of_the_registered_form(variant, form, register):
    """An implementation gets masks in the form that it is registered with."""
    name, ids = register("registered", *FORMS[form]), make_ids(2, 40)
    model = make_model(variant, attention=name)
    tolerance = 1e-4 if form == "added" else 1e-10  # that softmax is in float32
    assert_same(full_logits(model, ids), full_logits(make_model(variant), ids), tolerance)
    assert not any(weights is not None for weights in model(ids, output_attentions=True).attentions or ())


@pytest.mark.parametrize("variant", VARIANTS)
def test_arguments_of_a_call_reach_the_attention_function(variant, register):
    """A keyword of the model's call that the model does not read is an argument of every call of the attention."""
    found = []

    def attention(*args, softcap=None, **kwargs):
        found.append(softcap)
        return sdpa_attention_forward(*args, **kwargs)

    model = make_model(variant, attention=register("registered", attention, sdpa_mask))
    model(make_ids(2, 40), softcap=30.0)
    assert len(found) >= 2 and set(found) == {30.0}


@pytest.mark.parametrize("mask", [None, flash_attention_mask])
def test_an_implementation_without_masks_is_refused(mask, register):
    """An implementation that is registered without a form of masks raises an error."""
    model = make_model("mag", attention=register("registered", eager_attention_forward, mask))
    with pytest.raises(ValueError, match="must be registered with `eager_mask` or `sdpa_mask`"):
        model(make_ids(1, 9))
    assert torch.isfinite(full_logits(make_model("mag"), make_ids(1, 9))).all()
