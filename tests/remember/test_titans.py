"""`remember` on a Titans: fast weights and list beside its own memory."""

import functools

import pytest
import torch
from common import make_model
from families import CHUNK, differences, small_memory
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from titans_hf import TitansForCausalLM, fit_memory, remember, save_adapter

IDS = torch.randint(3, 53, (2, 45), generator=torch.Generator().manual_seed(1))
MODELS = {
    **{variant: {"variant": variant} for variant in ("lmm", "mag", "mal", "mac")},
    "delta": {"variant": "mag", "memory_form": "delta", "tie_word_embeddings": True},
    "paper's mac": {"variant": "mac", "memory_form": "paper"},
}

titans = functools.partial(make_model, vocab_size=53, sliding_window=9, bos_token_id=1)


def with_memory(model: TitansForCausalLM) -> TitansForCausalLM:
    fast, chosen = small_memory(model)
    return remember(model, fast_weights=fast, token_list=chosen)


@pytest.mark.parametrize("name", MODELS)
def test_a_titans_reads_exactly(name):
    """Pieces, padding and a row alone give the logits of the whole; a forgotten Titans is the original to the bit."""
    found = differences(titans(**MODELS[name]), None)
    assert found["learning"] > 0.1
    assert found["forgotten"] == found["generated"] == 0
    assert max(found["pieces"], found["padding"], found["row alone"]) < 1e-12, found


def test_every_weight_is_trained():
    """A loss within the first chunk has a gradient for every weight that it has without `remember`."""
    gradients = []
    for make in (lambda x: x, with_memory):
        model = make(titans(variant="mag")).train()
        model(IDS[:, :CHUNK], labels=IDS[:, :CHUNK], use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    model.zero_grad()
    assert gradients[0].keys() == gradients[1].keys()
    assert all((gradients[1][name] is None) == (x is None) for name, x in gradients[0].items())


def test_a_fit_and_its_adapter(tmp_path):
    """A Titans is fitted without a window, and loads with its adapter by its name."""
    base = titans(variant="lmm").float()
    base.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    documents = [torch.randint(3, 53, (300,), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    fit_memory(model, documents, rank=2, entries=50, progress=False)
    assert model.memory.window is None
    save_adapter(model, tmp_path / "adapter", half=False)
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
        assert_close(loaded(IDS).logits, model(IDS).logits)
