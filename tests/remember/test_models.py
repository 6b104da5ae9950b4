"""`remember` on models that other libraries have changed: PEFT, accelerate, quantisers."""

import pytest
import remember_models
import torch
from accelerate import cpu_offload, disk_offload
from peft import LoraConfig, get_peft_model
from remember_models import KINDS, close, remembering, small_fast_weights, small_list, small_model
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, TorchAoConfig

import titans_hf
from titans_hf.remember import MemoryCache, forget, remember
from titans_hf.remember.files import memory_fingerprint

TOKENS = remember_models.TOKENS[:2, :60]


@torch.no_grad()
def whole_and_pieces(model, ids=TOKENS):
    """Returns the logits of a text read whole, and in pieces."""
    cache = MemoryCache(model)
    pieces = torch.cat([model(input_ids=x, cache=cache).logits for x in ids.split([9, 1, 20, 30], 1)], 1)
    return model(input_ids=ids).logits, pieces


def adapted(model):
    torch.manual_seed(2)
    config = LoraConfig(r=2, target_modules=list(KINDS), init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def memory_for(model):
    return {"fast_weights": small_fast_weights(model), "token_list": small_list()}


def test_peft():
    """An adapter on the layers of the fast weights is added to them, before `remember` or after it; both can go."""
    before, model = small_model()(TOKENS).logits, small_model()
    first = remember(adapted(model), 12, **memory_for(model))
    whole, pieces = whole_and_pieces(first)
    close(pieces, whole)
    for logits in whole_and_pieces(adapted(remembering())):
        close(logits, whole)
    with first.disable_adapter():
        close(whole_and_pieces(first)[0], whole_and_pieces(remembering())[0])
    merged = first.merge_and_unload()
    assert_close(whole_and_pieces(merged)[0], whole, atol=1e-10, rtol=0)
    assert adapted(small_model()).unload()(TOKENS).logits.equal(before)


def test_training_an_adapter():
    """An adapter of PEFT is trained while the memory learns."""
    model = adapted(remembering()).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(8):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("order", ["remember first", "offload first"])
@pytest.mark.parametrize("tied", [False, True])
def test_offloaded_weights(order, tied, tmp_path):
    """A model whose weights accelerate keeps elsewhere reads, learns and saves as one that has them."""
    plain = remembering(tie_word_embeddings=tied)
    expected = whole_and_pieces(plain)[0]
    for offload in (lambda x: cpu_offload(x, "cpu"), lambda x: disk_offload(x, tmp_path, "cpu")):
        model = small_model(tie_word_embeddings=tied)
        arguments = memory_for(model)
        if order == "offload first":
            remember(offload(model), 12, ("fast_weights", "list"), **arguments)
        else:
            offload(remember(model, 12, ("fast_weights", "list"), **arguments))
        for logits in whole_and_pieces(model):
            close(logits, expected)
        assert memory_fingerprint(model) == memory_fingerprint(plain)
        model.generate(TOKENS, max_new_tokens=3)


def test_a_tied_head_names_and_files(tmp_path):
    """A model with a tied head learns; its class, its configuration, its parameters and what it saves stay."""
    model = small_model(tie_word_embeddings=True)
    names, config = [name for name, _ in model.named_parameters()], model.config.to_dict()
    remember(model, 12, **memory_for(model))
    close(*whole_and_pieces(model))
    assert [name for name, _ in model.named_parameters()] == names
    assert model.config.to_dict() == config and type(model).__name__ == "LlamaForCausalLM"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded(TOKENS).logits.equal(forget(model)(TOKENS).logits)


@torch.no_grad()
def test_a_memory_for_a_block():
    """Inside of the block the model remembers, with the arguments of `remember`; an error ends the memory too."""
    model = small_model()
    before, expected = model(TOKENS).logits, remembering(memory=())(TOKENS).logits
    with pytest.raises(KeyError), titans_hf.remembering(model, 12, ()) as same:
        assert same is model and model(TOKENS).logits.equal(expected)
        raise KeyError
    assert not hasattr(model, "memory") and model(TOKENS).logits.equal(before)


def test_quantised_weights(tmp_path):
    """Fast weights learn on a model whose weights have 8 bits."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    small_model(hidden_size=64, intermediate_size=64).float().save_pretrained(tmp_path)
    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    remember(model, 12, ("fast_weights",), fast_weights=small_fast_weights(model))
    whole, pieces = whole_and_pieces(model)
    assert_close(pieces, whole, atol=1e-3, rtol=1e-3)
    model.set_memory_learning(False)
    assert float((whole_and_pieces(model)[0] - whole).abs().max()) > 0.1


def test_defaults():
    """By default a memory has passages and a window of 1,024; fast weights are on upper values but the last."""
    memory = remember(small_model()).memory
    assert memory.window == 1024 and memory.passages and not memory.fast_weights and not memory.token_list
    model = remember(small_model(num_hidden_layers=6), 12, ("fast_weights",))
    assert {*model.memory.fast_weights.directions} == {f"model.layers.{i}.self_attn.v_proj" for i in (3, 4)}
    with torch.no_grad():
        cache = model(TOKENS.repeat(1, 3)).cache
    assert all(float(x.abs().max()) > 0 for name, x in cache.state.items() if name.startswith("B."))
