"""How many kernels a GPU would be asked for, counted on a CPU: the host, not the GPU, sets the speed of a memory there.

Figures are upper bounds. A change that needs fewer launches lowers them.
"""

import itertools

import pytest
import torch
from launches import Launches, count
from remember_models import TOKENS, remembering

from titans_hf import MemoryCache, TitansConfig, TitansForCausalLM, memory_rule, token_grid

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


@torch.no_grad()
def decode(model) -> Launches:
    cache = model(draw(100), use_cache=True).cache
    return [count(lambda ids=ids: model(ids, cache=cache)) for ids in draw(3).split(1, dim=1)][-1]


# The form; tokens of a piece; of a layer: launches for 64 tokens more and for a call
FORMS = [
    (read, {}, 512, 15, 260),
    (train, {}, 512, 51, 709),
    (train, {}, 4096, 16, 973),
    (train, dict(memory_form="delta"), 4096, 16, 770),
]


@pytest.mark.parametrize("run,form,piece,of_chunk,fixed", FORMS)
def test_launches_of_a_layer(run, form, piece, of_chunk, fixed, monkeypatch):
    """The launches of a layer, in pieces as on a CPU or as on a GPU; none makes the host wait."""
    monkeypatch.setitem(memory_rule.PIECE, "cpu", piece)
    counts = [[run(make(layers, **form), length) for layers in (1, 2)] for length in (2048, 4096)]  # whole pieces
    assert not any(x.reads for pair in counts for x in pair)
    (one, two), (first, second) = counts
    short, long = two.total - one.total, second.total - first.total
    assert (long - short) / 32 <= of_chunk and 2 * short - long <= fixed


@torch.no_grad()
def test_reads_of_a_call(monkeypatch):
    """A mask on a device makes the host wait for nothing, with padding or without; a cache for one value."""
    model, ids, padded, found = make(2), torch.randint(2, 256, (2, 100)), torch.ones(2, 100).long(), []
    padded[1, :30] = 0
    for waits in (False, True):
        monkeypatch.setattr(token_grid, "makes_host_wait", lambda x, waits=waits: waits)
        for mask, before in itertools.product((None, torch.ones_like(padded), padded), (0, 70)):
            cache = model(ids[:, :before], use_cache=True).cache if before else None
            reads = count(lambda m=mask, c=cache: found.append(model(ids, m, cache=c).logits * padded[..., None])).reads
            assert not waits or reads <= bool(before)
    torch.testing.assert_close(found[6:], found[:6])


@torch.no_grad()
def test_remember_reads_nothing():
    """A text is read with no value of a device: tensors of "meta" have none. The host counts by itself."""
    cache = MemoryCache(model := remembering().to("meta"))
    assert all(model(ids, cache=cache).logits.is_meta for ids in TOKENS.to("meta").split([40, 1, 7, 42], dim=1))
