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
from covering import in_one_test

from titans_hf.cli import surprise
from titans_hf.cli.training.tokenizer import byte_tokenizer

TEXT = '  Es war <einmal> ein König & "sonst"\nniemand: </s> 東京 ist weit. ' * 4


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A model whose layers have gates of their own, a text, and where to save."""
    folder = tmp_path_factory.mktemp("surprise")
    model = save_byte_model(folder / "model", "mag", memory_gates="layer", memory_depth=2)
    (folder / "text.txt").write_bytes(TEXT.replace("\n", "\r\n").encode())
    return SimpleNamespace(net=model, model=str(folder / "model"), text=str(folder / "text.txt"), out=folder / "out")


def page_of(paths, text: str | Path) -> str:
    surprise.main([paths.model, str(text), "--output", str(paths.out)])
    return (paths.out / "surprise.html").read_text(encoding="utf-8")


def words_of(page: str) -> list[str]:
    return [unescape(word) for word in re.findall(r"<span>(.*?)</span>", page, re.DOTALL)]


def values_of(page: str) -> dict[str, list[float]]:
    return json.loads(re.search(r"const rows = (.*);", page).group(1))


def test_the_page_shows_the_text_and_each_words_surprise(paths, monkeypatch):
    r"""The page has the whole text, each word with the mean of its tokens, and says what each value is. As in training,
    `</s>` is text and a line's end is \n. The page refers to no other file or address. The picture has a coloured panel
    for each quantity.
    """
    monkeypatch.setattr(surprise, "PIECE", 50)
    page = page_of(paths, paths.text)
    words = words_of(page)
    assert "".join(words) == TEXT
    assert [word.strip() for word in words if word.strip()] == TEXT.split()
    ids = byte_tokenizer()(TEXT, split_special_tokens=True, return_tensors="pt").input_ids
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
    explanations = json.loads(re.search(r"const explanations = (.*);", page).group(1))
    assert explanations.keys() == shown.keys()
    assert not re.search(r"https?:|src=|<link|import|<einmal>", page)
    assert (np.diff(coloured_rows(paths.out / "surprise.png")) == 1).sum() == len(surprise.QUANTITIES)


def coloured_rows(file: Path) -> np.ndarray:
    """Returns for each row of pixels of a picture 1 if it is mostly in colour, else 0."""
    picture = matplotlib.image.imread(file)
    assert picture.shape[1] > 1000
    return ((picture[:, :1000, :3].std(-1) > 0.05).mean(1) > 0.5).astype(int)


def test_names_of_files(paths, tmp_path):
    """File names with formulas, markup, placeholders or line ends are shown literally."""
    name = "<b>&{title} $\\frac{ a$b_{c\nlines.txt"
    (tmp_path / name).write_text(TEXT, encoding="utf-8")
    assert f"<title>model: {escape(' '.join(name.split()))}</title>" in page_of(paths, tmp_path / name)


def test_every_layer_has_a_scale_of_its_own(tmp_path):
    """Each layer's colours use its own range."""
    ramp = np.linspace(0, 1, 100)
    values = np.broadcast_to(np.stack([ramp, 1000 * ramp + 5]), (len(surprise.QUANTITIES), 2, 100))
    surprise.draw(tmp_path / "surprise.png", "title", values, is_titans=True)
    picture, coloured = matplotlib.image.imread(tmp_path / "surprise.png"), coloured_rows(tmp_path / "surprise.png")
    top, bottom = np.flatnonzero(coloured)[0], np.flatnonzero(np.diff(coloured) == -1)[0]
    rows = [picture[round(top + (bottom - top) * share), :, :3] for share in (0.25, 0.75)]
    assert np.abs(rows[0] - rows[1])[::7].mean() < 0.02


@in_one_test(
    "text,ends,words",
    [
        ("one two", range(1, 8), ["one ", "two"]),
        ("\n one\n\ntwo ", range(1, 11), ["\n ", "one\n\n", "two "]),
        (" ", [1], [" "]),
        ("in a word so", [4, 9, 12], ["in a ", "word ", "so"]),  # a token of several words makes them one span
    ],
)
def test_words(text, ends, words):
    """Words keep their spaces and have the mean of their own tokens."""
    spans = list(pairwise([0, *ends]))
    found, values = surprise.word_means(text, spans, np.array(ends, float)[None])
    assert found == words
    bounds = np.cumsum([0, *map(len, words)])
    assert values[0] == pytest.approx([np.mean([x for x in ends if a < x <= b]) for a, b in pairwise(bounds)])
