"""read, ask and surprise take any causal language model: it gets a memory."""

import pytest
import torch
from remember_models import small_model
from transformers import AutoModelForCausalLM

from titans_hf.cli import ask, read
from titans_hf.cli.training.tokenizer import byte_tokenizer
from titans_hf.recalling import MemoryCache, remember

TEXTS = ["The old king had twelve daughters. ", "One of them kept a black dog, and the dog a bone."]
PROMPT = "The old king had"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a small Llama of bytes and two texts."""
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    small_model(vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id).float().save_pretrained("llama")
    tokenizer.save_pretrained("llama")
    for name, text in zip("ab", TEXTS, strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "c.txt").write_text("a" + 49 * "b")
    return tmp_path


def continuation(text: str) -> str:
    tokenizer, model = byte_tokenizer(), AutoModelForCausalLM.from_pretrained("llama").eval()
    ids = tokenizer(text, return_tensors="pt").input_ids
    model = remember(model, 16)
    cache = MemoryCache(model)
    with torch.no_grad():
        model(ids[:, : -len(PROMPT)], cache=cache)
    made = model.generate(ids, cache=cache, max_new_tokens=9, do_sample=False)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_read_and_ask(folder, capsys):
    """An answer is that of a model that has just read the texts; a reading goes on where it ended."""
    options = ["--memory", "memory", "--window", "16"]
    read.main(["llama", "a.txt", *options])
    read.main(["llama", "a.txt", "b.txt", *options])
    capsys.readouterr()
    ask.main(["llama", *options, "--prompt", PROMPT, "--max_new_tokens", "9"])
    assert capsys.readouterr().out == f"{PROMPT}{continuation(chr(10).join(TEXTS) + PROMPT)}\n"


def test_ask_shows_the_passage(folder, capsys):
    """The passages that an answer saw hold the place of the text in which the prompt stands."""
    (folder / "long.txt").write_text(f"{TEXTS[1]} {TEXTS[0]}" + "He wrote 17 letters, 9 of them by night. " * 9)
    options = ["--memory", "memory", "--window", "16"]
    read.main(["llama", "long.txt", *options])
    capsys.readouterr()
    ask.main(["llama", *options, "--prompt", PROMPT, "--max_new_tokens", "9", "--show_passage"])
    shown, text = capsys.readouterr().out.split("]\n", 1)
    assert shown.startswith("[read again: ") and TEXTS[0] in shown and text.startswith(PROMPT)
