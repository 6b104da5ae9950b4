"""The needles that small models are trained and tested on."""

import pytest

from eval import needles
from titans_hf.cli.training.tokenizer import byte_tokenizer


@pytest.mark.parametrize("task", ["pk", "w"])
@pytest.mark.parametrize("part", ["train", "test"])
def test_answers_stand_in_the_text_and_are_another_partss(part, task, tmp_path):
    """Labels are the answers alone, each told before its question; numbers and words of the test are not trained on."""
    tokenizer = byte_tokenizer()
    trained = needles.Texts(task, tokenizer, tmp_path, "train", 0).nouns
    for _ in range(8):
        texts = needles.Texts(task, tokenizer, tmp_path, part, 0)
        ids, labels = texts.draw(700, 3)
        text, answers = tokenizer.decode(ids), tokenizer.decode([x for x in labels if x >= 0]).split()
        assert len(ids) == len(labels) == 700 and 1 <= len(answers) <= 3
        assert all(text.count(answer) == 2 and text.index(f": {answer}") >= 0 for answer in answers)
        for answer in answers:
            values = answer.strip(".").split("-")
            assert {x not in trained if task == "w" else int(x) % 11 == 0 for x in values} == {part == "test"}
