"""cli/training/model_card.py: with any name and licence, the Hub can parse and show the card."""

import pytest
from common import make_config
from huggingface_hub import ModelCard

from titans_hf.cli.training.model_card import PROCEDURE, escape, fill_card

HOSTILE = "a\n---\nb: *c* | [d](e) <f> `g` $h$ _{i\r\n# j"
SHOWN = "a --- b: *c* | [d](e) <f> `g` $h$ _{i # j"


def card(variant="mag", **changes) -> ModelCard:
    record = {
        "name": "small",
        "license": "mit",
        "base_model": None,
        "train_data": "texts",
        "eval_data": "texts",
        "held_out": True,
        "hub": [],
        "block_length": 8,
        "eval_tokens": 5,
        "metrics": {"eval_loss": 1.5},
        "parameters": 10,
        "steps": 1,
        "best_step": None,
        "tokens_seen": 5,
    }
    made = ModelCard(f"---\nlibrary_name: transformers\n---\n# draft\n\n{PROCEDURE}\n\nby Trainer\n")
    return fill_card(made, make_config(variant), record | changes)


@pytest.mark.parametrize("variant", ["mag", "lmm"])
@pytest.mark.parametrize("field", ["license", "name", "train_data", "eval_data"])
def test_names_that_are_markup(field, variant):
    """A name is shown literally, on one line, and Trainer's section stays."""
    hostile, plain = card(variant, **{field: HOSTILE}), card(variant)
    again = ModelCard(hostile.content)
    assert again.data.to_dict().keys() == plain.data.to_dict().keys()
    assert len(hostile.text.splitlines()) == len(plain.text.splitlines())
    assert escape(SHOWN) in hostile.text
    assert again.text.endswith(f"{PROCEDURE}\n\nby Trainer\n") and "draft" not in again.text


def test_escape():
    """Markup in a text is escaped once."""
    assert escape("a_b*c|d") == r"a\_b\*c\|d"
    assert escape("cc-by-4.0 (1)") == "cc-by-4.0 (1)"


def test_code_with_a_hostile_name_is_code():
    """A name with quotes stays one string of the Python and shell examples."""
    text = card(name='x" + exit() + "; rm y').text
    assert 'from_pretrained("x\\" + exit() + \\"; rm y", trust' in text
    assert "serve 'x\" + exit() + \"; rm y'\n" in text
