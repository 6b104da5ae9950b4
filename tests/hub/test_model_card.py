"""cli/training/model_card.py: with any name and licence, the Hub can parse and show the card."""

import re

from common import make_config
from covering import covering
from huggingface_hub import ModelCard

from titans_hf.cli.training.model_card import escape, model_card

HOSTILE = "a\n---\nb: *c* | [d](e) <f> `g` $h$ _{i\r\n# j"
SHOWN = "a --- b: *c* | [d](e) <f> `g` $h$ _{i # j"


def record(**changes) -> dict:
    data = {"train": "texts", "eval": "texts", "held_out": True, "hub": [], "train_tokens": 5, "eval_tokens": 5}
    return {
        "name": "small",
        "license": "mit",
        "base_model": None,
        "data": data | changes.pop("data", {}),
        "metrics": {"eval_loss": 1.5},
        "parameters": 10,
        "arguments": {"optim": "adamw_torch"},
        "versions": {"torch": "2"},
        "steps": 1,
        "best_step": None,
        "tokens_seen": 5,
    } | changes


@covering(1, {"field": ["license", "name", "train", "eval", "arguments"], "variant": ["mag", "lmm"]})
def test_names_that_are_markup(field, variant):
    """A name is shown literally, on one line."""
    changes = {
        "train": {"data": {"train": HOSTILE}},
        "eval": {"data": {"eval": HOSTILE}},
        "arguments": {"arguments": {"optim": HOSTILE}},
    }.get(field, {field: HOSTILE})
    card, plain = model_card(make_config(variant), record(**changes)), model_card(make_config(variant), record())
    again = ModelCard(card.content)
    assert again.data.to_dict().keys() == plain.data.to_dict().keys()
    assert not any("\n" in str(value) for value in again.data.to_dict().values())
    assert len(card.text.splitlines()) == len(plain.text.splitlines())
    assert escape(SHOWN) in card.text.replace("\\|", "|")
    for line, before in zip(card.text.splitlines(), plain.text.splitlines(), strict=True):
        if before.startswith("|"):  # a backslash before a bar is not itself after one
            assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == before.count("|")


def test_escape():
    """Markup in a text is escaped once, and bars are left to the table."""
    assert escape("a_b*c|d") == r"a\_b\*c|d"
    assert escape("cc-by-4.0 (1)") == "cc-by-4.0 (1)"


def test_code_with_a_hostile_name_is_code():
    """A name with quotes stays one string of the Python and shell examples."""
    text = model_card(make_config("mag"), record(name='x" + exit() + "; rm y')).text
    assert 'from_pretrained("x\\" + exit() + \\"; rm y", trust' in text
    assert "serve 'x\" + exit() + \"; rm y'\n" in text
