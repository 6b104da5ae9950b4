"""scripts/surprise.py: what is drawn over a word is that of the word."""

import json
import re
from html import unescape
from itertools import pairwise
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
import torch
from byte_model import save_byte_model

from titans_hf_scripts import surprise
from titans_hf_scripts.training.tokenizer import byte_tokenizer

TEXT = '  Es war <einmal> ein König & "sonst"\nniemand: 東京 ist weit. ' * 4


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
    """Else a word is lost, or has the colour of its neighbour: read in pieces, in letters of one to three tokens."""
    monkeypatch.setattr(surprise, "PIECE", 50)
    surprise.main([paths.model, paths.text, "--output", str(paths.out)])
    page = (paths.out / "surprise.html").read_text(encoding="utf-8")
    words = [unescape(word) for word in re.findall(r"<span>(.*?)</span>", page, re.DOTALL)]
    assert "".join(words) == TEXT
    assert [word.strip() for word in words if word.strip()] == TEXT.split()
    ids = byte_tokenizer()(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        told = paths.net(ids, output_surprise=True).surprise
    shown, ends = values_of(page), np.cumsum([len(word.encode()) for word in words])
    assert len(shown) == len(surprise.QUANTITIES) * 3
    for quantity, name in surprise.QUANTITIES.items():
        for i, layer in enumerate(told):
            tokens = getattr(layer, quantity)[0].mean(0).split(np.diff(ends, prepend=0).tolist())
            assert shown[f"{name}, layer {i + 1}"] == pytest.approx([x.mean().item() for x in tokens], rel=1e-3)
        mean = np.mean([shown[f"{name}, layer {i + 1}"] for i in range(2)], axis=0)
        assert shown[f"{name}, mean of the layers"] == pytest.approx(mean.tolist(), rel=1e-3)


def test_the_page_needs_nothing_else(paths):
    """Else it is empty for whom it is sent to."""
    surprise.main([paths.model, paths.text, "--output", str(paths.out)])
    page = (paths.out / "surprise.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|src=|<link|import", page)


def test_the_picture_has_a_panel_for_each_quantity(paths):
    """Else the picture is empty, or a gate is missing."""
    surprise.main([paths.model, paths.text, "--output", str(paths.out)])
    picture = matplotlib.image.imread(paths.out / "surprise.png")
    assert picture.shape[1] > 1000
    coloured = (picture[:, :1000, :3].std(-1) > 0.05).mean(1) > 0.5  # rows of pixels that are mostly in colour
    assert (np.diff(coloured.astype(int)) == 1).sum() == len(surprise.QUANTITIES)


@pytest.mark.parametrize(
    "text,words",
    [
        ("one two", ["one ", "two"]),
        ("\n one\n\ntwo ", ["\n ", "one\n\n", "two "]),
        ("x", ["x"]),
        (" ", [" "]),
    ],
)
def test_words(text, words):
    """Else spaces are lost, or a word gets the figures of what is not in it."""
    spans = [(i, i + 1) for i in range(len(text))]
    found, values = surprise.word_means(text, spans, np.arange(len(text))[None])
    assert found == words
    starts = np.cumsum([0, *map(len, words)])
    assert values[0] == pytest.approx([np.arange(a, b).mean() for a, b in pairwise(starts)])


def test_a_token_of_several_words():
    """Else a word that has no token of its own has no figure, and the page breaks."""
    found, values = surprise.word_means("in a word so", [(0, 4), (4, 9), (9, 12)], np.array([[1.0, 2.0, 3.0]]))
    assert found == ["in a ", "word ", "so"]
    assert values.tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    "change,message",
    [
        (["missing.txt"], "TEXT missing.txt is not a file"),
        (["text.txt", "--max_tokens=5"], r"TEXT text.txt has \d+ tokens; it may have 1 to 5"),
    ],
)
def test_bad_input(change, message, paths, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        surprise.main([paths.model, *change, "--output", str(paths.out)])
    assert not paths.out.exists()
