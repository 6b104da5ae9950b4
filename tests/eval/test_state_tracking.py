"""eval/studies/state_tracking.py: words have the products of their group, and a repeated command trains nothing."""

import json

import pytest
import torch

from eval.studies import state_tracking as study


@pytest.mark.parametrize("task, size", [("parity", 2), ("s3", 6)])
def test_states_are_products_of_the_group(task, size):
    """A table is a Latin square, associative, and a word's states are its elements one after another."""
    products = study.multiplication(task)
    assert products.shape == (size, size)
    assert all(line.sort().values.equal(torch.arange(size)) for line in (*products, *products.T))
    a, b, c = torch.meshgrid(*3 * [torch.arange(size)], indexing="ij")
    assert products[products[a, b], c].equal(products[a, products[b, c]])
    words, states = study.draw(products, 3, 5, torch.Generator().manual_seed(0))
    assert states[:, 0].equal(words[:, 0])
    assert states[:, 4].equal(products[products[states[:, 1], words[:, 2]], products[words[:, 3], words[:, 4]]])


def test_runs_and_tables(tmp_path, capsys, monkeypatch):
    """A repeated command trains nothing, and the table has a row's accuracy by length."""
    monkeypatch.setattr(study, "SCORED", 2)
    file = tmp_path / "states.jsonl"
    command = ["s3", "llama", "--seeds", "0", "1", "--steps", "2", "--batch_size", "1", "--length", "4"]
    for _ in range(2):
        study.main([*command, "--output", str(file)])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["name"] for line in lines] == [f"s3: llama, rate 0.003, seed {seed}" for seed in (0, 1)]
    for line in lines:
        line["result"]["4"] = 0.25
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    study.main(["--output", str(file)])
    assert "| 2 |" in (report := capsys.readouterr().out) and "0.250 [0.250, 0.250]" in report
    with pytest.raises(ValueError, match="ROW 'rnn' must be one of lmm"):
        study.main(["s3", "rnn", "--output", str(file)])
