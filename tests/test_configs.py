"""scripts/configs: every file loads, sets only what differs from the defaults, and has the size in its name."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from common import VARIANTS
from transformers import AutoConfig, AutoModelForCausalLM

from titans_hf import TitansConfig

FOLDER = Path(__file__).parents[1] / "scripts" / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
TINY = [name for name in NAMES if name.startswith(("tiny", "passkey"))]
VOCABULARY = {"vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings"}


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def load(name: str):
    return AutoConfig.from_pretrained(FOLDER / f"{name}.json")


def promised(name: str) -> float:
    """Returns the number of parameters that the name of a configuration gives."""
    size = name.split("-")[0]
    return {"tiny": 1e6, "passkey": 2.34e5}.get(size) or 1e6 * int(size.removesuffix("m"))


def test_every_variant_has_every_size():
    """The files are all variants in all sizes, and the baselines: otherwise a comparison would lack a model."""
    tiny = {f"tiny-{variant}{vocabulary}" for variant in VARIANTS for vocabulary in ("", "-32k")}
    large = {f"{size}-{variant}" for size in ("170m", "340m", "400m", "760m") for variant in VARIANTS}
    passkey = {"passkey-lmm", "passkey-mistral"}
    assert set(NAMES) == tiny | large | passkey | {"tiny-mistral", "tiny-llama"}


@pytest.mark.parametrize("name", NAMES)
def test_size_is_the_one_in_the_name(name):
    """The number of parameters is within 5 % of the name's: otherwise models of unequal size would be compared.
    Embeddings of 32,000 tokens do not count in the tiny models.
    """
    config = load(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    if name.endswith("-32k"):
        count -= model.get_input_embeddings().weight.numel()
    assert config.architectures == [type(model).__name__]
    assert count == pytest.approx(promised(name), rel=0.05)


@pytest.mark.parametrize("name", [name for name in NAMES if name.split("-")[1] in VARIANTS])
def test_titans_files_are_minimal(name):
    """A Titans file sets only fields that differ from their defaults: otherwise a changed default would not
    reach it.
    """
    settings, config = read(name), load(name)
    own = {field.name: field.default for field in fields(TitansConfig)}
    assert settings.pop("model_type") == "titans"
    assert settings.pop("architectures") == ["TitansForCausalLM"]
    assert config.variant == name.split("-")[1]
    assert settings.keys() <= own.keys()
    assert not [key for key, value in settings.items() if value == own[key]]


@pytest.mark.parametrize("name", NAMES)
def test_vocabulary_is_bytes_or_mistral(name):
    """Tiny models use the byte tokenizer's ids and the others Mistral's: otherwise training would use the wrong special
    tokens.
    """
    config, is_bytes = load(name), name in TINY and not name.endswith("-32k")
    ids = (config.vocab_size, config.pad_token_id, config.bos_token_id, config.eos_token_id)
    assert ids == ((259, 0, None, 1) if is_bytes else (32000, None, 1, 2))
    assert config.tie_word_embeddings is not is_bytes


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_vocabularies_share_one_body(variant):
    """Tiny models of both vocabularies differ in the vocabulary's fields alone: otherwise their results could not be
    compared.
    """
    byte, large = (
        {key: value for key, value in read(name).items() if key not in VOCABULARY}
        for name in (f"tiny-{variant}", f"tiny-{variant}-32k")
    )
    assert byte == large


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_run_past_their_window(name):
    """Tiny models give finite logits for 150 tokens: otherwise a configuration would fail only during training."""
    torch.manual_seed(0)
    config = load(name)
    model = AutoModelForCausalLM.from_config(config).eval()
    input_ids = torch.randint(3, config.vocab_size, (2, 150))
    with torch.no_grad():
        logits = model(input_ids=input_ids).logits
    assert logits.shape == (2, 150, config.vocab_size)
    assert logits.isfinite().all()
