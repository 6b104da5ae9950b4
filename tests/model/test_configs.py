"""cli/configs: every file loads, has the size in its name, and runs."""

from pathlib import Path

import pytest
import torch
from common import PAPER
from covering import in_one_test
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).parents[2] / "src" / "titans_hf" / "cli" / "configs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
SIZES = {"tiny": 1e6, "1.3b": 1.3e9}


@in_one_test("name", NAMES)
def test_size_and_form_are_those_in_the_name(name):
    """Parameters are within 5 % of the name's, but for large embeddings; the paper's files have the paper's form."""
    config = AutoConfig.from_pretrained(FOLDER / f"{name}.json")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    if name.endswith("-32k"):
        count -= model.get_input_embeddings().weight.numel()
    size = name.removeprefix("paper-").split("-")[0]
    assert count == pytest.approx(SIZES.get(size) or 1e6 * int(size.removesuffix("m")), rel=0.05)
    if name.startswith("paper"):
        assert all(getattr(config, x) == value for x, value in PAPER.items() if x != "rope_parameters")
        sizes = (config.memory_chunk_size, config.segment_length, config.sliding_window, config.num_persistent_tokens)
        assert sizes == (16, 512, 2048, 128) and config.rope_parameters["partial_rotary_factor"] == 1
