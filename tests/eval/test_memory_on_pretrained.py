"""The study of memories behind the last layer: the gain of each memory on a text that it can learn."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from eval.studies.memory_on_pretrained import main
from eval.studies.read_pretrained import read_text
from titans_hf import TitansCache, TitansConfig, TitansForCausalLM


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
    """Every memory gains, and a line for each seed names what was fitted; a window needs no other set."""
    if memory == "window":
        (folder / "train.pt").unlink()
    options = ["--memory", memory, "--entries=64", "--key_size=16", "--steps=1", "--sets", "test", "--seeds", "0", "1"]
    options += ["--wider", str(folder / "wider"), "--output", str(folder / "lines"), "--stride=1"]
    main([str(folder / "model"), str(folder), *options])
    lines = [json.loads(line) for line in (folder / "lines").read_text().splitlines()]
    assert [(line["data"], line["seed"]) for line in lines] == [("test", 0), ("test", 1)]
    assert all(line["result"]["all"] > 0.2 for line in lines)
    assert ("entry_weight" in lines[0]["config"]) == (memory == "episodic")


def test_steps_while_reading():
    """A call is read by the weights that a step on each call before it has left; the weights are put back."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, vocab_size=64, num_hidden_layers=2, num_attention_heads=2, memory_layers=[])
    model = TitansForCausalLM(TitansConfig(variant="mag", sliding_window=8, num_persistent_tokens=0, **sizes)).eval()
    trained, ids = {name: x.clone() for name, x in model.state_dict().items()}, torch.randint(64, (30,))
    plain, stepped = read_text(model, ids, 12), read_text(model, ids, 12, 0.5)
    assert all(torch.equal(x, trained[name]) for name, x in model.state_dict().items())
    assert torch.equal(plain["top"], model(ids[None]).logits[0].argmax(-1))
    assert torch.equal(stepped["loss"][:12], plain["loss"][:12]) and stepped["loss"][-1].isnan()
    cache = TitansCache(model.config)
    for start, end in ((0, 12), (12, 24), (24, 29)):
        loss = cross_entropy(
            model(ids[None, start:end], cache=cache, use_cache=True).logits[0],
            ids[start + 1 : end + 1],
            reduction="none",
        )
        torch.testing.assert_close(stepped["loss"][start:end], loss.detach())
        model.zero_grad()
        loss.mean().backward()
        with torch.no_grad():
            for x in model.parameters():
                x -= 0.5 * x.grad
        cache.detach()
    assert not torch.allclose(stepped["loss"][12:29], plain["loss"][12:29])
