"""titans-hf read --append, also stopped and repeated: every text is read once."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from memory_folders import assert_equal
from reading_runs import assert_has_read, load, run_read, stop_reading_at, whole_text

from titans_hf.cache_files import read_description


def test_more_texts_are_read_on_with(paths):
    """Adding texts reads only the new ones, and --append any text."""
    a, b, c = (paths.texts / f"{name}.txt" for name in "abc")
    run_read(paths, a)
    assert run_read(paths, a, b).num_read == 96
    run_read(paths, a, b, c)
    assert_has_read(paths, whole_text(paths))
    run_read(paths, a, append=True)
    assert load(paths).num_tokens_seen.item() == len(whole_text(paths).encode()) + len(a.read_bytes())
    run_read(paths, a)  # what was appended is known as well


def num_seen(memory: Path) -> int:
    (number,) = read_description(memory)["tokens_seen"]
    return number


def stop_an_append(paths, monkeypatch, text: Path, **options) -> None:
    """Appends a text, and stops before it has been read to its end."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_reading_at(128, patch)
        run_read(paths, text, append=True, **options)


def test_an_append_that_was_stopped_goes_on(paths, monkeypatch):
    """A stopped and repeated --append reads every text once."""
    a, c = paths.texts / "a.txt", paths.texts / "c.txt"
    run_read(paths, a)
    stop_an_append(paths, monkeypatch, c)
    assert num_seen(paths.memory) == len(a.read_bytes()) + 96
    resumed = run_read(paths, c, append=True)
    whole = paths.memory.with_name("whole")
    run_read(paths, a, memory=whole)
    run_read(paths, c, memory=whole, append=True)
    assert resumed.num_read == len(c.read_bytes())
    assert_equal(load(paths), load(paths, whole))


def test_a_repeated_append_reads_nothing(paths, monkeypatch, capsys):
    """A complete --append that is repeated reads nothing and says so, from standard input too."""
    a, c = paths.texts / "a.txt", paths.texts / "c.txt"
    run_read(paths, a)
    run_read(paths, c, append=True)
    complete, expected = len(a.read_bytes()) + len(c.read_bytes()), load(paths)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(c.read_bytes())))
    for text in (c, "-"):
        assert "already" not in capsys.readouterr().err
        run_read(paths, text, append=True)
        assert_equal(load(paths), expected)
        assert "All of TEXT had been read already" in capsys.readouterr().err
    run_read(paths, c, c)  # as the message says
    assert num_seen(paths.memory) == complete + 1 + len(c.read_bytes())


def test_an_append_of_what_begins_alike(paths):
    """Texts that begin as the last one, longer or not, are appended as a whole."""
    a, longer, other = (paths.texts / f"{name}.txt" for name in ("a", "longer", "other"))
    longer.write_text(a.read_text() + "und mehr")
    other.write_text(a.read_text()[:-9] + "und anders")
    total = 0
    for text in (a, longer, other, a):
        run_read(paths, text, append=True)
        total += len(text.read_bytes())
        assert num_seen(paths.memory) == total


@pytest.mark.parametrize("append", [False, True])
def test_appending_to_a_reading_that_was_stopped(append, paths, monkeypatch):
    """Another text is read after what an interrupted reading has read."""
    a, b, c = (paths.texts / f"{name}.txt" for name in "abc")
    run_read(paths, a)
    texts = [c] if append else [a, c]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_reading_at(190, patch)
        run_read(paths, *texts, **({"append": True} if append else {}))
    before = num_seen(paths.memory)
    run_read(paths, b, append=True)
    assert num_seen(paths.memory) == before + len(b.read_bytes())
