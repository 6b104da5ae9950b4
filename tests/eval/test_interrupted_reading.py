"""eval/studies/interrupted_reading.py: the process is killed, and the table has the model's own answers."""

import json

import pytest
from byte_model import save_byte_model
from covering import in_one_test

from eval.studies import interrupted_reading


@pytest.fixture
def model(tmp_path):
    save_byte_model(tmp_path / "model", "lmm")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text("\n\n".join(f"Paragraph {i} of a book, née 1850." for i in range(70)))
    return str(tmp_path / "model")


@pytest.mark.long
def test_a_trial(model, tmp_path, monkeypatch):
    """A process is killed and the text read to its end, every needle is in the text, and the table has the model's
    answers.
    """
    monkeypatch.setattr(interrupted_reading, "SAMPLE_SECONDS", 0.01)
    options = ["--text", tmp_path / "books", "--output", tmp_path / "out", "--tokens", 60_000, "--save_every", 5_000]
    options += ["--depths", 0, 0.5, "--kills", 0.5]
    found = interrupted_reading.main([model, *map(str, options)])
    assert found == json.loads((tmp_path / "out" / "interrupted_reading.json").read_text())
    (kill,) = found["kills"]
    assert 30_000 <= kill["tokens saved"] < found["tokens"]
    assert {row["process"] for row in found["samples"]} == {1, 2}
    text = (tmp_path / "out" / "text.txt").read_bytes()
    assert 60_000 <= len(text) == found["tokens"] < 60_100
    table = (tmp_path / "out" / "interrupted_reading.md").read_text()
    for needle in found["needles"]:
        assert text[needle["place"] :].startswith(b"One of the special magic numbers for " + needle["key"].encode())
        assert text.count(needle["value"].encode()) == 1
        assert needle["right"] == (needle["value"] in needle["answer"])
        assert f"| {needle['value']} | {' '.join(needle['answer'].split())} | " in table
    assert len(found["memory file bytes"]) == 1
    assert (tmp_path / "out" / "interrupted_reading.png").stat().st_size > 10_000


@in_one_test(
    "options,message",
    [
        (["--text", "model"], "--text model holds no .txt or .md files"),
        (["--text", "books", "--depths", "1"], r"--depths \[1.0\] must be from 0 to below 1"),
        (["--text", "books", "--kills", "0.2", "-1"], r"--kills \[0.2, -1.0\] must be from 0 to below 1"),
        (["--text", "books", "--output", "books"], "--output books exists"),
    ],
)
def test_bad_input(options, message, model, tmp_path, monkeypatch):
    """Bad options raise an error that names them before any reading."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        interrupted_reading.main([model, "--output", "out", *options])
