"""Adapters (LoRA through PEFT): their gradients, saving, merging, and a memory that learns under them."""

import pytest
import torch
from common import (
    TWO_VARIANTS,
    assert_same_cache,
    assert_same_gradients,
    gradients,
    left_pad,
    make_ids,
    make_model,
    redraw,
)

from titans_hf import TitansCache

peft = pytest.importorskip("peft", reason="adapters need peft: pip install titans-hf[finetune]")

TARGETS = {
    "attention": r".*\.attention\.[qkvo]_proj",
    "memory": r".*\.memory\.(q|k|v|o|gate)_proj",
    "both": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "all-linear": "all-linear",
}
EACH = [("mac", "all-linear"), ("mag", "attention"), ("mag", "memory"), ("mal", "both"), ("lmm", "memory")]
# When checkpointing is enabled, and whether it is reentrant; Trainer and TRL enable it before PEFT.
CHECKPOINTING = [(None, None), ("after", True), ("after", False), ("before", True)]


def adapt(variant: str, target: str, model=None, **changes):
    """Returns a frozen model with a redrawn adapter: as initialised, LoRA's second matrix is 0 and has no effect."""
    config = peft.LoraConfig(target_modules=TARGETS[target], r=3, lora_alpha=6, task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_model(variant, **changes) if model is None else model, config)
    adapter = torch.nn.ParameterList(p for p in model.parameters() if p.requires_grad)
    assert len(adapter) > 0
    redraw(adapter, seed=1)
    return model.eval()


def trained(model) -> dict[str, torch.Tensor]:
    return {name: gradient for name, gradient in gradients(model).items() if gradient is not None}


@pytest.mark.parametrize("variant,target", EACH)
def test_gradients_of_an_adapter_under_checkpointing(variant, target):
    """Adapters have the same gradients with and without activation checkpointing, enabled before PEFT or after."""
    ids, mask = left_pad([make_ids(29), make_ids(18, seed=1)])
    found = []
    for when, reentrant in CHECKPOINTING:
        base = make_model(variant)
        if when == "before":
            base.activation_checkpointing_enable({"use_reentrant": reentrant})
        model = adapt(variant, target, base).train()
        if when == "after":
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        assert model.is_activation_checkpointing == bool(when)
        model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        found.append(trained(model))
    assert found[0].keys() == {name for name, p in model.named_parameters() if "lora_" in name}
    assert all(gradient.any() for gradient in found[0].values())
    for others in found[1:]:
        assert_same_gradients(others, found[0])


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_an_adapter_without_targets_adapts_attention_and_memory(variant):
    """`LoraConfig()` without targets adapts the projections of attention and memory."""
    model = peft.get_peft_model(make_model(variant), peft.LoraConfig(r=3, task_type="CAUSAL_LM"))
    first = model.base_model.model.model.layers[0].mixer
    adapted = {name for name, module in first.named_modules() if isinstance(module, peft.tuners.lora.Linear)}
    parts = ("memory", "attention") if variant == "mag" else ("memory",)
    assert adapted == {f"{part}.{letter}_proj" for part in parts for letter in "qkvo"}


def test_a_memory_is_of_the_adapter_that_was_active(tmp_path):
    """With another adapter active, or none, or another scale, a memory is refused, and with its own it loads."""
    model = adapt("mag", "both")
    model.add_adapter("other", model.peft_config["default"])
    cache = TitansCache(model.config)
    with torch.no_grad():
        model(input_ids=make_ids(1, 21), cache=cache)
    cache.save_pretrained(tmp_path, model)
    another = "is the memory of another model: its weights"
    model.set_adapter("other")
    with pytest.raises(ValueError, match=another):
        TitansCache.from_pretrained(tmp_path, model)
    model.set_adapter("default")
    with model.disable_adapter(), pytest.raises(ValueError, match=another):
        TitansCache.from_pretrained(tmp_path, model)
    assert_same_cache(TitansCache.from_pretrained(tmp_path, model), cache, 0)
    next(x for x in model.modules() if isinstance(x, peft.tuners.lora.Linear)).scaling["default"] *= 2
    with pytest.raises(ValueError, match=another):
        TitansCache.from_pretrained(tmp_path, model)


def test_activated_lora_is_refused():
    """An adapter with `alora_invocation_tokens`, which counts the columns of a call, raises an error."""
    model = peft.get_peft_model(make_model("mag"), peft.LoraConfig(alora_invocation_tokens=[5, 6]))
    with pytest.raises(ValueError, match="`alora_invocation_tokens` must be None"):
        model(input_ids=make_ids(1, 9))
