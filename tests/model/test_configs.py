"""cli/configs: every file loads, has the size in its name, and runs."""

import json
from pathlib import Path

import pytest
import torch
from common import PAPER
from covering import in_one_test
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "titans_hf" / "cli" / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
TINY = [name for name in NAMES if name.startswith("tiny")]


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def load(name: str):
    return AutoConfig.from_pretrained(FOLDER / f"{name}.json")


def promised(name: str) -> float:
    """Returns the number of parameters that the name of a configuration gives."""
    size = name.removeprefix("paper-").split("-")[0]
    known = {"tiny": 1e6, "1.3b": 1.3e9}
    return known.get(size) or 1e6 * int(size.removesuffix("m"))


@in_one_test("name", NAMES)
def test_size_is_the_one_in_the_name(name):
    """The number of parameters is within 5 % of the name's. Embeddings of 32,000 tokens do not count in the tiny
    models.
    """
    config = load(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    if name.endswith("-32k"):
        count -= model.get_input_embeddings().weight.numel()
    assert config.architectures == [type(model).__name__]
    assert count == pytest.approx(promised(name), rel=0.05)


@in_one_test("name", [name for name in NAMES if name.startswith("paper")])
def test_the_papers_files_are_in_its_form(name):
    """The files have the paper's form in every field, and its chunk, segment and window."""
    config = load(name)
    form = {field: getattr(config, field) for field in PAPER if field != "rope_parameters"}
    assert form | {"rope_parameters": read(name)["rope_parameters"]} == PAPER
    sizes = ("memory_chunk_size", "segment_length", "sliding_window", "num_persistent_tokens", "memory_expansion")
    assert tuple(getattr(config, field) for field in sizes) == (16, 512, 2048, 128, 4)


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_run_past_their_window(name):
    """Tiny models give finite logits for 150 tokens."""
    torch.manual_seed(0)
    config = load(name)
    model = AutoModelForCausalLM.from_config(config).eval()
    input_ids = torch.randint(3, config.vocab_size, (2, 150))
    with torch.no_grad():
        logits = model(input_ids=input_ids).logits
    assert logits.shape == (2, 150, config.vocab_size)
    assert logits.isfinite().all()
