"""Checkpoints include their code: they load where titans_hf is not installed, with the same outputs."""

import json
import sys
from pathlib import Path

import pytest
import remote_worker
import torch
import transformers
from clean_environment import clean_site, run_clean
from common import STAY, VARIANTS, make_config, make_ids, make_model, redraw
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.dynamic_module_utils import get_imports

import titans_hf
from titans_hf import TitansConfig, TitansForCausalLM
from titans_hf.cli.training.tokenizer import byte_tokenizer

PACKAGE = Path(titans_hf.__file__).parent
TIME_SERIES = {file.name for file in PACKAGE.glob("*time_series*.py")}  # tests/time_series/test_time_series.py
CODE = {file.name for file in PACKAGE.glob("*.py")} - STAY - TIME_SERIES
AUTO_CLASSES = {
    "AutoConfig": "TitansConfig",
    "AutoModel": "TitansModel",
    **{
        f"AutoModelFor{head}": f"TitansFor{head}"
        for head in ("CausalLM", "QuestionAnswering", "SequenceClassification", "TokenClassification")
    },
}
SIZES = dict(vocab_size=320, eos_token_id=1, pad_token_id=0)


def assert_brings_its_code(folder: Path) -> None:
    assert {file.name for file in folder.glob("*.py")} == CODE
    for name in CODE:
        assert (folder / name).read_bytes() == (PACKAGE / name).read_bytes()
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert {name: target.split(".")[1] for name, target in auto_map.items()} == AUTO_CLASSES
    for target in auto_map.values():
        module, name = target.split(".")
        assert getattr(titans_hf, name).__module__ == f"titans_hf.{module}"


@pytest.mark.parametrize("name", AUTO_CLASSES.values())
def test_whatever_is_saved_brings_all_the_code(name, tmp_path):
    """Every saved class or config includes all modules and Auto classes."""
    config = make_config("mag")
    saved = config if name == "TitansConfig" else getattr(titans_hf, name)(config)
    saved.save_pretrained(tmp_path)
    assert_brings_its_code(tmp_path)


def test_code_that_travels_needs_nothing_else():
    """The saved code imports torch, transformers, huggingface_hub and safetensors alone."""
    needed = {package for name in CODE for package in get_imports(PACKAGE / name)}
    assert needed - {"torch", "transformers", "huggingface_hub", "safetensors"} <= sys.stdlib_module_names


def test_checkpoints_of_the_trainer_bring_their_code(tmp_path):
    """Trainer's checkpoints include the code."""
    rows = [{"input_ids": row, "labels": row} for row in make_ids(2, 12)]
    args = TrainingArguments(tmp_path, max_steps=1, save_steps=1, report_to="none", use_cpu=True)
    trainer = Trainer(TitansForCausalLM(make_config("lmm")), args, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    assert_brings_its_code(tmp_path / "checkpoint-1")
    assert_brings_its_code(tmp_path)


def test_a_checkpoint_names_its_own_code(tmp_path):
    """A saved auto_map names the checkpoint's own files, and keeps other entries."""
    config = make_config("mag")
    config.auto_map = {
        "AutoModel": "someone/theirs--modeling_titans.TitansModel",
        "AutoModelForCausalLM": "my.Own",
        "AutoModelForMaskedLM": "my.Masked",
    }
    TitansForCausalLM(config).save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map.pop("AutoModelForMaskedLM") == "my.Masked"
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    assert_brings_its_code(tmp_path)


def test_a_merged_adapter_brings_its_code(tmp_path):
    """A merged adapter saves the code."""
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(make_model("mag"), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    tuned.merge_and_unload().save_pretrained(tmp_path)
    assert_brings_its_code(tmp_path)


@pytest.mark.parametrize("trust", [None, True])
def test_the_package_goes_before_the_code_of_a_checkpoint(trust, tmp_path, monkeypatch):
    """The installed package is used instead of the checkpoint's code."""
    monkeypatch.setattr("transformers.models.auto.auto_factory.get_class_from_dynamic_module", None)
    monkeypatch.setattr("transformers.models.auto.configuration_auto.get_class_from_dynamic_module", None)
    monkeypatch.setattr("builtins.input", None)
    make_model("mac").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=trust)
    assert type(config) is TitansConfig
    assert TitansConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    for name, expected in list(AUTO_CLASSES.items())[1:]:
        model = getattr(transformers, name).from_pretrained(tmp_path, trust_remote_code=trust)
        assert type(model) is getattr(titans_hf, expected)
        model = getattr(transformers, name).from_config(config, trust_remote_code=trust)
        assert type(model) is getattr(titans_hf, expected)


@torch.no_grad()
def save_with_expectations(folder: Path) -> None:
    """Saves checkpoints for `remote_worker`, and their outputs as loaded here."""
    ids = make_ids(2, 30, vocab_size=320)
    for variant in VARIANTS:
        make_model(variant, dtype=torch.float32, **SIZES).save_pretrained(folder / variant)
        byte_tokenizer().save_pretrained(folder / variant)
        model = AutoModelForCausalLM.from_pretrained(folder / variant)
        greedy = dict(do_sample=False, pad_token_id=0)
        first = model.generate(ids, max_new_tokens=25, return_dict_in_generate=True, **greedy)
        more = model.generate(first.sequences, cache=first.cache, max_new_tokens=9, **greedy)
        expected = {
            "ids": ids,
            "logits": model(ids).logits,
            "hidden": model.model(ids).last_hidden_state,
            "first": first.sequences,
            "more": more,
            "lm_head": model.lm_head.weight,
        }
        torch.save(expected, folder / f"{variant}.pt")
    for name in ("SequenceClassification", "TokenClassification", "QuestionAnswering"):
        saved = folder / f"heads-{name}"
        redraw(getattr(titans_hf, f"TitansFor{name}")(make_config("mag", **SIZES))).save_pretrained(saved)
        model = getattr(transformers, f"AutoModelFor{name}").from_pretrained(saved)
        torch.save(model(ids[:1])[0], folder / f"heads-{name}.pt")
    make_config("mag", **SIZES).save_pretrained(folder / "config")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean")
    save_with_expectations(folder)
    run_clean(clean_site(folder), Path(remote_worker.__file__), folder)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("check", remote_worker.CHECKS, ids=lambda check: check.__name__)
def test_without_the_package(check, results):
    """Without titans_hf a checkpoint passes each check of `remote_worker`."""
    if check is remote_worker.lm_eval:
        pytest.importorskip("lm_eval")
    assert not results[check.__name__], results[check.__name__]
