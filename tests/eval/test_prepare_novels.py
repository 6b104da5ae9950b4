"""scripts/prepare_novels.py: the texts of docs/results.md, from clones of public repositories."""

import hashlib
import json

import pytest

from scripts import prepare_novels

TEXTS = {"corpus/a.txt": "It was dark.", "corpus/b.txt": "Nobody was there."}


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder like a clone, and a list of novels with its files."""
    digests = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in TEXTS.items()}
    files = {"train": {"corpus/a.txt": digests["corpus/a.txt"]}, "test": {"corpus/b.txt": digests["corpus/b.txt"]}}
    listed = [{"repository": "https://example.org/novels", "commit": "abc", "files": files}]
    (tmp_path / "novels.json").write_text(json.dumps(listed))
    monkeypatch.setattr(prepare_novels, "NOVELS", tmp_path / "novels.json")
    folder = tmp_path / "clone"
    (folder / "corpus").mkdir(parents=True)
    for path, text in TEXTS.items():
        (folder / path).write_text(text)
    return folder


def test_novels_go_where_they_belong(clone, tmp_path):
    """Every file is written to its split."""
    prepare_novels.main([str(tmp_path), str(clone), "--output", str(tmp_path / "out")])
    written = {str(file.relative_to(tmp_path / "out")): file.read_text() for file in (tmp_path / "out").glob("*/*.txt")}
    assert written == {"train/a.txt": TEXTS["corpus/a.txt"], "test/b.txt": TEXTS["corpus/b.txt"]}


def test_another_text_is_refused(clone, tmp_path):
    """A changed file raises an error before anything is written."""
    (clone / "corpus/b.txt").write_text("Somebody was there.")
    with pytest.raises(ValueError, match=r"b\.txt has SHA-256 .* check out the commit"):
        prepare_novels.main([str(clone), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_missing_clone_is_named(clone, tmp_path):
    """The error for a missing clone names its repository and commit."""
    with pytest.raises(ValueError, match=r"no given folder is a clone of .*https://example\.org/novels .* commit abc"):
        prepare_novels.main([str(tmp_path), "--output", str(tmp_path / "out")])


def test_the_list_is_of_the_known_splits():
    """The splits have 83, 4 and 6 novels, none in two of them."""
    collections = json.loads((prepare_novels.Path(prepare_novels.__file__).with_name("novels.json")).read_text())
    splits = {}
    for collection in collections:
        for split, paths in collection["files"].items():
            splits.setdefault(split, []).extend(paths.values())
    assert {split: len(digests) for split, digests in splits.items()} == {"train": 83, "valid": 4, "test": 6}
    assert len({digest for digests in splits.values() for digest in digests}) == 93
