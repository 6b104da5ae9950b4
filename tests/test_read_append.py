"""scripts/read.py --append, also stopped and repeated: every text is read once."""

import pytest
from memory_folders import assert_equal
from reading_runs import assert_has_read, load, run_read, stop_reading_at, whole_text

from titans_hf.cache_files import read_description


def test_more_texts_are_read_on_with(paths):
    """Adding texts reads only the new ones, and --append any text: otherwise a new text would mean reading everything
    again.
    """
    a, b, c = (paths.texts / f"{name}.txt" for name in "abc")
    run_read(paths, a)
    assert run_read(paths, a, b).num_read == 96
    run_read(paths, a, b, c)
    assert_has_read(paths, whole_text(paths))
    run_read(paths, a, append=True)
    assert load(paths).layers[0].state.memory.num_seen.item() == len(whole_text(paths).encode()) + len(a.read_bytes())
    run_read(paths, a)  # what was appended is known as well


def test_an_append_that_was_stopped_goes_on(paths, monkeypatch):
    """A stopped and repeated --append reads every text once, and after its end appends again: otherwise a part of the
    text would be read twice.
    """
    a, c = paths.texts / "a.txt", paths.texts / "c.txt"
    run_read(paths, a)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_reading_at(128, patch)
        run_read(paths, c, append=True)
    assert read_description(paths.memory)["tokens_seen"] == [len(a.read_bytes()) + 96]
    resumed = run_read(paths, c, append=True)
    whole = paths.memory.with_name("whole")
    run_read(paths, a, memory=whole)
    run_read(paths, c, memory=whole, append=True)
    assert resumed.num_read == len(c.read_bytes())
    assert_equal(load(paths), load(paths, whole))
    run_read(paths, c, append=True)
    assert read_description(paths.memory)["tokens_seen"] == [len(a.read_bytes()) + 2 * len(c.read_bytes())]


@pytest.mark.parametrize("append", [False, True])
def test_appending_to_a_reading_that_was_stopped(append, paths, monkeypatch):
    """Appending to an unfinished reading raises an error unless --abandon is given: otherwise the memory would have
    half a text without notice.
    """
    a, b, c = (paths.texts / f"{name}.txt" for name in "abc")
    run_read(paths, a)
    texts = [c] if append else [a, c]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_reading_at(190, patch)
        run_read(paths, *texts, **({"append": True} if append else {}))
    with pytest.raises(ValueError, match=r"tokens of other texts and was stopped before their end: .* --abandon"):
        run_read(paths, b, append=True)
    (num_seen,) = read_description(paths.memory)["tokens_seen"]
    run_read(paths, b, append=True, abandon=True)
    assert read_description(paths.memory)["tokens_seen"] == [num_seen + len(b.read_bytes())]
