"""A saved memory is loaded as it was, by its model alone, and holds nothing of rows that were reset."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from families import PASSAGES, as_double
from families import small_model as small_family
from remember_models import TOKENS, close, remembering
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from titans_hf import MemoryCache, remember

FAMILIES = ("llama", "qwen3_next")


@pytest.fixture(scope="module")
def model():
    return remembering()


def test_files(model, tmp_path):
    """A memory goes on as it would have, and so does the prompt that was begun."""
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


# What is changed in the tensors of a folder, by their names, with its checksum: no cache has it.
CRAFTED = {
    "ids before a row's first token": ("text", lambda x: x.index_fill(1, torch.tensor([40]), -1)),
    "ids of -2": ("text", lambda x: x - 60),
    "ids beyond the vocabulary": ("text", lambda x: x + 53),
    "ids as int64": ("text", torch.Tensor.long),
    "ids of one row": ("text", lambda x: x[:1]),
    "fewer ids than seen": ("text", lambda x: x[:, 5:]),
    "more ids than seen": ("text", lambda x: torch.cat([x, x], 1)),
    "ids with three dimensions": ("text", lambda x: x[..., None]),
    "no ids": ("text", None),
    "seen of 2**61": ("seen", lambda x: x + 2**61),
    "seen of 2**40": ("seen", lambda x: x + 2**40),
    "seen below 0": ("seen", lambda x: x - 100),
    "seen of 0": ("seen", lambda x: x * 0),
    "fewer seen than ids": ("seen", lambda x: x - 1),
    "seen as float64": ("seen", torch.Tensor.double),
    "seen of one row": ("seen", lambda x: x[:1]),
    "a prompt longer than the text": ("asked", lambda x: x + 1),
    "a prompt below 0": ("asked", lambda x: x * 0 - 1),
    "a column that was not read": ("first_column", lambda x: x + 2**50),
    "keys that are not finite": ("0.keys", lambda x: x * torch.inf),
    "keys that are no numbers": ("0.values", lambda x: x * torch.nan),
    "more keys": ("0.keys", lambda x: torch.cat([x] * 3, 2)),
    "fewer keys": ("0.keys", lambda x: x[:, :, 1:]),
    "no keys": ("2.keys", None),
    "keys as float32": ("0.keys", torch.Tensor.float),
    "another layer": ("9.keys", lambda x: torch.zeros(2)),
}


def crafted(folder: Path, name: str, change) -> None:
    """Replaces a tensor of a folder, with a right checksum; None removes it."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    old = tensors.pop(name, None)
    if change is not None:
        tensors[name] = change(old).contiguous()
    save_file(tensors, file, about)
    path = folder / "memory.json"
    description = json.loads(path.read_text())
    description |= {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "bytes": file.stat().st_size}
    path.write_text(json.dumps(description))


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_files(name, model, tmp_path):
    """Tensors that no cache has, under right checksums, are one ValueError that names the folder, not a later fault."""
    cache = MemoryCache(model)
    with torch.no_grad():
        model(TOKENS[:2, :45], cache=cache)
    cache.save_pretrained(tmp_path, model)
    crafted(tmp_path, "seen", lambda x: x)
    assert MemoryCache.from_pretrained(tmp_path, model).seen.tolist() == [45, 45]
    crafted(tmp_path, *CRAFTED[name])
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be loaded"):
        MemoryCache.from_pretrained(tmp_path, model)


def test_a_folder_of_a_former_kind(model, tmp_path):
    """A memory with fast weights or a list is refused by a line that says what to do."""
    MemoryCache(model).save_pretrained(tmp_path, model)
    path = tmp_path / "memory.json"
    description = json.loads(path.read_text())
    description["model"]["memory"] = "0" * 64
    path.write_text(json.dumps(description))
    with pytest.raises(ValueError, match="of a former kind, with fast weights or a list: read its texts again"):
        MemoryCache.from_pretrained(tmp_path, model)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_were_reset(family, tmp_path):
    """What was reset, or has begun a document, is saved as what has never read the text before."""
    model, ids = remember(small_family(family), 12, passages=PASSAGES), TOKENS[:2, :30]
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
            for x, y in ((found[0][x], found[1][x]) for x in found[1] if x not in ("first_column", "asked")):
                assert_close(x, y, atol=1e-9, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
