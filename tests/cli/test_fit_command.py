"""titans-hf fit: it writes an adapter, from the tokens that were asked for, of all files; interrupted, it goes on."""

import random

import pytest
import torch
from byte_model import save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

import titans_hf
from titans_hf.cli import fit
from titans_hf.cli.shared.text_files import find_files
from titans_hf.cli.training.tokenizer import byte_tokenizer
from titans_hf.remember import adapter
from titans_hf.remember.fit import fit as stages

OPTIONS = ["--tokens=1200", "--length=400", "--window=32", "--rank=2", "--entries=5400", "--device=cpu"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a byte model and texts."""
    monkeypatch.setattr(stages, "NUM_COLUMNS", 200)
    save_llama(tmp_path / "model", num_hidden_layers=4, initializer_range=0.1, bos_token_id=2)
    (tmp_path / "texts").mkdir()
    for i in range(4):
        words = random.Random(i).choices(["der König", "die Tochter", "das Schloss", "der Wald"], k=60)
        (tmp_path / "texts" / f"{i}.txt").write_text(", ".join(words))
    return tmp_path


def test_an_adapter_from_texts(folder, capsys):
    """The command says what it reads and gains, and writes an adapter with its tokenizer that gains on its texts."""
    fit.main([str(folder / "model"), "--text", str(folder / "texts"), "--output", str(folder / "new"), *OPTIONS])
    text = capsys.readouterr().out
    assert "1,200 tokens of text in 3 parts of 4 files" in text
    assert text.count(": gain +") == 2 and text.endswith("new\n")
    model = AutoModelForCausalLM.from_pretrained(folder / "new")
    tokenizer = AutoTokenizer.from_pretrained(folder / "new")
    assert model.memory.window == 32 and tokenizer.chat_template is not None
    ids = tokenizer((folder / "texts" / "1.txt").read_text(), return_tensors="pt").input_ids[:, :400]
    with torch.no_grad():
        fitted = model(ids, labels=ids).loss
        plain = titans_hf.forget(model)(ids, labels=ids).loss
    assert fitted < plain - 0.5
    assert sorted(x.name for x in folder.iterdir()) == ["model", "new", "texts"]


def test_a_full_disk_at_the_end(folder, monkeypatch):
    """After a stop while it writes the adapter, the same command goes on by the state of its fit."""
    arguments = [str(folder / "model"), "--text", str(folder / "texts"), "--output", str(folder / "new"), *OPTIONS]

    def full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(adapter, "write_card", full)
        fit.main(arguments)
    assert not (folder / "new").exists()
    monkeypatch.setattr(stages, "_sketches", full)  # the directions are not fitted again
    fit.main(arguments)
    assert AutoModelForCausalLM.from_pretrained(folder / "new").memory.window == 32
    assert sorted(x.name for x in folder.iterdir()) == ["model", "new", "texts"]


@pytest.mark.parametrize("number,characters", [(1, 9000), (9, 900), (300, 50), (40, None)])
def test_as_many_tokens_as_asked_for(tmp_path, number, characters):
    """The texts have as many tokens as asked for, from every file where each has to give; other seeds draw others."""
    for i in range(number):
        size = characters or (9000 if i == number - 1 else 20)
        (tmp_path / f"{i:03}.txt").write_text("".join(random.Random(i).choices("abcdefgh ", k=size)))
    files, tokenizer = find_files(tmp_path, "--text"), byte_tokenizer()
    parts = fit.cut_texts(files, tokenizer, 500, 6000, seed=0)
    assert sum(map(len, parts)) == 6000 and max(map(len, parts)) <= 500
    texts = [x.read_text() for x in files]
    found = {i for part in parts for i, text in enumerate(texts) if tokenizer.decode(part) in text}
    assert len(found) == (number if characters != 50 else 120)
    same, other = (fit.cut_texts(files, tokenizer, 500, 6000, seed=seed) for seed in (0, 1))
    assert all(map(torch.equal, parts, same)) and not all(map(torch.equal, parts, other))
