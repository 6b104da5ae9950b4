"""Saving and loading through the Auto classes."""

import pytest
import torch
from common import TWO_VARIANTS, assert_same, full_logits, make_ids, make_model
from covering import covering
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from titans_hf import TitansConfig, TitansForCausalLM, TitansModel


def assert_equal_weights(actual, expected) -> None:
    expected = dict(expected.named_parameters())
    assert dict(actual.named_parameters()).keys() == expected.keys()
    for name, parameter in actual.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def stored_names(folder) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@covering(1, {"variant": TWO_VARIANTS, "tied": [False, True]})
def test_round_trip(variant, tied, tmp_path):
    """A saved model loads with the same class, bits and tied embeddings, stored once."""
    model, ids = make_model(variant, tie_word_embeddings=tied), make_ids(2, 30)
    expected = full_logits(model, ids)
    model.save_pretrained(tmp_path)
    names = {name for name, _ in model.named_parameters()}
    assert stored_names(tmp_path) == names
    assert ("lm_head.weight" in names) is not tied
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is TitansForCausalLM
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert_equal_weights(loaded, model)
    assert_same(full_logits(loaded, ids), expected)  # not bit for bit: where a tensor lies changes the rounding
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is TitansConfig and config.variant == variant and config.architectures == ["TitansForCausalLM"]


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_base_model_loads_from_the_same_file(variant, tmp_path):
    """AutoModel loads the body of a causal checkpoint with its weights."""
    model, ids = make_model(variant), make_ids(2, 30)
    model.save_pretrained(tmp_path)
    base, info = AutoModel.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert type(base) is TitansModel and not info["missing_keys"]
    with torch.no_grad():
        assert_same(base(ids).last_hidden_state, model.model(ids).last_hidden_state)


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_dtype_of_the_checkpoint_is_kept(variant, tmp_path):
    """`dtype="auto"` loads float64 as float64, and a given dtype is used."""
    make_model(variant).save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.float64
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_shards(variant, tmp_path):
    """A checkpoint in several files loads with all weights."""
    model, ids = make_model(variant), make_ids(1, 20)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert_equal_weights(loaded, model)
    assert_same(full_logits(loaded, ids), full_logits(model, ids))
