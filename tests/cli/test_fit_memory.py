"""titans-hf fit-memory: it writes a checkpoint with a fitted memory, from texts and conversations."""

import random

import pytest
import torch
from byte_model import save_byte_model
from covering import in_one_test
from transformers import AutoTokenizer

import titans_hf
from titans_hf.cli import fit_memory
from titans_hf.cli.training.tokenizer import byte_tokenizer

OPTIONS = ["--tokens=3000", "--length=1000", "--recalls=2", "--entries=50", "--device=cpu"]


@pytest.fixture
def model(tmp_path):
    """The folder of a byte model without a memory behind its last layer, and a folder of texts."""
    save_byte_model(tmp_path / "model", "mag")
    (tmp_path / "texts").mkdir()
    for i in range(2):
        words = random.Random(i).choices(["der König", "die Tochter", "das Schloss", "der Wald"], k=300)
        (tmp_path / "texts" / f"{i}.txt").write_text(", ".join(words))
    return tmp_path


def test_a_fitted_checkpoint(model, capsys):
    """The output loads with a memory of the size asked for, whose keys and gate are fitted, and with the weights of the
    model; the command prints the loss without the memory and with it.
    """
    output = model / "fitted"
    fit_memory.main([str(model / "model"), "--text", str(model / "texts"), "--output", str(output), *OPTIONS])
    text = capsys.readouterr().out
    assert "2,997 tokens of text: loss" in text and text.count("+") >= 2 and text.endswith(f"{output}\n")
    fitted = titans_hf.TitansForCausalLM.from_pretrained(output)
    original = titans_hf.TitansForCausalLM.from_pretrained(model / "model").state_dict()
    memory = fitted.model.episodic_memory
    assert fitted.config.token_memory_entries == 50 and memory.gate_weight.any() and memory.center.any()
    assert all(torch.equal(x, original[name]) for name, x in fitted.state_dict().items() if name in original)
    assert AutoTokenizer.from_pretrained(output)("abc").input_ids == byte_tokenizer()("abc").input_ids


def test_answers_have_their_share():
    """All answers together weigh as much as their share of the texts says."""
    tokenizer = byte_tokenizer()
    parts = [torch.arange(100), torch.arange(60)]
    documents, weights = fit_memory.make_documents(parts, tokenizer, 3, 0.25, seed=0)
    assert len(documents) == 5 and all(len(a) == len(b) for a, b in zip(documents, weights, strict=True))
    heavy = [x[x != 1] for x in weights[2:]]
    assert sum(x.sum() for x in heavy).item() == pytest.approx(0.25 * 160) and all(map(len, heavy))


@in_one_test("arguments,message", [
    (["--entries=0"], "--entries must be at least 1"),
    (["--text", "nowhere"], "--text nowhere does not exist"),
    (["--threshold=-1"], "--threshold must be at least 0, but is -1"),
])  # fmt: skip
def test_bad_arguments(model, arguments, message):
    """A wrong option is refused by name, before the model reads."""
    given = [str(model / "model"), "--text", str(model / "texts"), "--output", str(model / "new"), *OPTIONS]
    with pytest.raises(Exception, match=message):
        fit_memory.main([*given, *arguments])
    assert not (model / "new").exists()
    with pytest.raises(ValueError, match="exists: give the name of a new folder"):
        fit_memory.main([*given, "--output", str(model)])
