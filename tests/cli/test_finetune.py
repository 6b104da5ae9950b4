"""docs/finetune.md from start to end: a trained checkpoint, SFT, LoRA, merging, and a served model that chats."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch
from byte_model import save_byte_model
from common import full_logits, make_ids
from safetensors.torch import load_file
from test_serve import MESSAGES, complete, serving
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from titans_hf.cli import merge

ROOT = Path(__file__).parents[2]
SFT = "--trust_remote_code true --dataset_name chats --assistant_only_loss true --packing true --max_length 64"
TINY = "--max_steps 2 --per_device_train_batch_size 2 --use_cpu true --bf16 false --report_to none"
CHAT = '{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody."}]}\n'


@pytest.fixture
def adapter(tmp_path):
    """A folder with an adapter of random weights, and the model it adapts."""
    model = save_byte_model(tmp_path / "model", "mac", tie_word_embeddings=True)
    model.name_or_path = str(tmp_path / "model")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "adapter")
    return adapted.eval()


def test_merging_keeps_what_the_adapter_says(adapter, tmp_path):
    """The merged model has the adapted model's logits, its tokenizer, its tied embeddings without a warning of PEFT
    and, whatever Trainer has left in the base's config, its cache.
    """
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"use_cache": true', '"use_cache": false'))
    assert not AutoConfig.from_pretrained(tmp_path / "model").use_cache
    with warnings.catch_warnings(action="error", category=UserWarning):
        merge.main([str(tmp_path / "adapter"), str(tmp_path / "merged")])
    ids = AutoTokenizer.from_pretrained(tmp_path / "merged")("Who is there?", return_tensors="pt").input_ids
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapter(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
        with adapter.disable_adapter():
            assert (merged(ids).logits - adapter(input_ids=ids).logits).abs().max() > 0.01
    assert merged.config.use_cache and merged.config.tie_word_embeddings


TIED = dict(tie_word_embeddings=True, token_memory_features=24)


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, dict()),  # as of `get_peft_model(model, LoraConfig())`, without a task_type
        (TIED, dict(target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM")),
        (TIED, dict(target_modules=["lm_head"], task_type="CAUSAL_LM")),
        (TIED, dict(modules_to_save=["embed_tokens", "lm_head"], target_modules=["q_proj"])),
        (TIED, dict(modules_to_save=["embed_tokens"], target_modules=["q_proj"], ensure_weight_tying=True)),
        (TIED, dict(trainable_token_indices=[5, 9], target_modules=["q_proj"], ensure_weight_tying=True)),
    ],
    ids=["no task type", "embeddings", "head", "both saved", "saved and tied", "tokens"],
)
@pytest.mark.filterwarnings("ignore")  # PEFT warns of tied weights
def test_merging_any_side_of_tied_embeddings(changes, settings, tmp_path):
    """A merged model has the logits of the adapted one, whichever side of tied embeddings the adapter changes. Its
    embeddings stay tied if the adapter leaves both sides equal. If this failed, a user would save another model.
    """
    base = save_byte_model(tmp_path / "model", "mag", **changes)
    base.name_or_path = str(tmp_path / "model")
    adapted = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    adapted.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "adapter")
    merge.main([str(tmp_path / "adapter"), str(tmp_path / "merged")])
    merged, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), make_ids(1, 30, vocab_size=259)
    torch.testing.assert_close(full_logits(merged, ids), full_logits(adapted.eval(), ids), rtol=1e-4, atol=1e-4)
    one_side = not settings.get("ensure_weight_tying") and bool(changes)
    assert merged.config.tie_word_embeddings == (bool(changes) and not one_side)


def test_merging_refuses_what_it_would_spoil(adapter, tmp_path):
    """A model in place of an adapter, and an existing output folder, raise an error."""
    with pytest.raises(ValueError, match=r"ADAPTER .*model is not an adapter's folder"):
        merge.main([str(tmp_path / "model"), str(tmp_path / "merged")])
    with pytest.raises(ValueError, match=r"OUTPUT .*model exists"):
        merge.main([str(tmp_path / "adapter"), str(tmp_path / "model")])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_from_a_checkpoint_to_a_chat(tmp_path):
    """The page's commands run one after another, each from the output of the one before."""
    save_byte_model(tmp_path / "model", "mag")
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "chats.jsonl").write_text(CHAT * 16)
    shutil.copy(ROOT / "src" / "titans_hf" / "cli" / "configs" / "chat_template.jinja", tmp_path)
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> str:
        command = [sys.executable, "-m", *(word for part in command for word in part.split())]
        done = subprocess.run(command, env=os.environ | own, cwd=tmp_path, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    run(
        "trl.cli.main sft --model_name_or_path model --output_dir tuned --use_cache true",
        f"--chat_template_path chat_template.jinja {SFT} {TINY}",
    )
    run(f"trl.cli.main sft --model_name_or_path tuned --output_dir adapter --use_peft {SFT} {TINY}")
    run("titans_hf merge adapter merged")

    before, tuned, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "tuned", "merged"))
    assert all((tuned[name] != before[name]).any() for name in before if "norm" not in name)
    changed = {name for name in tuned if (merged[name] != tuned[name]).any()}
    assert changed == {name for name in tuned if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "o_proj")}
    for name in ("tuned", "merged"):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.use_cache
    template = AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert template == (tmp_path / "chat_template.jinja").read_text()

    with serving(tmp_path / "merged", tmp_path) as url:
        with complete(f"{url}/v1/chat/completions", tmp_path / "merged", messages=MESSAGES) as response:
            assert b'"assistant"' in response.read()
        flags = ["max_new_tokens=8", "do_sample=False"]
        chat = subprocess.run(
            [sys.executable, "-m", "titans_hf", "chat", str(tmp_path / "merged"), f"{url}/v1", *flags, "--user", "me"],
            input="Who?\n\n!exit\n",
            env=os.environ | {"HF_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert chat.returncode == 0, chat.stderr[-3000:]
