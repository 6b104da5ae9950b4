"""titans-hf read: a memory of all texts, whatever the blocks, and nothing lost by an interruption."""

import io
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from covering import in_one_test
from memory_folders import assert_equal
from reading_runs import (
    SPECIAL,
    TEXT,
    assert_has_read,
    expected,
    flags,
    ids_of,
    load,
    run_read,
    whole_text,
)
from tiny_run import SCRIPT

from titans_hf import cache_files, cache_titans
from titans_hf.cache_files import read_description
from titans_hf.cli import read, surprise
from titans_hf.cli.shared import text_files, text_ids
from titans_hf.cli.training.data import load_splits
from titans_hf.cli.training.tokenizer import byte_tokenizer


def small_blocks(block: int, monkeypatch) -> None:
    """Makes the texts of these tests be read in several blocks, and tokenized in several windows."""
    monkeypatch.setattr(read, "BLOCK", block)
    if block < 1000:
        monkeypatch.setattr(text_ids, "WINDOW", 10 * block)
        monkeypatch.setattr(text_ids, "OVERLAP", 20)


def test_weights_that_were_cut_off_are_named(paths):
    """A checkpoint whose weights were cut off raises an error that names it."""
    weights = Path(paths.model) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"MODEL {paths.model} has damaged weights"):
        run_read(paths, paths.texts)


@pytest.mark.parametrize("block", [1, 7, read.BLOCK])
def test_reading_a_folder(block, paths, monkeypatch):
    """Reading a folder gives the memory of its joined texts, for any block size."""
    small_blocks(block, monkeypatch)
    run_read(paths, paths.texts)
    assert_has_read(paths, whole_text(paths))


def test_read_and_train_take_the_same_files(paths, capsys):
    """`titans-hf read` takes the files of a folder that `titans-hf train` takes, and both say which ones they left. If
    they differed, a model would be asked about notes that its memory has never read.
    """
    (paths.texts / "notes.md").write_text("notes")
    for name in ("README.md", "code.py"):
        (paths.texts / name).write_text("not a text")
    taken = read.list_texts([str(paths.texts)], read.TEXT_SUFFIXES)
    said, _, option = capsys.readouterr().err.partition(" (--suffixes sets which endings are read)")
    said += option
    assert said.endswith("(.md, .txt); left out: README.md, code.py\n")
    assert [path.name for path in read.list_texts([str(paths.texts)], [".py"])] == ["code.py"]
    capsys.readouterr()
    documents = load_splits(str(paths.texts), "--train_data", "train")["train"]["text"]
    assert [path.read_text() for path in taken] == documents[:] and paths.texts / "notes.md" in taken
    assert capsys.readouterr().out == said


def test_reading_standard_input(paths, monkeypatch):
    """Reading files and standard input gives the memory of the joined text."""
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(TEXT.encode())))
    run_read(paths, paths.texts / "a.txt", "-")
    assert_has_read(paths, (paths.texts / "a.txt").read_text() + "\n" + TEXT)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a pipe with a name")
def test_reading_a_pipe(paths):
    """A pipe with a name, as <(zcat book.gz) makes, is read like a file."""
    os.mkfifo(paths.texts / "pipe")
    writer = threading.Thread(target=(paths.texts / "pipe").write_text, args=[TEXT])
    writer.start()
    run_read(paths, paths.texts / "pipe")
    writer.join()
    assert_has_read(paths, TEXT)


def test_a_killed_reading_goes_on(paths):
    """A reading killed with SIGKILL and repeated gives the memory of an uninterrupted one, and reads from the last save
    on.
    """
    sizes = dict(piece=480, save_seconds=0)
    text = " ".join(str(i) for i in range(9000)).encode()
    options = [paths.model, "-", *flags(memory=paths.memory, **sizes)]
    process = subprocess.Popen([sys.executable, SCRIPT.with_name("read.py"), *options], stdin=subprocess.PIPE)
    process.stdin.write(text[:33_000])  # two windows
    process.stdin.flush()
    deadline = time.monotonic() + 120
    while not (paths.memory / "memory.json").exists() or read_description(paths.memory)["tokens_seen"] < [1000]:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    num_seen = read_description(paths.memory)["tokens_seen"][0]
    assert num_seen % 480 == 0
    length = num_seen + 2000
    (paths.texts / "all.txt").write_bytes(text[:length])
    resumed = run_read(paths, paths.texts / "all.txt", **sizes | {"save_seconds": 99})
    assert resumed.num_read == length
    whole = paths.memory.with_name("whole")
    run_read(paths, paths.texts / "all.txt", memory=whole, **sizes | {"save_seconds": 99})
    assert_equal(load(paths), load(paths, whole))


def test_the_memory_is_saved_by_time(paths, monkeypatch):
    """Between two saves lie --save_seconds and the time of a piece, however many tokens that are."""
    saved, clock = [], iter(range(10**6))
    monkeypatch.setattr(read.Reading, "save", lambda reading: saved.append(reading.num_read))
    monkeypatch.setattr(read.time, "monotonic", lambda: next(clock))  # a second passes from piece to piece
    total = run_read(paths, paths.texts, save_seconds=3, piece=32).num_read
    assert saved[:-1] == list(range(saved[0], total, saved[0])) and saved[-1] == total
    assert saved[0] in (64, 96)


def test_what_there_is_to_read_is_said_before(paths, capsys, monkeypatch):
    """A reading that takes long begins with what it reads and how long that takes, by a trial that leaves no trace."""
    monkeypatch.setattr(read, "TRIAL", 8)
    run_read(paths, paths.texts)
    assert_has_read(paths, whole_text(paths))
    number = len(ids_of(whole_text(paths))[0])
    said = re.search(
        r"reading 3 files, 0.0 MB: about ([\d,]+) tokens, which take about .* here \(cpu\)", capsys.readouterr().err
    )
    assert abs(int(said[1].replace(",", "")) - number) < 0.1 * number


def test_the_weights_are_hashed_once(paths, monkeypatch):
    """A reading of many saves computes the hash of all weights once."""
    calls, works = [], cache_files.fingerprint
    for module in (read, cache_titans):
        monkeypatch.setattr(module, "fingerprint", lambda model: calls.append(1) or works(model))
    run_read(paths, paths.texts)
    run_read(paths, paths.texts)
    assert len(calls) == 2


@pytest.mark.parametrize("append", [False, True])
def test_two_readings_of_one_memory_lose_nothing(append, paths, monkeypatch):
    """Of two commands that read into one folder, the one that saves later finds the other's memory and leaves it."""
    a, b, c = (paths.texts / f"{name}.txt" for name in "abc")
    options, read_on, others = {"append": True} if append else {}, read.Reading.read, [b]
    if append:
        run_read(paths, a)

    def read_beside(reading):
        while others:
            run_read(paths, others.pop(), **options)
        return read_on(reading)

    monkeypatch.setattr(read.Reading, "read", read_beside)
    with pytest.raises(ValueError, match=f"another process .* kept in {paths.memory}-") as error:
        run_read(paths, c, **options)
    assert_has_read(paths, a.read_text() + b.read_text() if append else b.read_text())
    assert load(paths, Path(str(error.value).rpartition(" ")[2])).num_tokens_seen.item() > 0


@in_one_test("reading", [5, {}, {"tokens": "5"}, {"tokens": 5, "sha256": "0", "finished": None}])
def test_a_reading_that_cannot_have_been(reading, paths):
    """An inconsistent record of the reading in a memory raises ValueError."""
    cache = expected(paths, "by other means")
    cache.about["reading"] = reading
    cache.save_pretrained(paths.memory, paths.net)
    with pytest.raises(ValueError, match="its reading is"):
        run_read(paths, paths.texts)


@pytest.mark.parametrize("block", [1, 7, read.BLOCK])
def test_special_tokens_in_a_text_are_text(block, paths, monkeypatch):
    """`</s>` in a file has the ids that training gives it."""
    small_blocks(block, monkeypatch)
    (paths.texts / "a.txt").write_text(SPECIAL)
    run_read(paths, paths.texts / "a.txt")
    assert_has_read(paths, SPECIAL)
    assert byte_tokenizer().eos_token_id not in ids_of(SPECIAL)[0]


@pytest.mark.parametrize("block", [1, 7, read.BLOCK])
def test_line_ends_are_those_of_training(block, paths, monkeypatch):
    r"""Line ends \r\n and \r are read as \n, as in training, also across blocks, and a byte order mark is no text."""
    small_blocks(block, monkeypatch)
    file, text = paths.texts / "a.txt", "eins\nzwei\n\ndrei\nvier\n"
    file.write_bytes("eins\r\nzwei\r\n\r\ndrei\rvier\r".encode("utf-8-sig"))
    run_read(paths, file)
    assert_has_read(paths, text)
    (trained_on,) = load_splits(str(file), "--train_data", "train")["train"]["text"]
    assert trained_on == surprise.read_text(str(file)) == text_files.read_text(file, "--text") == text


def test_other_texts_are_refused(paths):
    """Continuing a memory with other texts raises an error."""
    a, b = paths.texts / "a.txt", paths.texts / "b.txt"
    run_read(paths, a, b)
    for texts in ([b], [a]):
        with pytest.raises(ValueError, match=r"has read [\d,]+ tokens of other texts: give the texts that it has read"):
            run_read(paths, *texts)
    cache = expected(paths, "by other means")
    cache.save_pretrained(paths.memory, paths.net)
    with pytest.raises(ValueError, match="was not made by reading texts"):
        run_read(paths, a)


def test_a_folder_whose_name_ends_in_txt_is_no_text(paths):
    """A folder x.txt is read as a folder."""
    expected_text = whole_text(paths)
    (paths.texts / "b1.txt").mkdir()
    run_read(paths, paths.texts)
    assert_has_read(paths, expected_text)
    with pytest.raises(ValueError, match=r"TEXT .*b1.txt holds no .txt or .md files"):
        run_read(paths, paths.texts / "b1.txt")
    (paths.texts / "b1.txt" / "d.txt").write_text("Ende")
    run_read(paths, paths.texts / "b1.txt", append=True)
    assert read_description(paths.memory)["tokens_seen"] == [len(ids_of(expected_text)[0]) + 4]


@in_one_test("script", ["read.py", "ask.py", "surprise.py"])
def test_an_error_is_one_line(script, paths, monkeypatch, capsys):
    """A script's error is one line that names the script."""
    options = {"read.py": ["missing.txt", "--memory", "m"], "surprise.py": ["missing.txt", "--output", "o"]}
    file = str(SCRIPT.with_name(script))
    monkeypatch.setattr(sys, "argv", [file, paths.model, *options.get(script, ["--memory", "missing"])])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(file, run_name="__main__")
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]  # others are of a progress bar
    assert line.startswith(f"{script}: error: ") and "missing" in line


@in_one_test(
    "change,message",
    [
        (lambda paths: [str(paths.texts / "d.txt")], r"TEXT .*d.txt does not exist"),
        (lambda paths: [paths.model], "holds no .txt or .md files"),
        (lambda paths: ["bad.txt"], "TEXT .*bad.txt is not UTF-8"),
        (lambda paths: ["torn.txt"], "TEXT .*torn.txt is not UTF-8"),
        (lambda paths: ["empty.txt"], "TEXT empty.txt holds no text"),
        (lambda paths: [""], "TEXT is empty"),
        (lambda paths: [str(paths.texts), "--piece=0"], "--piece must be at least 1, but is 0"),
    ],
)
def test_bad_input_to_read(change, message, paths, monkeypatch):
    """Wrong arguments raise an error that names them before anything is saved."""
    monkeypatch.chdir(paths.texts)
    Path("empty.txt").touch()
    Path("bad.txt").write_bytes(b"caf\xe9 au lait")
    Path("torn.txt").write_bytes(b"caf\xc3")
    with pytest.raises(ValueError, match=message):
        read.main([paths.model, *change(paths), "--memory", str(paths.memory)])
    assert not paths.memory.exists()


def test_what_is_no_checkpoint_is_refused(paths):
    """A folder without a checkpoint raises an error at once."""
    with pytest.raises(ValueError, match="is not a checkpoint"):
        run_read(SimpleNamespace(model=str(paths.texts), memory=paths.memory), paths.texts)
