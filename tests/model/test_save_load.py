"""Saving and loading through the Auto classes."""

import torch
from common import TWO_VARIANTS, assert_same, full_logits, make_ids, make_model
from covering import covering
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from titans_hf import TitansConfig, TitansForCausalLM


@covering(1, {"variant": TWO_VARIANTS, "tied": [False, True]})
def test_round_trip(variant, tied, tmp_path):
    """A saved model loads with the same class, bits and tied embeddings, stored once."""
    model, ids = make_model(variant, tie_word_embeddings=tied), make_ids(2, 30)
    expected = full_logits(model, ids)
    model.save_pretrained(tmp_path)
    names = {name for name, _ in model.named_parameters()}
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == names
    assert ("lm_head.weight" in names) is not tied
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is TitansForCausalLM
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    for (name, parameter), expected_one in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected_one), name
    assert_same(full_logits(loaded, ids), expected)  # not bit for bit: where a tensor lies changes the rounding
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is TitansConfig and config.variant == variant and config.architectures == ["TitansForCausalLM"]
