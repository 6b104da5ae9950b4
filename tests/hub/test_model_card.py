"""cli/training/model_card.py: with any name and licence, the Hub can parse and show the card."""

import itertools
import json

import pytest
from common import make_config
from covering import in_one_test
from huggingface_hub import ModelCard
from tiny_run import SHORT, TITANS

from titans_hf.cli import train
from titans_hf.cli.training.checkpoints import RECORD
from titans_hf.cli.training.model_card import PROCEDURE, fill_card

HOSTILE = "a\n---\nb: *c* | [d](e) <f> `g` $h$ _{i\r\n# j"
SHOWN = r"a --- b: \*c\* \| \[d\](e) \<f\> \`g\` \$h\$ \_\{i \# j"


@pytest.fixture
def record(options, tmp_path, own_cache_and_no_network):
    """What a training has written to run.json."""
    train.main(options(TITANS, **SHORT))
    return json.loads((tmp_path / "out" / RECORD).read_text())


def card(record: dict, variant="mag", **changes) -> ModelCard:
    made = ModelCard(f"---\nlibrary_name: transformers\n---\n# draft\n\n{PROCEDURE}\n\nby Trainer\n")
    return fill_card(made, make_config(variant), record | {"license": "mit"} | changes)


@in_one_test("variant,field", itertools.product(["mag", "lmm"], ["license", "name", "train_data", "eval_data"]))
def test_names_that_are_markup(record, variant, field):
    """A name is shown literally, on one line, and Trainer's section stays."""
    hostile, plain = card(record, variant, **{field: HOSTILE}), card(record, variant)
    again = ModelCard(hostile.content)
    assert again.data.to_dict().keys() == plain.data.to_dict().keys()
    assert len(hostile.text.splitlines()) == len(plain.text.splitlines())
    assert SHOWN in hostile.text
    assert again.text.endswith(f"{PROCEDURE}\n\nby Trainer\n") and "draft" not in again.text


def test_code_with_a_hostile_name_is_code(record):
    """A name with quotes stays one string of the Python and shell examples."""
    text = card(record, name='x" + exit() + "; rm y').text
    assert 'from_pretrained("x\\" + exit() + \\"; rm y", trust' in text
    assert "serve 'x\" + exit() + \"; rm y'\n" in text
