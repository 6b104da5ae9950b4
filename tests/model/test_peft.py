"""Adapters (LoRA through PEFT): their gradients, saving, merging, and a memory that learns under them."""

from contextlib import nullcontext

import pytest
import torch
from common import (
    ATTENTIONS,
    TWO_VARIANTS,
    assert_same,
    assert_same_cache,
    assert_same_gradients,
    full_logits,
    gradients,
    left_pad,
    make_ids,
    make_model,
    redraw,
    tensors,
)
from transformers import AutoModelForCausalLM, LlamaConfig

from titans_hf import TitansCache

peft = pytest.importorskip("peft", reason="adapters need peft: pip install titans-hf[finetune]")

TARGETS = {
    "attention": r".*\.attention\.[qkvo]_proj",
    "memory": r".*\.memory\.(q|k|v|o|gate)_proj",
    "both": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "all-linear": "all-linear",
}
EACH = [("mac", "all-linear"), ("mag", "attention"), ("mag", "memory"), ("mal", "both"), ("lmm", "memory")]
CHECKPOINTING = [None, {"use_reentrant": True}, {"use_reentrant": False}]


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
    """Adapters have the same gradients with and without activation checkpointing."""
    ids, mask = left_pad([make_ids(29), make_ids(18, seed=1)])
    found = []
    for checkpointing in CHECKPOINTING:
        model = adapt(variant, target).train()
        if checkpointing:
            model.activation_checkpointing_enable(checkpointing)
            model.enable_input_require_grads()
        assert model.is_activation_checkpointing == bool(checkpointing)
        model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        found.append(trained(model))
    assert found[0].keys() == {name for name, p in model.named_parameters() if "lora_" in name}
    assert all(gradient.any() for gradient in found[0].values())
    for others in found[1:]:
        assert_same_gradients(others, found[0])


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_checkpointing_enabled_before_the_adapter(variant):
    """Enabling checkpointing before PEFT, as Trainer and TRL do, keeps the gradients."""
    ids, found = make_ids(2, 29), []
    for checkpointing in (None, {"use_reentrant": True}):
        base = make_model(variant)
        if checkpointing:
            base.activation_checkpointing_enable(checkpointing)
        model = adapt(variant, "both", base).train()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append(trained(model))
    assert_same_gradients(found[1], found[0])


@pytest.mark.parametrize("variant,target", EACH)
def test_adapters_save_load_and_merge(variant, target, tmp_path):
    """An adapter has the same logits after loading and merging."""
    ids = make_ids(2, 29)
    base = make_model(variant)
    plain = full_logits(base, ids)
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    model = adapt(variant, target, base)
    expected = full_logits(model, ids)
    assert (expected - plain).abs().amax(-1).min() > 1e-3

    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(make_model(variant), tmp_path / "adapter")
    assert_same(full_logits(loaded, ids), expected)
    # both load the model first, from the folder that the adapter names
    for load in (AutoModelForCausalLM, peft.AutoPeftModelForCausalLM):
        assert_same(full_logits(load.from_pretrained(tmp_path / "adapter", dtype=torch.float64), ids), expected)
    with model.disable_adapter():
        assert_same(full_logits(model, ids), plain)

    merged = model.merge_and_unload()
    assert_same(full_logits(merged, ids), expected)
    merged.save_pretrained(tmp_path / "merged")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    assert_same(full_logits(whole, ids), expected)


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_an_adapted_model_learns_while_it_generates(variant):
    """An adapted model generates as the merged one, and its memory learns."""
    ids, mask = left_pad([make_ids(21), make_ids(13, seed=1)])
    options = dict(attention_mask=mask, max_new_tokens=15, do_sample=False, return_dict_in_generate=True)
    model = adapt(variant, "both")
    generated = model.generate(input_ids=ids, **options)
    merged = model.merge_and_unload()
    expected = merged.generate(ids, **options)
    assert torch.equal(generated.sequences, expected.sequences)
    assert_same_cache(generated.cache, expected.cache)
    before = TitansCache(merged.config)
    with torch.no_grad():
        merged(ids, attention_mask=mask, cache=before)
    for first, last in zip(before.layers, generated.cache.layers, strict=True):
        assert last.state.memory.num_seen.tolist() == [35, 27]  # the last generated token has not been read
        for a, b in zip(first.state.memory.weights, last.state.memory.weights, strict=True):
            assert (a - b).abs().amax((-1, -2)).min() > 1e-3
    assert len(tensors(before)) == len(tensors(generated.cache))


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_an_adapter_without_targets_adapts_attention_and_memory(variant):
    """`LoraConfig()` without targets adapts the projections of attention and memory."""
    model = peft.get_peft_model(make_model(variant), peft.LoraConfig(r=3, task_type="CAUSAL_LM"))
    first = model.base_model.model.model.layers[0].mixer
    adapted = {name for name, module in first.named_modules() if isinstance(module, peft.tuners.lora.Linear)}
    expected = {f"memory.{letter}_proj" for letter in "qkvo"}
    if variant != "lmm":
        expected |= {f"attention.{letter}_proj" for letter in "qkvo"}
    if variant == "mac":
        expected |= {"recall.q_proj", "recall.o_proj"}
    assert adapted == expected


def test_a_memory_of_an_adapted_model_is_saved_and_loaded(tmp_path):
    """A memory is saved and loaded with PEFT's own class around the model, and is not one of the model without the
    adapter.
    """
    model = adapt("mac", "both")
    cache = TitansCache(model.config)
    with torch.no_grad():
        model(input_ids=make_ids(2, 21), cache=cache)
    cache.save_pretrained(tmp_path, model)
    assert_same_cache(TitansCache.from_pretrained(tmp_path, model), cache, 0)
    with pytest.raises(ValueError, match="is the memory of another model: its weights"):
        TitansCache.from_pretrained(tmp_path, make_model("mac"))


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


@pytest.mark.parametrize("variant", ATTENTIONS)
def test_rows_have_adapters_of_their_own(variant):
    """With `adapter_names`, each row has the logits and the continuation that its adapter alone gives it. If rows were
    mixed up, a server of several adapters would answer one user by the adapter of another.
    """
    model = adapt(variant, "all-linear")
    model.add_adapter("other", model.peft_config["default"])
    redraw(torch.nn.ParameterList(p for name, p in model.named_parameters() if ".other." in name), seed=2)
    names, rows = ["other", "default", "__base__"], [make_ids(length, seed=length) for length in (26, 37, 31)]
    ids, mask = left_pad(rows)
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    mixed = model.generate(input_ids=ids, attention_mask=mask, adapter_names=names, **options)
    logits = full_logits(model, ids, mask, adapter_names=names)
    for row, (name, tokens) in enumerate(zip(names, rows, strict=True)):
        with model.disable_adapter() if name == "__base__" else nullcontext():
            if name != "__base__":
                model.set_adapter(name)
            assert_same(logits[row, -len(tokens) :], full_logits(model, tokens[None])[0], 1e-8)
            alone = model.generate(input_ids=tokens[None], attention_mask=torch.ones_like(tokens[None]), **options)
            assert torch.equal(mixed[row, -6:], alone[0, -6:])


def test_activated_lora_is_refused():
    """An adapter with `alora_invocation_tokens`, which counts the columns of a call, raises an error."""
    model = peft.get_peft_model(make_model("mag"), peft.LoraConfig(alora_invocation_tokens=[5, 6]))
    with pytest.raises(ValueError, match="`alora_invocation_tokens` must be None"):
        model(input_ids=make_ids(1, 9))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
@pytest.mark.parametrize("family", ["titans", "llama"])
def test_prompt_learning_does_not_generate_yet(kind, family):
    """docs/finetune.md says what these versions of Transformers and PEFT cannot do: after prompt tuning and P-tuning,
    generate() returns other tokens than the forward pass, and adapters of Transformers itself need a newer PEFT. If
    this fails, a version has mended it: the sentences go.
    """
    tiny = dict(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = make_model("mag") if family == "titans" else AutoModelForCausalLM.from_config(LlamaConfig(**tiny))
    with pytest.raises(ValueError, match=r"version >= 0\.22"):
        model.add_adapter(peft.LoraConfig())
    model = redraw(peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4))).eval()
    ids = make_ids(1, 12)
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    for _ in range(12):
        with torch.no_grad():
            best = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], 1)
    assert not torch.equal(found, ids)
