"""Transformers' quantisers: linear layers can be replaced, gates are left out, and the memory's state stays float32."""

import importlib.util

import pytest
import torch
from common import TWO_VARIANTS, assert_same, full_logits, make_config, make_ids, make_model, read, redraw, shared_model
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from titans_hf import TitansCache, TitansForCausalLM
from titans_hf.cache_files import fingerprint

GATES = ("inner_lr", "momentum", "forget")


class Replacement(nn.Module):
    """Computes a linear layer as those of quantisers do: from its input alone, in the input's dtype."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_every_linear_layer_can_be_replaced(variant):
    """A model keeps its logits if linear layers take their input alone, and no gate is one."""
    model, ids = make_model(variant), make_ids(2, 21)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert len(linears) > 10
    assert not [name for name in linears if name.rpartition(".")[2] in GATES]
    for name, module in linears.items():
        model.set_submodule(name, Replacement(module))
    expected = full_logits(shared_model(variant), ids)
    assert_same(full_logits(model, ids), expected)
    assert_same(read(model, ids, [9, 1, 11])[0], expected)


def torchao_int8() -> TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


QUANTISERS = {
    "torchao": torchao_int8,
    "optimum.quanto": lambda: QuantoConfig(weights="int8"),
    "bitsandbytes": lambda: BitsAndBytesConfig(load_in_8bit=True),
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


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_weights_of_8_bits(variant, quantise):
    """With weights of 8 bits the logits are within 5 % of the plain ones, call by call too, the memory's state is
    float32, and `generate()` continues.
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


def test_what_is_converted(quantise):
    """Projections are converted, gates and the output layer are not."""
    modules = dict(quantise(model_of_float32("mag")).named_modules())
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj"):
        assert type(modules[f"model.layers.1.mixer.memory.{name}"].weight) is not nn.Parameter
    for name in ("lm_head", *(f"model.layers.1.mixer.memory.{gate}" for gate in GATES)):
        assert type(modules[name].weight) is nn.Parameter and modules[name].weight.dtype == torch.float32


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_an_untrained_model_in_float8(variant, tmp_path):
    """A model as initialised has finite logits with weights of float8: a gate's weights are then zeros, of which
    dividing by their largest would make nan.
    """
    pytest.importorskip("torchao")
    from torchao.quantization import Float8WeightOnlyConfig

    TitansForCausalLM(make_config(variant)).save_pretrained(tmp_path)
    config = TorchAoConfig(Float8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert torch.isfinite(full_logits(model, make_ids(2, 20))).all()


def test_a_quantised_checkpoint_is_loaded_as_it_was_saved(quantise, tmp_path):
    """A saved model with weights of 8 bits loads with the same logits."""
    quantised, ids = quantise(model_of_float32("mag")), make_ids(2, 30)
    if not quantised.hf_quantizer.is_serializable():
        pytest.skip("Transformers does not save models of this quantiser")
    quantised.save_pretrained(tmp_path / "quantised")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised")
    assert_same(full_logits(loaded, ids), full_logits(quantised, ids), 0)


def test_memory_of_a_quantised_model(quantise, tmp_path):
    """A memory of a quantised model is saved and loaded for it, and not for the plain one."""
    model, ids = model_of_float32("mag"), make_ids(2, 30)
    quantised = quantise(model)
    read(quantised, ids)[1].save_pretrained(tmp_path / "memory", quantised)
    assert TitansCache.from_pretrained(tmp_path / "memory", quantised).get_seq_length() == 30
    with pytest.raises(ValueError, match=r"is the memory of another model: its (weights|dtype) is"):
        TitansCache.from_pretrained(tmp_path / "memory", model)


def test_fingerprint_of_tensors_put_together():
    """The fingerprint of a tensor that consists of others, as quantisers make them, depends on each of these."""
    model, hashes = make_model("lmm"), []
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    for scale in (weight, weight.clone(), weight + 1e-6):
        model.model.layers[0].mlp.up_proj.weight = nn.Parameter(TwoTensor(weight, scale))
        hashes.append(fingerprint(model)["weights"])
    assert hashes[0] == hashes[1] != hashes[2]
