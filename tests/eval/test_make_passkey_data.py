"""eval/studies/make_passkey_data.py: documents to learn the pass-key from, sorted from short to long."""

import itertools
import random
import re

import pytest
from datasets import load_from_disk

from titans_hf.cli.training.tokenizer import byte_tokenizer

pytest.importorskip("wonderwords", reason="the words of needles are not installed")

from eval.studies import make_passkey_data
from titans_hf.cli.evaluation import needles

PREFIX = "mentioned in the provided text is"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "passkeys"
    make_passkey_data.main(["--output", str(folder), "--number", "200", "--length", "900"])
    return load_from_disk(folder)


def test_every_prompt_asks_for_what_it_hides(data):
    """Every prompt contains the value of its completion."""
    assert len(data["train"]) == 200
    for row in [*data["train"], *data["validation"]]:
        assert f" is:{row['completion']}" in row["prompt"] and row["prompt"].endswith(PREFIX)
        assert row["completion"][0] == " " and row["completion"][1:-1].isdigit() and len(row["completion"]) == 9
    assert len(set(data["train"]["prompt"])) == 200


def test_documents_become_those_of_the_task(data):
    """Lengths increase, and the last documents are those of the task."""
    lengths = [len(row["prompt"]) for row in data["train"]]
    assert max(lengths[:10]) < 250 and max(lengths[:40]) < 1000 and max(lengths[40:60]) < max(lengths[80:]) < 900
    assert [row["prompt"].startswith("A special magic number") for row in data["train"]] == [False] * 40 + [True] * 160
    assert min(len(row["prompt"]) for row in data["validation"]) > 900 - 100
    assert all(row["prompt"].count(needles.NOISE) > 1 for row in data["validation"])
    assert 110 < sum(needles.NOISE not in row["prompt"] for row in data["train"].select(range(40, 200))) < 150


def skeleton(prompt):
    """Returns the part of a prompt that all prompts of the task share."""
    key = re.search(r"magic number for (\S+) mentioned", prompt)[1]
    return re.sub(r"\d{7}", "VALUE", prompt.replace(key, "KEY")).replace(f"{needles.NOISE}\n", "")


def test_a_document_is_the_task_with_its_answer():
    """Prompts have the task's wording, fill the length and hide the value at any depth."""
    rng, tokenizer = random.Random(0), byte_tokenizer()
    documents = [
        make_passkey_data.task_document(rng, tokenizer, 1024, itertools.repeat(needles.NOISE)) for _ in range(6)
    ]
    assert len(set(documents)) == 6
    asked = {
        skeleton(needles.prompt_of(sample)) for sample in needles.make_samples("niah_single_1", tokenizer, 1024, 6)
    }
    for prompt, answer in documents:
        assert 1024 - len(needles.NOISE) - 1 < len(prompt + answer) <= 1024
        assert skeleton(prompt) in asked
    places = [prompt.index("One of the") for prompt, _ in documents]
    assert min(places) < 350 and max(places) > 650
    with pytest.raises(ValueError, match="too short for a pass-key"):
        make_passkey_data.task_document(rng, tokenizer, 100, make_passkey_data.noise(rng))


def test_the_completions_are_learnt(data):
    """The tokens are of prompt, completion and eos; the labels leave the prompt out."""
    tokenizer, row = byte_tokenizer(), data["validation"][0]
    assert tokenizer.decode(row["input_ids"]) == row["prompt"] + row["completion"] + "</s>"
    assert tokenizer.decode([label for label in row["labels"] if label >= 0]) == row["completion"] + "</s>"
    assert all(label in (-100, token) for label, token in zip(row["labels"], row["input_ids"], strict=True))


def test_runs_differ_by_their_seed_alone():
    """The same seed gives the same documents, another seed others."""
    first, again, other = (
        list(make_passkey_data.curriculum(random.Random(seed), byte_tokenizer(), 900, 6)) for seed in (0, 0, 1)
    )
    assert first == again != other


def test_bad_input(tmp_path):
    """An existing output folder and a length too short raise an error before anything is written."""
    with pytest.raises(ValueError, match=r"--output .* exists"):
        make_passkey_data.main(["--output", str(tmp_path)])
    with pytest.raises(ValueError, match=r"--length 300: the shortest documents take up to \d+ tokens"):
        make_passkey_data.main(["--output", str(tmp_path / "new"), "--length", "300"])
    assert not (tmp_path / "new").exists()


def test_lines_of_books(tmp_path):
    """Half of the later documents have lines of books, long ones wrapped."""
    folder = tmp_path / "books"
    folder.mkdir()
    (folder / "a.txt").write_text("First line.\n\n" + "word " * 100 + "\nLast line.\n")
    lines = make_passkey_data.read_lines(folder)
    assert lines[0] == "First line." and lines[-1] == "Last line." and "" not in lines
    assert max(map(len, lines)) <= make_passkey_data.MAX_LINE_CHARACTERS and " ".join(lines).split() == (
        ["First", "line."] + ["word"] * 100 + ["Last", "line."]
    )
    documents = list(make_passkey_data.curriculum(random.Random(0), byte_tokenizer(), 900, 200, lines))
    of_books = [prompt for prompt, _ in documents[100:] if set(prompt.splitlines()) & set(lines)]
    assert 30 < len(of_books) < 70
    assert any("Last line.\nFirst line." in prompt for prompt in of_books)  # over and over
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no"):
        make_passkey_data.read_lines(tmp_path / "empty")
