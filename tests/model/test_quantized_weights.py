"""eval/studies/quantized_weights.py: rows are compared with the model in float32."""

import math

import torch
from byte_model import save_byte_model
from torch.nn.functional import cross_entropy

from eval.studies import quantized_weights
from titans_hf.cli.training.tokenizer import byte_tokenizer


def test_rows_are_compared_with_float32(tmp_path, monkeypatch):
    """The first row is the model's own loss without divergence, and bfloat16 diverges."""
    settings = [*quantized_weights.settings([])]
    monkeypatch.setattr(quantized_weights, "settings", lambda bits: settings[:2])  # they need no quantiser
    model = save_byte_model(tmp_path / "model", "mag")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("Es war einmal ein König. " * 20)
    table = quantized_weights.main([str(tmp_path / "model"), "--text", str(tmp_path / "texts"), "--length", "96"])
    _, _, first, other = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    ids = quantized_weights.stretches_of(tmp_path / "texts", byte_tokenizer(), 96, 1)
    with torch.no_grad():
        bits = cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]).item() / math.log(2)
    assert first == ["float32", f"{bits:.4f}", "0.0e+00", "0.0e+00"]
    assert other[0] == "bfloat16" and float(other[2]) > 0


def test_divergence_of_the_last_eighth():
    """The last column averages the last eighth of the tokens alone."""
    reference = torch.full((1, 16, 2), 0.5).log()
    found = reference.clone()
    found[:, -2:] = torch.tensor([0.25, 0.75]).log()
    late = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    _, mean, last = quantized_weights.measure(found, reference, torch.zeros(1, 16, dtype=torch.long))
    assert (mean, last) == (f"{late / 8:.1e}", f"{late:.1e}")
