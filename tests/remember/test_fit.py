"""Fitting a memory: it lowers the loss of other texts, trains no weight of the model, and can be interrupted."""

import copy
from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM, Phi3Config

from titans_hf import fit_memory, forget, remember
from titans_hf.remember.fit import fit
from titans_hf.remember.fit.fit import Saved, fast_layers, fit_directions
from titans_hf.remember.passages import Passages

SIZES = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, initializer_range=0.1, bos_token_id=1, eos_token_id=None, pad_token_id=0)


def small_model(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes)).eval()


def names_text(seed: int, number: int = 60) -> torch.Tensor:
    """Returns names of four tokens, in random order: after its first token, a name that was read before is known."""
    generator = torch.Generator().manual_seed(seed)
    names = torch.randint(50, (8, 4), generator=generator)
    return names[torch.randint(8, (number,), generator=generator)].flatten()


@torch.no_grad()
def loss(model, ids) -> float:
    return cross_entropy(model(ids[None, :-1]).logits[0], ids[1:]).item()


@pytest.fixture(autouse=True)
def few_columns(monkeypatch):
    monkeypatch.setattr(fit, "NUM_COLUMNS", 200)


def test_a_fit_lowers_the_loss_of_other_texts():
    """A fitted memory, and fast weights alone, gain on another text; reported losses are right; the model stays."""
    model, texts, other = small_model(), [names_text(i) for i in range(4)], names_text(9)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    first = loss(remember(model, 24, ()), other)
    unfitted = loss(remember(forget(model), 24), other)
    _, of_list = fit_memory(forget(model), texts, window=24, rank=3, entries=5400, progress=False)
    assert loss(model, other) < min(first - 0.5, unfitted - 0.4)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    fast, token_list = model.memory.fast_weights, model.memory.token_list
    remember(forget(model), 24, ("fast_weights",), fast_weights=fast)
    assert loss(model, other) < first - 0.05
    remember(forget(model), 24, fast_weights=fast, token_list=token_list)
    for ids, columns, after in zip(texts, of_list.columns, of_list.after, strict=True):
        with torch.no_grad():
            losses = cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
        torch.testing.assert_close(after, losses[columns], rtol=0, atol=1e-4)


def test_directions_are_those_of_the_gradients():
    """The directions are the principal ones of the mean gradients, each over the fourth root of its share."""
    model, texts = small_model().double(), [names_text(i, 40) for i in range(3)]
    sizes, products = fast_layers(model, 2), {}
    for ids in texts:
        model.zero_grad()
        cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum").div(len(ids)).backward()
        for name in sizes:
            g = model.get_submodule(name).weight.grad
            products[name] = products.get(name, 0) + g.T @ g
    remember(model, None, ())
    directions = fit_directions(model, texts, 2, Saved(None, ""), fit.tqdm(disable=True))
    assert len(sizes) == 5 and all(".2." in x for x in sizes)  # the upper half but the last
    for name, (size, _) in sizes.items():
        values, vectors = torch.linalg.eigh(products[name])
        rows = directions[name].double()
        assert rows.shape == (2, size)
        assert float((rows[0] @ vectors[:, -1]).abs()) > 0.97 * float(rows[0].norm())
        share = float((rows[1] @ products[name] @ rows[1]) / rows[1].square().sum() / values[-1])
        assert float(rows[1].norm()) == pytest.approx(share**-0.25, rel=0.3)


def test_a_model_of_peft():
    """A model inside of PEFT's, and ids as a list, are fitted as they are read: with PEFT's adapter."""
    config = LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted, arguments = get_peft_model(small_model(), config), {"window": 24, "rank": 2, "progress": False}
    merged, texts = copy.deepcopy(adapted).merge_and_unload(), [names_text(0)]
    fit_memory(adapted, [x.tolist() for x in texts], **arguments)
    fit_memory(merged, texts, **arguments)
    assert merged.memory.parts == ["passages", "fast_weights"]
    assert loss(adapted, names_text(9)) == pytest.approx(loss(merged, names_text(9)), abs=0.02)


@pytest.mark.parametrize(
    "config",
    [GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=2), Phi3Config(**SIZES)],
)
def test_layers_of_other_families(config):
    """Fused and transposed layers of other families get fast weights, with the right sizes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    fit_memory(model, [names_text(0)], window=24, rank=2, entries=5400, progress=False)
    fast = model.memory.fast_weights
    assert len(fast.directions) == 4 and set(fast.start) == set(fast.directions)


def test_an_interrupted_fit_goes_on(tmp_path, monkeypatch):
    """An interrupted fit goes on to the same numbers; one of other texts or weights does not take its state."""
    texts = [names_text(i, 30) for i in range(5)]
    whole, parts, stages = small_model(), small_model(), []
    fit_memory(whole, texts, window=24, rank=2, entries=5400, progress=False)
    save = Saved.save

    def interrupted(self, stage, tensors):
        save(self, stage, tensors)
        stages.append(stage)
        if len(stages) % 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Saved, "save", interrupted)
    for _ in range(100):
        try:
            fit_memory(parts, texts, window=24, rank=2, entries=5400, progress=False, folder=tmp_path)
            break
        except KeyboardInterrupt:
            assert not hasattr(parts, "memory")
    counts = Counter(stages)
    assert (counts.pop("directions"), counts.pop("means"), {*counts.values()}) == (2, 4, {1}) and len(counts) > 4
    ids = names_text(9)
    with torch.no_grad():
        assert torch.equal(parts(ids[None]).logits, whole(ids[None]).logits)
    monkeypatch.undo()
    known = sorted(tmp_path.iterdir())
    fit_memory(forget(parts), texts[1:], window=24, rank=2, entries=5400, progress=False, folder=tmp_path)
    assert len(sorted(tmp_path.iterdir())) > len(known)
    with torch.no_grad():
        forget(parts).model.norm.weight.mul_(1.1)
    trained = copy.deepcopy(parts)
    for x, folder in ((parts, tmp_path), (trained, None)):
        fit_memory(x, texts, window=24, rank=2, entries=5400, progress=False, folder=folder)
    with torch.no_grad():
        assert torch.equal(parts(ids[None]).logits, trained(ids[None]).logits)


def test_a_fit_that_fails_changes_nothing():
    """After an error the model has the memory that it had, or none, and reads as before."""
    plain, ids = small_model(), names_text(1)
    model = remember(small_model(), 16, learn_from="all", passages=Passages(every=9))
    model.set_memory_learning(False)
    expected = [x(ids[None]).logits for x in (plain, model)]
    for x in (plain, model):
        with pytest.raises(ValueError, match="`documents` must have surprising tokens"):
            fit_memory(x, [ids[:2]], rank=2, window=16, entries=5400, progress=False)
    assert not hasattr(plain, "memory") and model.memory.learn_from == "all" and not model.memory_learning
    assert model.memory.passages.every == 9
    assert all(torch.equal(x(ids[None]).logits, y) for x, y in zip((plain, model), expected, strict=True))


def test_bad_arguments():
    """What cannot be fitted is refused by name."""
    model = small_model()
    with pytest.raises(ValueError, match="`documents` must be tensors"):
        fit_memory(model, [torch.ones(1, dtype=torch.int64)])
    with pytest.raises(ValueError, match="`rank` must be"):
        fit_memory(model, [names_text(0)], rank=0)
