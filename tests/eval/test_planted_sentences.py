"""eval/studies/planted_sentences.py: the sentence is compared with every other stretch of its length."""

import json

import numpy as np
import pytest
from byte_model import save_byte_model
from covering import in_one_test

from eval.studies import planted_sentences
from titans_hf.cli.training.tokenizer import byte_tokenizer

BOOK = "".join(f"Chapter {i}. It was dark, née light. Nobody came. " for i in range(120))


def test_plant():
    """The sentence follows the end of another one."""
    text, place = planted_sentences.plant(BOOK, 3000, "XYZ. ")
    middle = text[:place] + text[place + 5 :]
    assert len(middle) == 3000 and middle in BOOK
    assert text[place:].startswith("XYZ. ") and text[:place].endswith(". ")
    assert abs(place - 1500) < 100
    with pytest.raises(ValueError, match="no sentence ends"):
        planted_sentences.plant("word " * 1000, 3000, "XYZ. ")


@in_one_test("elsewhere,stands_out", [(0.9, True), (1.1, False)])
@pytest.mark.parametrize("place", [planted_sentences.NUM_SKIPPED_TOKENS, 1390, 2990])
def test_stands_out(elsewhere, stands_out, place):
    """Every stretch beside the sentence counts, and none that overlaps it."""
    values = np.zeros((2, 3000))
    values[1, 1400:1410], values[1, place : place + 10] = 1.0, elsewhere
    first, last = 1400, 1410
    found = planted_sentences.stands_out(values, first, last)
    assert not found[0]  # as high as all others is not higher
    assert found[1] == stands_out
    values[1, : planted_sentences.NUM_SKIPPED_TOKENS - 10] = 5  # is not compared
    assert planted_sentences.stands_out(values, first, last)[1] == stands_out


def test_sentences_are_found_by_their_tokens(tmp_path, monkeypatch):
    """The sentence's token range is right after characters of several bytes."""
    save_byte_model(tmp_path / "model", "lmm")
    (tmp_path / "books").mkdir()
    for name in ("a", "b"):
        (tmp_path / "books" / f"{name}.txt").write_text(BOOK, encoding="utf-8")
    seen = []

    def stands_out(values, first, last):
        seen.append((values.shape, first, last))
        return np.ones(values.shape[:2], dtype=bool)

    read = []
    measure = planted_sentences.measure
    monkeypatch.setattr(planted_sentences, "measure", lambda model, ids: (read.append(ids), measure(model, ids))[1])
    monkeypatch.setattr(planted_sentences, "stands_out", stands_out)
    arguments = ["--text", tmp_path / "books", "--output", tmp_path / "out", "--length", 2000, "--device", "cpu"]
    planted_sentences.main([str(tmp_path / "model"), *map(str, arguments)])
    sentences = [sentence for sentence in planted_sentences.SENTENCES.values() for _ in "ab"]
    for sentence, ids, (shape, first, last) in zip(sentences, read, seen, strict=True):
        assert byte_tokenizer().decode(ids[first:last]) == sentence
        assert shape == (3, 2, len(ids))
    assert (tmp_path / "out" / "planted_sentences.md").read_text().splitlines()[2] == "| taxes | 2 2 | 2 2 | 2 2 |"
    found = json.loads((tmp_path / "out" / "planted_sentences.json").read_text())
    assert found["files"] == ["a.txt", "b.txt"] and set(found["stands out"]) == set(planted_sentences.SENTENCES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1999}, "--length must be at least 2000, but is 1999"),
        ({"text": "nowhere"}, "--text nowhere does not exist"),
    ],
)
def test_bad_options(tmp_path, options, message):
    """A length too short and a missing text raise an error that names the option."""
    (tmp_path / "one.txt").write_text(BOOK)
    options = {"text": tmp_path, "output": tmp_path / "out"} | options
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    with pytest.raises(ValueError, match=message):
        planted_sentences.main(["nothing", *arguments])
