"""titans-hf surprise: each word is shown with its own values."""

import json
import re
from html import escape, unescape
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
import torch
from byte_model import save_byte_model
from common import PAPER
from covering import in_one_test

from titans_hf.cli import surprise
from titans_hf.cli.training.tokenizer import byte_tokenizer

TEXT = '  Es war <einmal> ein König & "sonst"\nniemand: 東京 ist weit. ' * 4


def test_a_model_with_gates_per_layer_has_a_page(tmp_path):
    """The page shows each word's gates, the means over the layers of the memory network."""
    model = save_byte_model(tmp_path / "model", "mag", **PAPER)
    (tmp_path / "text.txt").write_text("abc " * 20, encoding="utf-8")
    surprise.main([str(tmp_path / "model"), str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")])
    values = values_of((tmp_path / "out" / "surprise.html").read_text(encoding="utf-8"))
    assert all(len(rows) == 20 for rows in values.values())
    theta = values["learning rate θ, mean of the layers"]
    assert 0 < min(theta) <= max(theta) < model.config.memory_max_lr


@pytest.fixture
def paths(tmp_path):
    model = save_byte_model(tmp_path / "model", "mag")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return SimpleNamespace(
        net=model, model=str(tmp_path / "model"), text=str(tmp_path / "text.txt"), out=tmp_path / "out"
    )


def values_of(page: str) -> dict[str, list[float]]:
    return json.loads(re.search(r"const rows = (.*);", page).group(1))


def test_the_page_shows_the_text_and_each_words_surprise(paths, monkeypatch):
    """The page has the whole text, each word with the mean of its tokens."""
    monkeypatch.setattr(surprise, "PIECE", 50)
    surprise.main([paths.model, paths.text, "--output", str(paths.out)])
    page = (paths.out / "surprise.html").read_text(encoding="utf-8")
    words = [unescape(word) for word in re.findall(r"<span>(.*?)</span>", page, re.DOTALL)]
    assert "".join(words) == TEXT
    assert [word.strip() for word in words if word.strip()] == TEXT.split()
    ids = byte_tokenizer()(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        measured = paths.net(ids, output_surprise=True).surprise
    shown, ends = values_of(page), np.cumsum([len(word.encode()) for word in words])
    assert len(shown) == len(surprise.QUANTITIES) * 3
    for quantity, name in surprise.QUANTITIES.items():
        for i, layer in enumerate(measured):
            tokens = getattr(layer, quantity)[0].mean(0).split(np.diff(ends, prepend=0).tolist())
            assert shown[f"{name}, layer {i + 1}"] == pytest.approx([x.mean().item() for x in tokens], rel=1e-3)
        mean = np.mean([shown[f"{name}, layer {i + 1}"] for i in range(2)], axis=0)
        assert shown[f"{name}, mean of the layers"] == pytest.approx(mean.tolist(), rel=1e-3)


def test_the_page_needs_nothing_else(paths):
    """The page refers to no other file or address."""
    surprise.main([paths.model, paths.text, "--output", str(paths.out)])
    page = (paths.out / "surprise.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|src=|<link|import", page)


def test_the_picture_has_a_panel_for_each_quantity(paths):
    """The picture has a coloured panel for each quantity."""
    surprise.main([paths.model, paths.text, "--output", str(paths.out)])
    picture = matplotlib.image.imread(paths.out / "surprise.png")
    assert picture.shape[1] > 1000
    coloured = (picture[:, :1000, :3].std(-1) > 0.05).mean(1) > 0.5  # rows of pixels that are mostly in colour
    assert (np.diff(coloured.astype(int)) == 1).sum() == len(surprise.QUANTITIES)


@pytest.mark.parametrize("name", ["a$b_{c.txt", "$\\frac{.txt", "{title}.txt", "<b>&.txt", "two\nlines.txt"])
def test_names_of_files(name, paths, tmp_path):
    """File names with formulas, markup or placeholders are shown literally."""
    (tmp_path / name).write_text(TEXT, encoding="utf-8")
    surprise.main([paths.model, str(tmp_path / name), "--output", str(paths.out)])
    page = (paths.out / "surprise.html").read_text(encoding="utf-8")
    assert f"<title>model: {escape(name.replace(chr(10), ' '))}</title>" in page
    assert (paths.out / "surprise.png").stat().st_size > 1000


def test_ids_are_those_of_training(paths, tmp_path):
    r"""`</s>` is text and a line's end is \n, as in training."""
    (tmp_path / "text.txt").write_bytes(b"one </s> two\r\nthree\r\n")
    surprise.main([paths.model, str(tmp_path / "text.txt"), "--output", str(paths.out)])
    page = (paths.out / "surprise.html").read_text(encoding="utf-8")
    words = [unescape(word) for word in re.findall(r"<span>(.*?)</span>", page, re.DOTALL)]
    assert words == ["one ", "</s> ", "two\n", "three\n"]
    ids = byte_tokenizer()("one </s> two\nthree\n", split_special_tokens=True).input_ids
    measured = surprise.measure(paths.net, ids)[0, 0]  # 22 bytes
    assert values_of(page)["gradient norm (surprise), layer 1"] == pytest.approx(
        [measured[a:b].mean() for a, b in pairwise([0, 4, 9, 13, 19])], rel=1e-3
    )


def test_the_page_on_a_telephone(paths):
    """The page fits the screen's width, says in one sentence what is shown, and gives values on a tap."""
    surprise.main([paths.model, paths.text, "--output", str(paths.out)])
    page = (paths.out / "surprise.html").read_text(encoding="utf-8")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    explanations = json.loads(re.search(r"const explanations = (.*);", page).group(1))
    assert explanations.keys() == values_of(page).keys()
    assert all(re.fullmatch(r"The darker a word, the larger [^.]+\.", text) for text in explanations.values())
    assert "onclick" in page and "<output" in page


def test_every_layer_has_a_scale_of_its_own(tmp_path):
    """Each layer's colours use its own range."""
    ramp = np.linspace(0, 1, 100)
    values = np.broadcast_to(np.stack([ramp, 1000 * ramp + 5]), (len(surprise.QUANTITIES), 2, 100))
    surprise.draw(tmp_path / "surprise.png", "title", values, len(values[0]))
    picture = matplotlib.image.imread(tmp_path / "surprise.png")[..., :3]
    coloured = (picture[:, :1000].std(-1) > 0.05).mean(1) > 0.5
    top, bottom = np.flatnonzero(coloured)[0], np.flatnonzero(np.diff(coloured.astype(int)) == -1)[0]
    rows = [picture[round(top + (bottom - top) * share)] for share in (0.25, 0.75)]
    assert np.abs(rows[0] - rows[1])[:, ::7].mean() < 0.02


@in_one_test(
    "text,words",
    [
        ("one two", ["one ", "two"]),
        ("\n one\n\ntwo ", ["\n ", "one\n\n", "two "]),
        ("x", ["x"]),
        (" ", [" "]),
    ],
)
def test_words(text, words):
    """Words keep their spaces and have the mean of their own tokens."""
    spans = [(i, i + 1) for i in range(len(text))]
    found, values = surprise.word_means(text, spans, np.arange(len(text))[None])
    assert found == words
    starts = np.cumsum([0, *map(len, words)])
    assert values[0] == pytest.approx([np.arange(a, b).mean() for a, b in pairwise(starts)])


def test_a_token_of_several_words():
    """A token of several words makes them one span with its value."""
    found, values = surprise.word_means("in a word so", [(0, 4), (4, 9), (9, 12)], np.array([[1.0, 2.0, 3.0]]))
    assert found == ["in a ", "word ", "so"]
    assert values.tolist() == [[1.0, 2.0, 3.0]]


@in_one_test(
    "change,message",
    [
        (["missing.txt"], "No such file or directory: .missing.txt"),
        (["bad.txt"], "TEXT bad.txt is not UTF-8"),
        (["text.txt", "--max_tokens=-1"], "--max_tokens must be at least 1, but is -1"),
        (["text.txt", "--output=bad.txt/page"], "--output bad.txt/page cannot be a folder: bad.txt is a file"),
        (["text.txt", "--max_tokens=5"], r"TEXT text.txt has \d+ tokens; it may have 1 to 5"),
    ],
)
def test_bad_input(change, message, paths, monkeypatch, tmp_path):
    """A missing, unreadable or too long text raises an error that names it before anything is written."""
    monkeypatch.chdir(tmp_path)
    Path("bad.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        surprise.main([paths.model, "--output", str(paths.out), *change])
    assert not paths.out.exists()
