"""The study of memories behind the last layer: what the ring returns, and the gain of each memory on a text that it can
learn.
"""

import json
from argparse import Namespace

import pytest
import torch

from eval.studies.memory_on_pretrained import Ring, main


def text_of(length: int, seed: int = 0) -> dict:
    """A text with random arrays."""
    torch.manual_seed(seed)
    ids = torch.randint(5, (length + 1,))
    return {
        "y": torch.randn(length, 8),
        "loss": 5 * torch.rand(length),
        "ent": torch.rand(length),
        "ids": ids,
        "next": ids[1:],
    }


def test_ring_equals_a_loop_over_entries():
    """The memory's distribution is the softmax over the newest N tokens whose loss was at least the threshold."""
    text, at = text_of(40), torch.arange(40)
    ring = Ring(Namespace(entries=6, key_size=4, threshold=2.0), torch.ones(8), torch.eye(8))
    m, features, has_entries = ring.score(text, ring.prepare(text), at)
    keys = [x / x.norm() for x in (text["y"] - 1)[:, 4:]]
    for t in range(40):
        entries = [i for i in range(t) if text["loss"][i] >= 2][-6:]
        assert bool(has_entries[t]) == bool(entries)
        if entries:
            weights = torch.stack([12 * keys[t] @ keys[i] for i in entries]).softmax(0)
            right = [w for w, i in zip(weights, entries, strict=True) if text["next"][i] == text["next"][t]]
            torch.testing.assert_close(m[t], sum(right, torch.tensor(0.0)))
            torch.testing.assert_close(features[t, 3] * 5, torch.tensor(float(len(entries))).log())


@pytest.mark.parametrize("memory", ["ring", "cache", "counts", "deep"])
def test_every_memory_gains_on_a_text_that_repeats(tmp_path, memory):
    """A text that repeats 40 tokens, each with a hidden state of its own, and surprises the model at every one."""
    torch.manual_seed(0)
    y, length = torch.randn(40, 32), 321
    ids = (torch.arange(length + 1) % 40).int()
    arrays = {"ids": ids[None, :-1], "y": y[ids[:-1].long()][None].half()}
    arrays |= {"loss": torch.full((1, length), 5.0), "ent": torch.ones(1, length)}
    for name in ("train", "valid", "test"):
        torch.save(arrays, tmp_path / f"{name}.pt")
    options = [
        "--memory",
        memory,
        "--entries",
        "64",
        "--key_size",
        "16",
        "--steps",
        "1",
        "--output",
        str(tmp_path / "lines"),
    ]
    main([str(tmp_path), *options])
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [line["data"] for line in lines] == ["valid", "test"]
    assert all(line["result"]["all"] > 0.3 for line in lines)
