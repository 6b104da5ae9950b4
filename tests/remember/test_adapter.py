"""Adapter folders: they load on their base model, by `remember` and by `AutoModelForCausalLM`, or say why not."""

import json
import math
import re

import pytest
import torch
from huggingface_hub import ModelCard
from remember_models import small_fast_weights, small_list, small_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from titans_hf import forget, remember, save_adapter
from titans_hf.remember import adapter as adapter_module
from titans_hf.remember.adapter import WEIGHTS
from titans_hf.remember.files import memory_fingerprint

IDS = torch.randint(3, 53, (2, 60), generator=torch.Generator().manual_seed(0))
FIT = {"texts": "novels", "tokens": 90_000, "seed": 3}


@pytest.fixture
def base(tmp_path):
    """The folder of a base model."""
    small_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def model(base):
    """The base model with a memory, whose fast weights have a start."""
    model = AutoModelForCausalLM.from_pretrained(base)
    fast = small_fast_weights(model)
    generator = torch.Generator().manual_seed(1)
    fast.start = {x: torch.randn(n, len(fast.directions[x]), generator=generator) / 9 for x, n in fast.outputs.items()}
    for parts in (fast.directions, fast.start):
        parts.update({name: x.float() for name, x in parts.items()})
    chosen = small_list()
    chosen.center, chosen.projection = chosen.center.float(), chosen.projection.float()
    return remember(model, 12, fast_weights=fast, token_list=chosen)


@pytest.fixture
def adapter(model, tmp_path):
    """The folder of the model's adapter."""
    save_adapter(model, tmp_path / "adapter", fit=FIT, licence="apache-2.0", half=False)
    return tmp_path / "adapter"


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def test_an_adapter_gives_the_same_model(model, base, adapter):
    """An adapter, loaded in any way, reads as its model did; the loaded model is the base, and can be forgotten."""
    expected = logits(model)
    by_name = AutoModelForCausalLM.from_pretrained(adapter, dtype=torch.float64, device_map="cpu")
    by_hand = remember(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64), adapter=adapter)
    for loaded in (by_name, by_hand):
        torch.testing.assert_close(logits(loaded), expected.to(loaded.dtype), rtol=0, atol=1e-6)
        assert loaded.memory.fast_weights.step == model.memory.fast_weights.step and loaded.memory.window == 12
    assert AutoModelForCausalLM.from_pretrained(adapter, window=5).memory.window == 5
    assert torch.equal(logits(forget(by_name)), logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)))
    only = remember(forget(by_hand), None, ("list",), adapter=adapter)
    assert only.memory.fast_weights is None and only.memory.window is None


def test_an_adapter_of_a_relative_path(base, tmp_path, monkeypatch):
    """An adapter whose base model was loaded by a relative path loads in another working directory."""
    monkeypatch.chdir(tmp_path)
    model = remember(AutoModelForCausalLM.from_pretrained(base.name), 12)
    save_adapter(model, "adapter", half=False)
    monkeypatch.chdir("/")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")), logits(model))


def test_settings_and_place_of_an_adapter(adapter):
    """A field of the configuration that is given replaces the adapter's, and a subfolder may hold the adapter."""
    given = {"step": {"chunk": 4}, "token_list": {"entries": 7}, "subfolder": adapter.name}
    memory = AutoModelForCausalLM.from_pretrained(adapter.parent, **given).memory
    assert (memory.fast_weights.step.chunk, memory.token_list.entries, memory.window) == (4, 7, 12)


def test_what_a_folder_holds(model, base, adapter, tmp_path):
    """An adapter has no weight of the base model; float16 halves it; its config and card state base, fit, licence."""
    parts = model.memory.fast_weights
    number = sum(x.numel() for x in (*parts.directions.values(), *parts.start.values()))
    assert (adapter / WEIGHTS).stat().st_size < 4 * number + 30_000
    save_adapter(model, tmp_path / "half", half=True)
    assert {x.dtype for name, x in load_file(tmp_path / "half" / WEIGHTS).items() if x.dim() == 2} == {torch.float16}
    config = AutoConfig.from_pretrained(adapter)
    assert config.model_type == "remember" and config.base_model_name_or_path == str(base) and config.fit == FIT
    card = ModelCard.load(adapter / "README.md")
    assert card.data.license == "apache-2.0" and "tokens: 90000" in card.text and str(base) in card.text


def test_a_push_uploads_what_was_saved(model, tmp_path, monkeypatch):
    """`push_to_hub` makes the repository with the options that are given, and uploads the folder, with its card."""
    calls = []

    class Api:
        def create_repo(self, name, **options):
            calls.append((name, options))

        def upload_folder(self, repo_id, folder_path):
            calls.append((repo_id, sorted(x.name for x in folder_path.iterdir())))

    monkeypatch.setattr(adapter_module, "HfApi", Api)
    save_adapter(model, tmp_path / "new", push_to_hub="me/memory", private=True)
    files = ["README.md", WEIGHTS, "config.json"]  # the base has no tokenizer
    assert calls == [("me/memory", {"exist_ok": True, "private": True}), ("me/memory", files)]


def test_a_private_adapter(model, base, adapter, tmp_path, monkeypatch):
    """What a caller says about the Hub holds for the adapter's weights too; revision and subfolder are its alone."""
    asked, works = [], adapter_module.cached_file
    monkeypatch.setattr(adapter_module, "cached_file", lambda *x, **hub: asked.append(hub) or works(*x, **hub))
    hub = {"token": "x", "cache_dir": str(tmp_path), "local_files_only": True}
    loaded, info = AutoModelForCausalLM.from_pretrained(adapter, output_loading_info=True, revision="main", **hub)
    assert loaded.memory.window == 12 and info["missing_keys"] == set()
    assert asked == [hub | {"revision": "main"}]


def test_learn_from(model, base, tmp_path):
    """An adapter's `learn_from` holds in `remember` and in `from_pretrained`, unless another is given."""
    model.memory.learn_from = "all"
    save_adapter(model, tmp_path / "all")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "all").memory.learn_from == "all"
    for given, expected in ((None, "all"), ("read", "read")):
        found = remember(AutoModelForCausalLM.from_pretrained(base), adapter=tmp_path / "all", learn_from=given)
        assert found.memory.learn_from == expected


def test_a_memory_of_before_the_adapter(model, base, tmp_path):
    """A memory saved by a model before its adapter was saved belongs to the model that the adapter gives."""
    model.memory.fast_weights.rates = dict.fromkeys(model.memory.fast_weights.rates, 0.1)  # not a number of float32
    save_adapter(model, tmp_path / "adapter", half=False)
    loaded = remember(AutoModelForCausalLM.from_pretrained(base), adapter=tmp_path / "adapter")
    assert memory_fingerprint(loaded) == memory_fingerprint(model)


@pytest.mark.parametrize("change,message", [
    ({"step": {"chunk": 0}}, "`step` chunk must be a whole number from 1 to 65536, got 0"),
    ({"step": {"start_rate": math.nan}}, "`step` start_rate must be a number from 0 to 1000000.0, got nan"),
    ({"step": {"max_gradient": "20"}}, "`step` max_gradient must"),
    ({"step": {"x": 1}}, "unexpected keyword argument 'x'"),
    ({"token_list": {"entries": True}}, "`token_list` entries must"),
    ({"token_list": {"threshold": -1}}, "`token_list` threshold must"),
    ({"first_token": 1.5}, "`first_token` must be a token of the model, 0 to 52, got 1.5"),
    ({"memory": [["list"]]}, "unhashable"),
])  # fmt: skip
def test_settings_that_no_fit_makes(base, adapter, change, message):
    """A setting of another type or range, and one that is not finite, is one error that names adapter and setting."""
    config = json.loads((adapter / "config.json").read_text())
    (adapter / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=f"{adapter.name} does not fit.*{re.escape(message)}"):
        remember(AutoModelForCausalLM.from_pretrained(base), adapter=adapter)


@pytest.mark.parametrize("change,reason", [
    (lambda x: {k: v for k, v in x.items() if k != "list.center"}, "'list.center' is missing"),
    (lambda x: {k.replace("model.layers.1", "model.layers.7"): v for k, v in x.items()}, "no linear layer"),
    (lambda x: x | {"list.center": x["list.center"][:-1]}, "list.center has the shape"),
    (lambda x: x | {next(k for k in x if k[0] == "B"): torch.zeros(3, 3)}, "has the shape"),
    (lambda x: x | {next(k for k in x if k[0] == "A"): x[next(k for k in x if k[0] == "A")] * torch.nan}, "not finite"),
    (lambda x: {k: v for k, v in x.items() if k[0] == "l"}, "no fast weights"),
    (lambda x: x | {k: v * 1e9 for k, v in x.items() if k[:4] == "rate"}, "rate.*must be a number from 0"),
    (lambda x: x | {k: v.repeat(2) for k, v in x.items() if k[:4] == "rate"}, "rate.*has the shape"),
    (lambda x: x | {"list.gate_weight": torch.zeros(8)}, "list.gate_weight has the shape"),
])  # fmt: skip
def test_a_bad_adapter(base, adapter, change, reason):
    """An adapter that is damaged or of another model is one error that names the folder, and changes no model."""
    save_file(change(load_file(adapter / WEIGHTS)), adapter / WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(base)
    before = logits(model)
    with pytest.raises(ValueError, match=f"{adapter.name} .*{reason}"):
        remember(model, adapter=adapter)
    assert not hasattr(model, "memory") and torch.equal(logits(model), before)


def test_files_that_are_no_adapter(base, adapter, tmp_path):
    """A cut file, a folder of another kind, a name of nothing, and an adapter without a base are one error."""
    model = AutoModelForCausalLM.from_pretrained(base)
    (adapter / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes()[:-9])
    for folder in (adapter, base, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=f"`adapter` {folder} does not fit"):
            remember(model, adapter=folder)
    config = json.loads((adapter / "config.json").read_text())
    for named, message in ((None, "names no base model"), (str(adapter), "names an adapter as its base model")):
        (adapter / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": named}))
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(adapter)
