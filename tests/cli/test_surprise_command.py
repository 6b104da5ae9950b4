"""titans-hf surprise: the picture shows what the memory did at each token, a layer in colours of its own."""

import pytest
import torch
from byte_model import save_byte_model

from titans_hf.cli import surprise
from titans_hf.cli.training.tokenizer import byte_tokenizer

TEXT = "Es war <einmal> ein König: </s> 東京 ist weit.\n" * 4


def test_the_picture_shows_each_tokens_surprise(tmp_path, monkeypatch):
    """A panel for each quantity, with the model's own values: read by pieces as in one call, and `</s>` as text."""
    monkeypatch.setattr(surprise, "TOKENS_OF_A_CALL", 50)
    model = save_byte_model(tmp_path / "model", "mag", memory_form="paper", memory_max_lr=0.01)
    text, drawn, draw = tmp_path / "$a_{b\nlines.txt", [], surprise.draw
    text.write_bytes(TEXT.replace("\n", "\r\n").encode())
    monkeypatch.setattr(surprise, "draw", lambda *x: drawn.append(x[2]) or draw(*x))
    surprise.main([str(tmp_path / "model"), str(text), "--output", str(tmp_path)])
    ids = byte_tokenizer()(TEXT, split_special_tokens=True, return_tensors="pt").input_ids
    with torch.no_grad():
        measured = model(ids, output_surprise=True).surprise
    for quantity, layers in zip(surprise.QUANTITIES, drawn[0], strict=True):
        expected = torch.stack([getattr(layer, quantity)[0].mean(0) for layer in measured])
        assert layers == pytest.approx(expected.numpy(), rel=1e-3)
    assert (tmp_path / "surprise.png").stat().st_size > 10_000
