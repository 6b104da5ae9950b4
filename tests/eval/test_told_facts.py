"""The facts that a converted model is told and asked for."""

import random

import pytest
import torch

from eval.studies.told_facts import FACTS, VALUES, longest_match, make_text
from titans_hf.cli.training.tokenizer import byte_tokenizer

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.mark.parametrize("form", ["chat", "prose", "passkey"])
def test_each_answer_was_told_before_the_filler(form):
    """Every answer is a value that was told before the filler, the pass key twice, and stands after its question."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    ids, answers = make_text(form, "It rained.", tokenizer, random.Random(0))
    told, asked = tokenizer.decode(ids).split("It rained.")
    assert len(answers) == (1 if form == "passkey" else 4)
    for begin, end, kind in answers:
        value = tokenizer.decode(ids[begin:end]).removeprefix(" ")
        assert told.count(value) == (2 if form == "passkey" else 1) and f" {value}" in asked
        assert value.isdigit() if kind == "number" else value in VALUES[kind]
        beginnings = ["The pass key is"] if form == "passkey" else [x[3 if form == "chat" else 1] for x in FACTS]
        before = tokenizer.decode(ids[:begin])
        assert any(before.endswith(x.removesuffix(" {}.")) for x in beginnings)


def test_a_search_finds_what_is_begun_again():
    """The longest match finds all of a fact whose sentence is begun again, and nothing of one that is new."""
    tokenizer = byte_tokenizer()
    ids, answers = make_text("prose", "It rained. The brook rose.", tokenizer, random.Random(0))
    found = longest_match(ids)
    assert all(found[begin - 1 : end - 1].equal(ids[begin:end]) for begin, end, _ in answers)
    ids = torch.tensor([1, 2, 9, 7, 2, 8, 1, 2, 5])
    assert longest_match(ids).tolist() == [-1, -1, -1, -1, 9, -1, 2, 9, -1]  # the longer run, not the latest
    assert longest_match(torch.tensor([2, 9, 2, 8, 2])).tolist()[-1] == 8  # of runs as long, the last time
