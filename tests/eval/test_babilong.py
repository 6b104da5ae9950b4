"""BABILong from local files: whose facts are hidden, where and at which length."""

import itertools

import pytest
from covering import in_one_test
from eval_common import BOOK, STORIES

from eval.streaming import babilong
from titans_hf.cli.training.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def num_tokens(text):
    return len(TOKENIZER(text).input_ids)


@pytest.fixture
def folder(tmp_path):
    """bAbI's stories and a book."""
    for name in ("stories", "books"):
        (tmp_path / name).mkdir()
    for name, text in STORIES.items():
        (tmp_path / "stories" / f"{name}_test.txt").write_text(text)
    (tmp_path / "books" / "a.txt").write_text(BOOK)
    return tmp_path


def test_questions_have_the_facts_before_them(folder):
    """Each question has the facts of its story up to it, and no others."""
    assert list(babilong.read_stories(folder / "stories", "qa1")) == [
        (["Mary went to the hall.", "John ran to the garden."], "Where is Mary?", "hall"),
        (
            ["Mary went to the hall.", "John ran to the garden.", "Mary left for the office."],
            "Where is Mary?",
            "office",
        ),
        (["Sandra moved to the garden."], "Where is Sandra?", "garden"),
    ]


@in_one_test("length", [150, 1024, 50_000])
def test_stories_fill_the_length_in_their_order(folder, length):
    """The facts lie in their order among sentences of the book in theirs, which fill the length to one sentence."""
    stories = list(babilong.read_stories(folder / "stories", "qa1"))
    contexts = list(babilong.hide_facts(iter(stories), folder / "books", TOKENIZER, length))
    text = " ".join(BOOK.split())
    for (facts, _, _), (found, _) in zip(stories, contexts, strict=True):
        assert length - 40 < num_tokens(found) <= length
        places = [found.index(fact) for fact in facts]
        assert places == sorted(places)
        for fact in facts:
            found = found.replace(f"{fact} ", "", 1) if f"{fact} " in found else found.replace(f" {fact}", "", 1)
        assert found in f"{text} {text}"


def test_facts_lie_anywhere_or_alone(folder):
    """Facts occur from the start of a sample to its end; length 0 has the facts alone; too long ones are left out."""
    one = babilong.Story(["Sandra moved to the garden."], "Where is Sandra?", "garden")
    rows = list(babilong.hide_facts(itertools.repeat(one, 100), folder / "books", TOKENIZER, 2000))
    places = [context.index("Sandra") / 2000 for context, _ in rows]
    assert min(places) < 0.1 and max(places) > 0.85
    assert list(babilong.hide_facts(iter([one]), folder / "books", TOKENIZER, 0)) == [(one.facts[0], one)]
    assert list(babilong.hide_facts(iter([one]), folder / "books", TOKENIZER, 20)) == []
