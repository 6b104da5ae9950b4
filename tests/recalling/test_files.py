"""A saved memory is loaded as it was, by its model alone, and holds nothing of rows that were reset."""

import copy

import pytest
import torch
from families import as_double, small_memory
from families import small_model as small_family
from remember_models import TOKENS, close, remembering, small_fast_weights, small_model
from safetensors.torch import load_file
from test_titans import titans
from torch.testing import assert_close

from titans_hf.remember import MemoryCache, remember
from titans_hf.remember.files import memory_fingerprint

FAMILIES = ("llama", "llama, full attention", "qwen3_next", "titans")


@pytest.fixture(scope="module")
def model():
    return remembering()


def of_family(name: str):
    """A small model of a family, with a memory."""
    family, _, full = name.partition(", ")
    model = titans(variant="mac") if family == "titans" else small_family(family)
    fast, chosen = small_memory(model)
    return remember(model, None if full or family == "titans" else 12, fast_weights=fast, token_list=chosen)


def test_files(model, tmp_path):
    """A memory that was saved in the middle of a chunk goes on as it would have."""
    cache = MemoryCache(model)
    with torch.no_grad():
        model(TOKENS[:2, :45], cache=cache)
        cache.about["texts"] = ["a"]
        cache.save_pretrained(tmp_path, model)
        loaded = MemoryCache.from_pretrained(tmp_path, model)
        close(model(TOKENS[:2, 45:], cache=loaded).logits, model(TOKENS[:2, 45:], cache=cache).logits, atol=0)
    assert loaded.get_seq_length() == 90 and loaded.about == {"texts": ["a"]}
    cache.activate_past_recording()
    with torch.no_grad():
        cache.save_pretrained(tmp_path, model)
        model(TOKENS[:2, :3], cache=cache)
        cache.save_pretrained(tmp_path, model)
        cache.crop(-2)
        cache.save_pretrained(tmp_path, model)
        loaded = MemoryCache.from_pretrained(tmp_path, model)
        loaded.activate_past_recording()  # as the other cache: a call is then cut at the same columns
        close(model(TOKENS[:2], cache=loaded).logits, model(TOKENS[:2], cache=cache).logits, atol=0)
    MemoryCache(model).save_pretrained(tmp_path / "new", model)
    assert not len(MemoryCache.from_pretrained(tmp_path / "new", model).seen)
    description = tmp_path / "memory.json"
    description.write_text(description.read_text().replace('"about"', '"of"'))
    with pytest.raises(ValueError, match=f"{tmp_path}.*lacks 'about'"):
        MemoryCache.from_pretrained(tmp_path, model)
    other = remembering(window=14)
    with pytest.raises(ValueError, match=f"{tmp_path}.*window"):
        MemoryCache.from_pretrained(tmp_path, other)


def test_crafted_files(model, tmp_path):
    """Tensors that no cache has, under right checksums, are one ValueError that names the folder, not a later fault."""
    cache = MemoryCache(model)
    with torch.no_grad():
        model(TOKENS[:2, :45], cache=cache)
    changes = {
        "fewer columns": lambda x: setattr(x.layers[0], "keys", x.layers[0].keys[..., 1:, :]),
        "no layer": lambda x: setattr(x.layers[2], "is_initialized", False),
        "a token beyond the vocabulary": lambda x: x.state.update({"chunk.ids": x.state["chunk.ids"] + 53}),
        "negative counts": lambda x: setattr(x, "seen", x.seen - 100),
        "no steps": lambda x: setattr(x, "steps", x.steps[:1]),
    }
    for name, change in changes.items():
        crafted, folder = copy.copy(cache), tmp_path / name.replace(" ", "-")
        change(crafted)
        crafted.save_pretrained(folder, model)
        with pytest.raises(ValueError, match="cannot be loaded"):
            MemoryCache.from_pretrained(folder, model)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_were_reset(family, tmp_path):
    """What was reset, or has begun a document, is saved as what has never read the text before."""
    model, ids = of_family(family), TOKENS[:2, :30]
    none, new = torch.zeros(2, 6, dtype=torch.int64), torch.arange(6).expand(2, 6) % 3
    mask = torch.tensor([[0], [1]])

    begin = lambda c: model(TOKENS[:2, :6], position_ids=new, cache=c)  # noqa: E731
    changes = {
        "a row": (lambda c: c.reset_rows(model, torch.tensor([0])), lambda c: model(ids, mask.expand(2, 30), cache=c)),
        "rows": (lambda c: c.reset_rows(model, torch.tensor([0, 1])), lambda c: model(ids[:, :6], none, cache=c)),
        "documents": (begin, lambda c: model(TOKENS[:2, 3:6], cache=c)),
        "all": (MemoryCache.reset, lambda c: None),
    }
    with torch.no_grad(), as_double():
        for name, (change, expected) in changes.items():
            caches = MemoryCache(model), MemoryCache(model)
            model(ids, cache=caches[0])
            change(caches[0])
            expected(caches[1])
            found = []
            for i, cache in enumerate(caches):
                cache.save_pretrained(folder := tmp_path / f"{name} {i}", model)
                found.append(load_file(*folder.glob("*.safetensors")))
                loaded = MemoryCache.from_pretrained(folder, model)
                rest = [model(TOKENS[:2, 40:60], cache=x).logits for x in (loaded, cache)]
                close(*rest, atol=0)
            assert found[0].keys() - found[1].keys() <= {x for x in found[0] if ".start." in x}, name
            for x, y in ((found[0][x], found[1][x]) for x in found[1] if x != "first_column"):
                assert_close(x, y, atol=1e-9, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def test_the_order_of_the_fast_weights():
    """A memory does not depend on the order in which its fast weights were made: files have them in another order."""
    found = []
    for reverse in (False, True):
        model = small_model()
        fast = small_fast_weights(model)
        for name in ("directions", "rates", "outputs", "start"):
            setattr(fast, name, dict(sorted(getattr(fast, name).items(), reverse=reverse)))
        fast.step.max_gradient = 0.01
        remember(model, 12, ("fast_weights",), fast_weights=fast)
        with torch.no_grad():
            found.append((memory_fingerprint(model), model(TOKENS).logits))
    assert found[0][0] == found[1][0] and found[0][1].equal(found[1][1])
