"""How many kernels a GPU would be asked for, counted on a CPU: the host, not the GPU, sets the speed of a memory there.

Figures are upper bounds. A change that needs fewer launches lowers them.
"""

import pytest
import torch
from launches import Launches, count

from titans_hf import TitansConfig, TitansForCausalLM, memory_ops, token_grid

SIZES = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=256, tie_word_embeddings=True)


def make(num_layers: int, **changes) -> TitansForCausalLM:
    torch.manual_seed(0)
    return TitansForCausalLM(TitansConfig(**dict(variant="mag") | SIZES | changes, num_hidden_layers=num_layers)).eval()


def draw(length: int) -> torch.Tensor:
    return torch.randint(2, 256, (1, length))


@torch.no_grad()
def read(model, length: int) -> Launches:
    return count(lambda: model(draw(length), use_cache=False, logits_to_keep=1))


def train(model, length: int) -> Launches:
    ids = draw(length)
    return count(lambda: model(ids, labels=ids, use_cache=False).loss.backward())


FORMS = [(read, "titans", 51, 248), (train, "titans", 157.125, 895), (train, "delta", 51.875, 556)]


@pytest.mark.parametrize("run,form,of_chunk,fixed", FORMS)
def test_launches_of_a_layer(run, form, of_chunk, fixed):
    """The launches of a layer for 64 tokens more, and for a call; none makes the host wait."""
    counts = [[run(make(layers, memory_form=form), length) for layers in (1, 2)] for length in (1024, 2048)]
    assert not any(x.reads for pair in counts for x in pair)
    short, long = (two.total - one.total for one, two in counts)
    assert (long - short) / 16 <= of_chunk and 2 * short - long <= fixed


def test_launches_in_groups_of_a_gpu(monkeypatch):
    """The launches and triangular systems of a layer in training, in groups as large as on a GPU."""
    monkeypatch.setitem(memory_ops.GROUP_SIZES, "cpu", memory_ops.GROUP_SIZES["cuda"])
    one, two = (train(make(layers), 2048) for layers in (1, 2))
    assert two.total - one.total <= 3571 and two.solves - one.solves <= 36


def test_launches_of_a_token():
    """The launches of one more token in twelve layers."""

    def of_layers(number: int) -> int:
        model = make(number)
        with torch.no_grad():
            cache = model(draw(100), use_cache=True).cache
            model(draw(1), cache=cache)
            return count(lambda: model(draw(1), cache=cache)).total

    one = of_layers(1)
    assert one + 11 * (of_layers(2) - one) <= 1364


@torch.no_grad()
def test_reads_of_a_call(monkeypatch):
    """A mask on a device makes the host wait for nothing, with padding or without; a cache for one value."""
    model, ids, padded = make(2), torch.randint(2, 256, (2, 100)), torch.ones(2, 100, dtype=torch.int64)
    padded[1, :30] = 0
    calls = [(mask, before) for mask in (None, torch.ones_like(padded), padded) for before in (0, 70)]

    def read(mask, before: int) -> tuple[torch.Tensor, int]:
        cache = model(ids[:, :before], use_cache=True).cache if before else None
        results = []
        reads = count(lambda: results.append(model(ids, attention_mask=mask, cache=cache).logits)).reads
        return results[0] if mask is None else results[0] * mask[..., None], reads

    expected = [read(*call)[0] for call in calls]
    monkeypatch.setattr(token_grid, "makes_host_wait", lambda x: True)
    for (mask, before), logits in zip(calls, expected, strict=True):
        found, reads = read(mask, before)
        assert reads <= bool(before)
        torch.testing.assert_close(found, logits)
