"""The needles that small models are trained and tested on."""

import pytest

from eval import needles
from titans_hf.cli.training.tokenizer import byte_tokenizer


@pytest.mark.parametrize(("task", "part"), [("pk", "train"), ("pk", "test"), ("w", "train"), ("w", "test")])
def test_answers_stand_in_the_text_and_are_another_partss(part, task, tmp_path):
    """Labels are the answers alone, each told before its question; numbers and words of the test are not trained on."""
    tokenizer = byte_tokenizer()
    texts, trained = (needles.Texts(task, tokenizer, tmp_path, x, 0) for x in (part, "train"))
    for _ in range(8):
        ids, labels = texts.draw(1200, 3)
        text, answers = tokenizer.decode(ids), tokenizer.decode([x for x in labels if x >= 0]).split(".")[:-1]
        assert len(ids) == len(labels) == 1200 and 1 <= len(answers) <= 3
        for answer in answers:
            assert text.count(f" {answer}.") == 2 and f": {answer}." in text
            found = {x not in trained.nouns if task == "w" else int(x) % 11 == 0 for x in answer.split("-")}
            assert found == {part == "test"}


def test_facts_of_a_story_stay_in_order(tmp_path):
    """BABILong's facts stand in the prose in the story's order, the question last; the answer is labelled."""
    (tmp_path / "qa1_x_train.txt").write_text(
        "1 Mary went to the hall.\n2 John went to the den.\n3 Where is Mary? \thall\t1"
    )
    tokenizer = byte_tokenizer()
    ids, labels = needles.Texts("qa1", tokenizer, tmp_path, "train", 0, tmp_path).draw(400, 3)
    text = tokenizer.decode(ids)
    assert text.index("Mary went") < text.index("John went") and text.endswith(" Where is Mary? hall.")
    assert tokenizer.decode([x for x in labels if x >= 0]) == " hall." and len(ids) == len(labels) == 400
