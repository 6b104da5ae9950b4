"""Commands given a damaged checkpoint: one line that names the checkpoint, the file and what is wrong with it."""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from byte_model import save_byte_model
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from titans_hf import TitansCache, TitansForSequenceClassification
from titans_hf.cli.serving.options import add_checks
from titans_hf.cli.shared.checkpoints import find_damage
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.training.tokenizer import byte_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache_and_no_network")
READ = "{} texts --memory memory"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with a whole checkpoint, and one of several files."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = save_byte_model(folder / "model", "mag")
    TitansCache(model.config).save_pretrained(folder / "saved", model)
    model.save_pretrained(folder / "shards", max_shard_size="20KB")
    byte_tokenizer().save_pretrained(folder / "shards")
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM")).save_pretrained(folder / "adapter")
    byte_tokenizer().save_pretrained(folder / "adapter")
    return folder


@pytest.fixture
def folder(checkpoints, tmp_path, monkeypatch):
    """A copy of the checkpoints in the current folder, with a text."""
    shutil.copytree(checkpoints, tmp_path, dirs_exist_ok=True)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Es war einmal ein König. " * 400)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cut(file: Path) -> str:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return f"{file.name} is cut off or damaged"


def overwrite(file: Path) -> str:
    file.write_bytes(b"\xff" * file.stat().st_size)
    return f"{file.name} is cut off or damaged"


def remove(file: Path) -> str:
    file.unlink()
    return f"{file.name} is missing"


def name_base(adapter: Path, model: str) -> None:
    """Names the model that an adapter is of."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": model}))


def error_line(module: str, arguments: str, monkeypatch, capsys) -> str:
    """Runs a command that fails; returns its error, the last line, and asserts that it is no traceback."""
    monkeypatch.setattr(sys, "argv", [module, *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        run_command(import_module(module).main)
    assert ended.value.code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text and text.count(": error: ") == 1
    return text.splitlines()[-1]


@pytest.mark.parametrize("damage", [cut, overwrite, remove])
def test_damaged_weights_are_named(damage, folder, monkeypatch, capsys):
    """The error is a line that names the checkpoint and its file, before any output."""
    name = "model" if damage is cut else "shards"
    expected = damage(sorted((folder / name).glob("*.safetensors"))[-1])
    line = error_line("titans_hf.cli.read", READ.format(name), monkeypatch, capsys)
    assert f"MODEL {name} has damaged weights: {expected}" in line
    assert not (folder / "memory").exists()


def test_damaged_adapters_are_named(folder, monkeypatch, capsys):
    """The weights of an adapter are checked too."""
    name_base(folder / "adapter", "model")
    expected = cut(folder / "adapter" / "adapter_model.safetensors")
    line = error_line("titans_hf.cli.merge", "adapter out", monkeypatch, capsys)
    assert f"ADAPTER adapter has damaged weights: {expected}" in line


def test_activated_adapters_are_not_merged(folder, monkeypatch, capsys):
    """An adapter that is active only after its invocation has no weights that could be merged: an error says so."""
    file = folder / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"alora_invocation_tokens": [1, 2]}))
    line = error_line("titans_hf.cli.merge", "adapter out", monkeypatch, capsys)
    assert "ADAPTER adapter has alora_invocation_tokens" in line


@pytest.mark.parametrize("content", ['{"model_type": "tit', None])
def test_damaged_configurations_are_named(content, folder, monkeypatch, capsys):
    """A configuration that is no JSON, or has a size that is no number, is an error that names the checkpoint."""
    file = folder / "model" / "config.json"
    file.write_text(content or json.dumps(json.loads(file.read_text()) | {"hidden_size": "x"}))
    line = error_line("titans_hf.cli.read", READ.format("model"), monkeypatch, capsys)
    assert "MODEL model is not a checkpoint: its configuration does not load (" in line


def test_weights_of_another_model_are_refused(folder, monkeypatch, capsys):
    """Weights of other sizes than the configuration's are an error that names the checkpoint."""
    sizes = dict(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder / "llama")
    shutil.copy(folder / "llama" / "model.safetensors", folder / "model")
    line = error_line("titans_hf.cli.read", READ.format("model"), monkeypatch, capsys)
    assert "model has weights of other sizes than its configuration" in line


@pytest.mark.parametrize("module,arguments", [("read", READ.format("model")), ("merge", "adapter out")])
def test_a_classifier_is_no_language_model(module, arguments, folder, monkeypatch, capsys):
    """A checkpoint without a language model's head is an error that names the head."""
    classifier = TitansForSequenceClassification.from_pretrained(folder / "model")
    classifier.save_pretrained(folder / "model")
    name_base(folder / "adapter", "model")
    line = error_line(f"titans_hf.cli.{module}", arguments, monkeypatch, capsys)
    assert " model is no whole TitansForCausalLM: it was saved as TitansForSequenceClassification" in line
    assert line.endswith("has no lm_head.weight")
    assert not (folder / "memory").exists() and not (folder / "out").exists()


def test_serving_checks_the_checkpoint(folder):
    """`serve` refuses a damaged checkpoint and passes a whole one on."""
    served = []
    command = click.Command("serve", callback=lambda **options: served.append(options))
    add_checks(command)
    for model in (None, "model", "you/on-the-hub"):
        command.callback(force_model=model, port=1)
    assert [options["force_model"] for options in served] == [None, "model", "you/on-the-hub"]
    expected = cut(folder / "model" / "model.safetensors")
    with pytest.raises(ValueError, match=f"MODEL model has damaged weights: {expected}"):
        command.callback(force_model="model", port=1)


@pytest.mark.parametrize("content", ["", '{"weight_map": 3}', "[]"])
def test_damaged_lists_of_files_are_named(folder, content):
    """An index without its map is damage."""
    assert find_damage(folder / "shards") is None
    (folder / "shards" / "model.safetensors.index.json").write_text(content)
    assert find_damage(folder / "shards") == "model.safetensors.index.json is cut off or damaged: it has no weight_map"


def test_pickled_weights_that_are_cut_off(tmp_path):
    """Half an archive and an empty file are damage, an older pickle is none: it would be refused though it loads."""
    file = tmp_path / "pytorch_model.bin"
    for content, whole in ((b"\x80\x02}q\x00.", True), (b"PK\x03\x04 and no more", False), (b"", False)):
        file.write_bytes(content)
        assert (find_damage(tmp_path) is None) == whole
