"""The study of memories behind the last layer: the gain of each memory on a text that it can learn."""

import json

import pytest
import torch

from eval.studies.memory_on_pretrained import main
from titans_hf import TitansConfig, TitansForCausalLM


@pytest.fixture
def folder(tmp_path):
    """A text that repeats 40 tokens, each with states of its own, and surprises a new model at every token."""
    torch.manual_seed(0)
    config = TitansConfig(hidden_size=32, vocab_size=64, num_hidden_layers=1, num_attention_heads=2)
    TitansForCausalLM(config).save_pretrained(tmp_path / "model")
    y, length = torch.randn(40, 32), 321
    ids = (torch.arange(length + 1) % 40).int()
    arrays = {"ids": ids[None, :-1], **{name: y[ids[:-1].long()][None].bfloat16() for name in ("y", "h")}}
    arrays |= {"loss": torch.full((1, length), 5.0), "ent": torch.ones(1, length)}
    for name in ("train", "valid", "test"):
        torch.save(arrays, tmp_path / f"{name}.pt")
    (tmp_path / "wider").mkdir()
    torch.save(arrays | {"loss": torch.full((1, length), 4.0)}, tmp_path / "wider" / "test.pt")
    return tmp_path


@pytest.mark.parametrize("memory", ["episodic", "cache", "counts", "deep", "window"])
def test_every_memory_gains_on_a_text_that_repeats(folder, memory):
    """Every memory gains, and a line for each seed names what was fitted."""
    options = ["--memory", memory, "--entries=64", "--key_size=16", "--steps=1", "--sets", "test", "--seeds", "0", "1"]
    options += ["--wider", str(folder / "wider"), "--output", str(folder / "lines"), "--stride=1"]
    main([str(folder / "model"), str(folder), *options])
    lines = [json.loads(line) for line in (folder / "lines").read_text().splitlines()]
    assert [(line["data"], line["seed"]) for line in lines] == [("test", 0), ("test", 1)]
    assert all(line["result"]["all"] > 0.2 for line in lines)
    assert ("entry_weight" in lines[0]["config"]) == (memory == "episodic")
