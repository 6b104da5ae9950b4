"""Initialisation: however a model is made, every parameter starts from the documented distribution."""

import re

import pytest
import torch
from common import ATTENTIONS, PAPER, VARIANTS, make_config
from covering import covering
from initial_values import STD, check_initial_values
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from titans_hf import TitansForCausalLM

SIZES = dict(hidden_size=64, num_persistent_tokens=16, memory_depth=3, initializer_range=STD, num_hidden_layers=2)
SIZES |= dict(memory_conv_noise=0.7)


@pytest.fixture(params=ATTENTIONS)
def config(request):
    torch.manual_seed(0)
    return make_config(request.param, **SIZES)


def test_construction(config):
    """A constructed model has the documented initial values."""
    check_initial_values(TitansForCausalLM(config))


def test_filters_without_noise():
    """With memory_conv_noise = 0 the filters are pure delays."""
    check_initial_values(TitansForCausalLM(make_config("mag", **SIZES | dict(memory_conv_noise=0))))


def test_the_papers_recurrence_starts_from_a_network_with_a_gradient():
    """With forgetting towards 0, or a norm behind it, the last layer is drawn too."""
    for form in (dict(memory_recurrence="paper"), dict(memory_network="residual"), dict(memory_gates="layer"), PAPER):
        check_initial_values(TitansForCausalLM(make_config("mag", **SIZES | dict(memory_update_rule="chunk") | form)))


def test_from_config(config):
    """AutoModelForCausalLM.from_config() gives the documented initial values."""
    check_initial_values(AutoModelForCausalLM.from_config(config))


def test_after_the_meta_device(config):
    """A model made on the meta device has the documented values after init_weights()."""
    with torch.device("meta"):
        model = TitansForCausalLM(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    check_initial_values(model)


def test_initialising_again(config):
    """init_weights() sets every parameter again."""
    model = TitansForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    for module in model.modules():
        module._is_hf_initialized = False
    for parameter in model.parameters():
        parameter._is_hf_initialized = False
    model.init_weights()
    check_initial_values(model)


@pytest.mark.parametrize("missing", [r"token_memory\.", r"token_memory.*directions", r"token_memory.*scale"])
def test_the_token_memory(missing, tmp_path):
    """A token memory has the documented values when it is constructed, after the meta device, and where a checkpoint
    lacks a part of it.
    """
    torch.manual_seed(0)
    config = make_config("lmm", **SIZES, token_memory_features=96, tie_word_embeddings=True)
    model = TitansForCausalLM(config)
    check_initial_values(model)
    with torch.device("meta"):
        on_meta = TitansForCausalLM(config)
    on_meta.to_empty(device="cpu").init_weights()
    check_initial_values(on_meta)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {name: x for name, x in load_file(file).items() if not re.search(missing, name)}
    save_file(kept, file, metadata={"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    check_initial_values(loaded)
    directions = "model.token_memory.mixer.directions"
    assert torch.equal(loaded.state_dict()[directions], model.state_dict()[directions]) == (directions in kept)


KINDS = {
    "gates": r"(inner_lr|momentum|forget)\.",
    "gate biases": r"(inner_lr|momentum|forget)\.bias",
    "forget bias of one layer": r"layers\.1\..*forget\.bias",
    "initial weights": r"initial_weights\.",
    "one initial weight": r"layers\.0\..*initial_weights\.2",
    "first initial weight": r"layers\.0\..*initial_weights\.0",
    "persistent": r"persistent",
    "convolution": r"[qkv]_conv\.",
    "norms": r"norm\.weight",
    "projections": r"proj\.weight",
    "head": r"lm_head",
    "all but the head": r"^model",
}


@covering(1, {"variant": VARIANTS, "kind": KINDS})
def test_checkpoint_with_missing_keys(variant, kind, tmp_path):
    """Parameters missing from a checkpoint are initialised and the loaded ones kept."""
    torch.manual_seed(0)
    source = TitansForCausalLM(make_config(variant, **SIZES))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.copy_(7 + torch.rand(parameter.shape))  # like nothing that is ever initialised
    source.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    missing = {name for name in stored if re.search(KINDS[kind], name)}
    save_file({name: x for name, x in stored.items() if name not in missing}, file, metadata={"format": "pt"})
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == missing
    check_initial_values(model, only=missing)
    for name, parameter in model.named_parameters():
        assert name in missing or torch.equal(parameter, stored[name]), f"{name} was loaded, then changed"


def test_empty_checkpoint(config, tmp_path):
    """A checkpoint with the output layer alone loads with all others initialised."""
    TitansForCausalLM(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({"lm_head.weight": load_file(file)["lm_head.weight"]}, file, metadata={"format": "pt"})
    check_initial_values(AutoModelForCausalLM.from_pretrained(tmp_path))


def test_switches_own_their_parameters():
    """Parts that are turned off have no parameters."""
    off = dict(memory_momentum=False, memory_forget=False, memory_conv_kernel=1, num_persistent_tokens=0)
    names = [name for name, x in TitansForCausalLM(make_config("mag", **off)).named_parameters() if x.numel()]
    assert not any(re.search(r"memory\.(momentum|forget|[qkv]_conv)|persistent", name) for name in names)


def test_a_new_model_predicts_at_chance(config):
    """A new model's loss is that of a uniform guess."""
    model, ids = TitansForCausalLM(config), torch.randint(50, (4, 40))
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert abs(loss - torch.tensor(50.0).log()) < 0.25


def test_no_gradient_of_a_new_model_outgrows_the_others(config):
    """No parameter's first gradient exceeds 30 times the output layer's. Vectors of length 0 are the risk: normalising
    divides by their length.
    """
    model, ids = TitansForCausalLM(config), torch.randint(50, (4, 40))
    model(ids, labels=ids).loss.backward()
    lengths = {name: parameter.grad.norm().item() for name, parameter in model.named_parameters()}
    longest = max(lengths, key=lengths.get)
    assert lengths[longest] < 30 * lengths["lm_head.weight"], f"{longest}: {lengths[longest]:.2g}"
