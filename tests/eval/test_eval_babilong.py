"""BABILong's samples: facts in their order among the sentences of a book, filling the requested length."""

import pytest
from covering import in_one_test

from titans_hf.cli.training.tokenizer import byte_tokenizer

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")
from eval_common import BOOK, SHARED, STORIES, needs_shared_data

from titans_hf.cli.evaluation import babilong
from titans_hf.cli.evaluation.needles import split_sentences
from titans_hf.cli.evaluation.result_tables import CHANCE

(QA1,) = STORIES.values()
TEXT = " ".join(BOOK.split())


@pytest.fixture(scope="module")
def book():
    return babilong.Book(TEXT, byte_tokenizer())


def test_questions_have_the_facts_before_them():
    """Each question has the facts of its story up to it, and no others."""
    assert list(babilong.read_questions(QA1)) == [
        (["Mary went to the hall.", "John ran to the garden."], "Where is Mary?", "hall"),
        (
            ["Mary went to the hall.", "John ran to the garden.", "Mary left for the office."],
            "Where is Mary?",
            "office",
        ),
        (["Sandra moved to the garden."], "Where is Sandra?", "garden"),
    ]


def test_length_zero_is_the_facts_alone(book):
    """Samples of length 0 are the facts without text of the book."""
    assert [row["input"] for row in babilong.make_samples(QA1, book, 0)] == [
        " ".join(facts) for facts, _, _ in babilong.read_questions(QA1)
    ]


@in_one_test("length", [150, 1024, 5000, 200_000])
def test_samples_fill_the_length(book, length):
    """A sample is as long as requested, within one sentence."""
    longest = max(map(len, split_sentences(TEXT))) + 1
    for row in babilong.make_samples(QA1, book, length):
        assert length - longest <= len(row["input"].encode()) <= length


def test_facts_keep_their_order_and_the_book_its_own(book):
    """Facts and sentences of the book keep their order."""
    for (facts, _, _), row in zip(babilong.read_questions(QA1), babilong.make_samples(QA1, book, 3000), strict=True):
        places = [row["input"].index(fact) for fact in facts]
        assert places == sorted(places)
        rest = row["input"]
        for fact in facts:
            rest = rest.replace(f"{fact} ", "", 1) if f"{fact} " in rest else rest.replace(f" {fact}", "", 1)
        assert rest in TEXT


def test_facts_lie_anywhere(book):
    """Facts occur from the start of a sample to its end."""
    many = QA1.splitlines()[-2:] * 200
    rows = list(babilong.make_samples("\n".join(many), book, 2000))
    places = [row["input"].index("Sandra") / 2000 for row in rows]
    assert len(rows) == 200
    assert min(places) < 0.1
    assert max(places) > 0.85
    assert len({row["input"] for row in rows}) > 150


def test_questions_with_too_many_facts_are_left_out(book):
    """Questions whose facts exceed the length are left out, and a length too short for all raises an error."""
    assert [row["target"] for row in babilong.make_samples(QA1, book, 50)] == ["hall", "garden"]
    with pytest.raises(ValueError, match="length 10 is too short"):
        babilong.check_facts(QA1, book.count, 10)


@needs_shared_data
@in_one_test("task", CHANCE)
def test_chance_is_a_guess_among_the_answers(task):
    """CHANCE is one by the number of distinct answers of the full task."""
    stories = babilong.read_stories(SHARED, task.removeprefix("babilong_"))
    answers = [answer for _, _, answer in babilong.read_questions(stories)]
    assert len(answers) == 1000
    assert CHANCE[task] == 1 / len(set(answers))
