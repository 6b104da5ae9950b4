"""Damaged checkpoints: one line that names the checkpoint and what is wrong with it."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from byte_model import save_byte_model, save_llama
from peft import LoraConfig, get_peft_model

from titans_hf import TitansForSequenceClassification
from titans_hf.cli import merge, read
from titans_hf.cli.serve import check_options
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.training.tokenizer import byte_tokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder: a checkpoint in several files, an adapter of it, and a text."""
    monkeypatch.chdir(tmp_path)
    model = save_byte_model(Path("whole"), "mag")
    model.save_pretrained("model", max_shard_size="20KB")
    adapter = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
    adapter.peft_config["default"].base_model_name_or_path = "model"
    adapter.save_pretrained("adapter")
    for name in ("model", "adapter"):
        byte_tokenizer().save_pretrained(name)
    Path("text.txt").write_text("Es war einmal ein König.")
    return tmp_path


def cut(file: Path) -> str:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return "has damaged weights: "


def of_other_sizes(file: Path) -> str:
    shutil.rmtree("model")
    save_llama(Path("llama"), vocab_size=300)
    shutil.copytree("whole", "model")
    shutil.copy("llama/model.safetensors", "model")
    return "MODEL model has weights of other sizes than its configuration"


def without_head(file: Path) -> str:
    shutil.rmtree("model")
    TitansForSequenceClassification.from_pretrained("whole").save_pretrained("model")
    byte_tokenizer().save_pretrained("model")
    made_as = "it was saved as TitansForSequenceClassification and has no lm_head.weight"
    return f"MODEL model is not a complete TitansForCausalLM: {made_as}"


def configure(**changes):
    """Returns a function that changes fields of the configuration, or without changes leaves half of it."""

    def damage(file: Path) -> str:
        config = file.with_name("config.json")
        fields = json.loads(config.read_text())
        config.write_text(json.dumps(fields | changes) if changes else config.read_text()[:30])
        return "MODEL model is not a checkpoint: its configuration does not load ("

    return damage


@pytest.mark.parametrize("damage", [cut, of_other_sizes, without_head, configure(), configure(hidden_size="x")])
def test_what_is_damaged_is_named(damage, folder, monkeypatch, capsys):
    """A command ends in one line that names the checkpoint and what is wrong with it, before any output."""
    expected = damage(sorted((folder / "model").glob("*.safetensors"))[-1])
    monkeypatch.setattr(sys, "argv", ["read", "model", "text.txt", "--memory", "memory"])
    with pytest.raises(SystemExit) as ended:
        run_command(read.main)
    text = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in text and text.count(": error: ") == 1
    assert expected in text.splitlines()[-1] and not (folder / "memory").exists()


def test_adapters_that_cannot_be_merged(folder):
    """A damaged adapter, one of a damaged model, and one that acts only after its invocation are refused."""
    file = folder / "adapter" / "adapter_config.json"
    whole = file.read_text()
    file.write_text(json.dumps(json.loads(whole) | {"alora_invocation_tokens": [1, 2]}))
    with pytest.raises(ValueError, match="ADAPTER adapter has alora_invocation_tokens"):
        merge.main(["adapter", "out"])
    file.write_text(whole)
    without_head(file)
    with pytest.raises(ValueError, match="ADAPTER adapter: its model model is not a complete TitansForCausalLM"):
        merge.main(["adapter", "out"])
    cut(folder / "adapter" / "adapter_model.safetensors")
    shutil.copytree("whole", "model", dirs_exist_ok=True)
    with pytest.raises(ValueError, match="ADAPTER adapter has damaged weights: "):
        merge.main(["adapter", "out"])
    assert not (folder / "out").exists()


def test_serving_checks_the_checkpoint(folder):
    """`serve` refuses a damaged checkpoint and passes on a whole one, none, and a name."""
    for model in (None, "model", "you/on-the-hub"):
        check_options(model, None, False)
    expected = cut(sorted((folder / "model").glob("*.safetensors"))[0])
    with pytest.raises(ValueError, match=expected):
        check_options("model", None, False)
