"""Transformers' quantisers: linear layers can be replaced, gates are left out, and the memory's state stays float32."""

import importlib.util

import pytest
import torch
from common import VARIANTS, assert_same, full_logits, make_ids, make_model, read, redraw, shared_model
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from titans_hf import TitansCache
from titans_hf.cache_files import fingerprint

GATES = ("inner_lr", "momentum", "forget")
NOT_CONVERTED = ["lm_head", ".*(inner_lr|momentum|forget)"]  # as in docs/serve.md


class Replacement(nn.Module):
    """Computes a linear layer as those of quantisers do: from its input alone, in the input's dtype."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_linear_layer_can_be_replaced(variant):
    """A model keeps its logits if linear layers take their input alone: otherwise quantisers' layers would fail
    in it.
    """
    model, ids = make_model(variant), make_ids(2, 21)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert any(name.endswith(GATES) for name in linears)
    for name, module in linears.items():
        model.set_submodule(name, Replacement(module))
    expected = full_logits(shared_model(variant), ids)
    assert_same(full_logits(model, ids), expected)
    assert_same(read(model, ids, [9, 1, 11])[0], expected)


def torchao_int8() -> TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=NOT_CONVERTED)


QUANTISERS = {
    "torchao": torchao_int8,
    "optimum.quanto": lambda: QuantoConfig(weights="int8", modules_to_not_convert=NOT_CONVERTED),
    "bitsandbytes": lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=NOT_CONVERTED),
}


def installed(module: str) -> bool:
    return all(importlib.util.find_spec(name) for name in (module.split(".")[0], module))


@pytest.fixture(params=QUANTISERS)
def quantise(request, tmp_path):
    """A function that saves a model and loads it with weights of 8 bits."""
    if not installed(request.param):
        pytest.skip(f"{request.param} is not installed")

    def quantise(model):
        model.save_pretrained(tmp_path)
        config = QUANTISERS[request.param]()
        return AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)

    return quantise


def model_of_float32(variant: str) -> nn.Module:
    """Returns a model with weights so small that rounding them does not grow from layer to layer."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_key_value_heads=4)
    return redraw(make_model(variant, dtype=torch.float32, **sizes), scale=0.05)


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_of_8_bits(variant, quantise):
    """With weights of 8 bits the logits are within 5 % of the plain ones, call by call too, the memory's state is
    float32, and `generate()` continues: otherwise a quantised Titans would be another model, or lose what it read.
    """
    model, ids = model_of_float32(variant), make_ids(2, 60)
    quantised, expected = quantise(model), full_logits(model, ids)
    actual = full_logits(quantised, ids)
    assert 0 < (actual - expected).norm() / expected.norm() < 0.05
    pieces, cache = read(quantised, ids, [25, 1, 34])
    assert (pieces - actual).norm() / actual.norm() < 0.02  # bitsandbytes treats outliers of a call apart
    for layer in cache.layers:
        memory = layer.state.memory
        assert {x.dtype for x in (*memory.weights, *memory.momentum, *memory.anchor)} == {torch.float32}
    answer = quantised.generate(ids[:, :20], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert answer.shape == (2, 25)


def test_gates_are_not_converted(quantise):
    """The recommended list leaves gates and the output layer as they are, and converts other linear layers: otherwise
    its names would match nothing.
    """
    quantised = quantise(model_of_float32("mag"))
    linears = {name: x for name, x in quantised.named_modules() if hasattr(x, "in_features")}
    kept = {name for name, x in linears.items() if type(x.weight) is nn.Parameter}
    assert {name for name in linears if name.endswith((*GATES, "lm_head"))} <= kept
    assert not {name for name in kept if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "down_proj"))}


def test_memory_of_a_quantised_model(quantise, tmp_path):
    """A memory of a quantised model is saved and loaded for it, and not for the plain one: otherwise it could not be
    kept, or would answer for other weights.
    """
    model, ids = model_of_float32("mag"), make_ids(2, 30)
    quantised = quantise(model)
    read(quantised, ids)[1].save_pretrained(tmp_path / "memory", quantised)
    assert TitansCache.from_pretrained(tmp_path / "memory", quantised).get_seq_length() == 30
    with pytest.raises(ValueError, match=r"is the memory of another model: its (weights|dtype) is"):
        TitansCache.from_pretrained(tmp_path / "memory", model)


def test_fingerprint_of_tensors_put_together():
    """The fingerprint of a tensor that consists of others, as quantisers make them, depends on each of these: otherwise
    memories of such a model could not be saved, or be loaded for other weights.
    """
    model, hashes = make_model("lmm"), []
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    for scale in (weight, weight.clone(), weight + 1e-6):
        model.model.layers[0].mlp.up_proj.weight = nn.Parameter(TwoTensor(weight, scale))
        hashes.append(fingerprint(model)["weights"])
    assert hashes[0] == hashes[1] != hashes[2]
