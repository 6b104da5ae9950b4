"""titans-hf merge: the merged model is the adapted one."""

import warnings

import peft
import pytest
import torch
from byte_model import save_byte_model
from common import full_logits, make_ids
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from titans_hf.cli import merge
from titans_hf.cli.training.tokenizer import byte_tokenizer

TIED = dict(tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, dict()),  # as of `get_peft_model(model, LoraConfig())`, without a task_type
        (TIED, dict(task_type="CAUSAL_LM")),
        (TIED, dict(target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM")),
        (TIED, dict(target_modules=["lm_head"], task_type="CAUSAL_LM")),
        (TIED, dict(modules_to_save=["embed_tokens", "lm_head"], target_modules=["q_proj"])),
        (TIED, dict(modules_to_save=["embed_tokens"], target_modules=["q_proj"], ensure_weight_tying=True)),
        (TIED, dict(trainable_token_indices=[5, 9], target_modules=["q_proj"], ensure_weight_tying=True)),
    ],
    ids=["no task type", "neither side", "embeddings", "head", "both saved", "saved and tied", "tokens"],
)
@pytest.mark.filterwarnings("ignore")  # PEFT warns of tied weights
def test_a_merged_model_is_the_adapted_one(changes, settings, tmp_path):
    """A merged model has the logits of the adapted one, its tokenizer, its code, and a cache, whatever Trainer has left
    in the base's config. Tied embeddings stay tied if the adapter leaves both sides equal."""
    base = save_byte_model(tmp_path / "model", "mag", **changes)
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"use_cache": true', '"use_cache": false'))
    assert not AutoConfig.from_pretrained(tmp_path / "model").use_cache
    ids = make_ids(1, 30, vocab_size=259)
    before = full_logits(base, ids)
    base.name_or_path = str(tmp_path / "model")
    adapted = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    adapted.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "adapter")
    action = "error" if settings.keys() <= {"task_type"} else "ignore"
    with warnings.catch_warnings(action=action, category=UserWarning):
        merge.main([str(tmp_path / "adapter"), str(tmp_path / "merged")])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(full_logits(merged, ids), full_logits(adapted.eval(), ids), rtol=1e-4, atol=1e-4)
    assert (full_logits(merged, ids) - before).abs().max() > 0.01
    one_side = not settings.get("ensure_weight_tying") and settings.keys() != {"task_type"}
    assert merged.config.tie_word_embeddings == (bool(changes) and not one_side)
    assert merged.config.use_cache and (tmp_path / "merged" / "modeling_titans.py").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab() == byte_tokenizer().get_vocab()
