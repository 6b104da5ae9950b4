"""Checkpoints include their code: they load where titans_hf is not installed, with the same outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from common import VARIANTS, make_config, make_ids, make_model, redraw
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_imports

import titans_hf
from titans_hf import TitansConfig, TitansForCausalLM

PACKAGE = Path(titans_hf.__file__).parent
TIME_SERIES = {file.name for file in PACKAGE.glob("*time_series*.py")}
STAY = {f"{name}.py" for name in ("__init__", "__main__", "memory_listing", "memory_reference")}  # in no checkpoint
CODE = {file.name for file in PACKAGE.glob("*.py")} - STAY - TIME_SERIES
HEADS = ("CausalLM", "QuestionAnswering", "SequenceClassification", "TokenClassification")
AUTO_CLASSES = {"AutoConfig": "TitansConfig", "AutoModel": "TitansModel"}
AUTO_CLASSES |= {f"AutoModelFor{head}": f"TitansFor{head}" for head in HEADS}
SIZES = dict(vocab_size=320, pad_token_id=0)
GREEDY = dict(do_sample=False)


def run_alone(program: str, folder: Path) -> str:
    """Runs Python code in `folder`, offline and with caches of its own there; returns what it prints."""
    own = {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    command, options = [sys.executable, "-c", program], dict(capture_output=True, text=True, timeout=280)
    ran = subprocess.run(command, env=os.environ | own, cwd=folder, **options)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def assert_brings_its_code(folder: Path) -> None:
    assert {file.name for file in folder.glob("*.py")} == CODE
    assert all((folder / name).read_bytes() == (PACKAGE / name).read_bytes() for name in CODE)
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert {name: target.split(".")[1] for name, target in auto_map.items()} == AUTO_CLASSES
    for target in auto_map.values():
        module, name = target.split(".")
        assert getattr(titans_hf, name).__module__ == f"titans_hf.{module}"


def test_whatever_is_saved_brings_all_the_code(tmp_path):
    """Every saved class or config includes all modules and Auto classes; so does the config of a forecaster."""
    config = make_config("mag")
    for name in AUTO_CLASSES.values():
        saved = config if name == "TitansConfig" else getattr(titans_hf, name)(config)
        saved.save_pretrained(tmp_path / name)
        assert_brings_its_code(tmp_path / name)
    titans_hf.TitansTimeSeriesConfig().save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.glob("*.py")} == CODE | TIME_SERIES


def test_code_that_travels_needs_nothing_else():
    """The saved code is at most 18 files, and imports torch, transformers, huggingface_hub and safetensors alone."""
    assert len(CODE | TIME_SERIES) <= 18
    needed = {package for name in CODE for package in get_imports(PACKAGE / name)}
    assert needed - {"torch", "transformers", "huggingface_hub", "safetensors"} <= sys.stdlib_module_names


def test_a_checkpoint_names_its_own_code(tmp_path):
    """A saved auto_map names the checkpoint's own files, and keeps other entries."""
    config = make_config("mag")
    config.auto_map = {"AutoModel": "someone/theirs--modeling_titans.TitansModel", "AutoModelForMaskedLM": "my.Masked"}
    TitansForCausalLM(config).save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map.pop("AutoModelForMaskedLM") == "my.Masked"
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": auto_map}))
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
    for name, expected in list(AUTO_CLASSES.items())[1:]:
        auto = getattr(transformers, name)
        for model in (auto.from_pretrained(tmp_path, trust_remote_code=trust), auto.from_config(config)):
            assert type(model) is getattr(titans_hf, expected)


LOAD = """
import sys
from pathlib import Path
import torch, transformers
torch.set_num_threads(1)
for name, (auto_class, inputs, expected) in torch.load("expected.pt").items():
    folder, load = Path(name), getattr(transformers, auto_class).from_pretrained
    for _ in range(2):
        model = load(folder, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules")
        with torch.no_grad():
            assert torch.equal(model(**inputs)[0], expected), folder
        model.save_pretrained(folder / "again")
        for file in [*folder.glob("*.py"), folder / "config.json"]:
            assert (folder / "again" / file.name).read_bytes() == file.read_bytes(), file
        folder = folder / "again"
model = transformers.AutoModelForCausalLM.from_pretrained("mag", trust_remote_code=True)
tokens = torch.load("tokens.pt")
made = model.generate(tokens[:, :30], do_sample=False, max_new_tokens=25, return_dict_in_generate=True)
made.cache.save_pretrained("memory", model)
cache = model.cache_class.from_pretrained("memory", model)
assert torch.equal(model.generate(made.sequences, cache=cache, do_sample=False, max_new_tokens=9), tokens)
assert "titans_hf" not in sys.modules
"""


@pytest.mark.slow
@torch.no_grad()
def test_without_the_package(tmp_path):
    """By its own code a checkpoint loads, saves that code, and has the outputs, tokens and memory of this package."""
    ids, checkpoints = make_ids(2, 30, vocab_size=320), {}
    values = torch.randn(2, 60, 3, generator=torch.Generator().manual_seed(0))
    for variant in VARIANTS:
        model = make_model(variant, dtype=torch.float32, **SIZES)
        checkpoints[variant] = ("AutoModelForCausalLM", {"input_ids": ids}, model)
        if variant == "mag":
            checkpoints["body"] = ("AutoModel", {"input_ids": ids}, model.model)
            tokens = model.generate(model.generate(ids, max_new_tokens=25, **GREEDY), max_new_tokens=9, **GREEDY)
    for name in HEADS[1:]:
        model = redraw(getattr(titans_hf, f"TitansFor{name}")(make_config("mag", **SIZES))).eval()
        checkpoints[name] = (f"AutoModelFor{name}", {"input_ids": ids[:1]}, model)
    model = redraw(titans_hf.TitansForTimeSeriesPrediction(titans_hf.TitansTimeSeriesConfig(context_length=56))).eval()
    checkpoints["series"] = ("AutoModelForTimeSeriesPrediction", {"past_values": values[:, :56]}, model)
    expected = {}
    for name, (auto_class, inputs, model) in checkpoints.items():
        model.save_pretrained(tmp_path / name)
        model = getattr(transformers, auto_class).from_pretrained(tmp_path / name)  # whose weights lie as in LOAD
        expected[name] = (auto_class, inputs, model(**inputs)[0])
    torch.save(expected, tmp_path / "expected.pt")
    torch.save(tokens, tmp_path / "tokens.pt")
    run_alone(LOAD, tmp_path)
