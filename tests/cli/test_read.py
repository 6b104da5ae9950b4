"""titans-hf read: a memory of all texts, whatever the blocks, and nothing lost by an interruption."""

import io
import itertools
import math
import os
import shutil
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from covering import in_one_test
from reading_runs import SPECIAL, TEXT, assert_has_read, expected, ids_of, run_read, stop_reading_at

from titans_hf import cache_files
from titans_hf.cli import read
from titans_hf.cli.shared import text_files
from titans_hf.cli.training.data import load_splits
from titans_hf.cli.training.tokenizer import byte_tokenizer


def test_reading_a_folder(paths):
    r"""Joined texts are read as in training: `</s>` is text, \r\n and \r are \n, and a byte order mark is no text."""
    (paths.texts / "a.txt").write_bytes(f"{SPECIAL}eins\r\nzwei\r\n\r\ndrei\rvier\r".encode("utf-8-sig"))
    run_read(paths, paths.texts)
    rest = [(paths.texts / f"{name}.txt").read_text() for name in "bc"]
    assert_has_read(paths, "\n".join([f"{SPECIAL}eins\nzwei\n\ndrei\nvier\n", *rest]))
    assert byte_tokenizer().eos_token_id not in ids_of(SPECIAL)[0]


def test_commands_read_the_same_texts(paths):
    """`titans-hf read` takes the files of a folder that `titans-hf train` takes, with the same texts."""
    (paths.texts / "notes.md").write_bytes("eins\r\nzwei\r\n\r\ndrei\r".encode("utf-8-sig"))
    (paths.texts / "code.py").write_text("not a text")
    documents = load_splits(str(paths.texts), "--train_data", "train")["train"]["text"]
    texts = [text_files.read_text(path, "TEXT") for path in text_files.find_files(paths.texts, "TEXT")]
    assert documents[:] == texts and texts[-1] == "eins\nzwei\n\ndrei\n"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a pipe with a name")
def test_pipes_and_standard_input(paths, monkeypatch, capsys):
    """A named pipe and standard input are read like files. A text that is repeated there is not read again."""
    os.mkfifo(paths.texts / "pipe")
    for text, said in itertools.product((paths.texts / "pipe", "-"), ("", "All of TEXT had been read already")):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(TEXT.encode())))
        if text != "-":
            threading.Thread(target=text.write_text, args=["Ein Rohr. "]).start()
        run_read(paths, text, append=True)
        errors = capsys.readouterr().err
        assert said in errors and ("already" in errors) == bool(said)
    assert_has_read(paths, f"Ein Rohr. {TEXT}")


SHORT = {"a": "one two three " * 9, "b": "four five " * 5, "c": "six seven eight " * 20}
SHORT |= {"longer": f"{SHORT['a']} and more", "other": f"{SHORT['a'][:-9]} and other"}


@in_one_test(
    "commands,expected",
    [
        (["a", "a b", "a b c"], "{a}\n{b}\n{c}"),
        (["a b c!", "a b c"], "{a}\n{b}\n{c}"),
        (["a b", "+a", "a"], "{a}\n{b}{a}"),
        (["a", "+c!", "+c"], "{a}{c}"),
        (["a", "+c", "+c", "c c"], "{a}{c}\n{c}"),
        (["+a", "+longer", "+other", "+a"], "{a}{longer}{other}{a}"),
        (["a", "+c!", "+b"], "{a}{c:.160}{b}"),
        (["a", "a c!", "+b"], "{a}\n{c:.159}{b}"),
    ],
)
def test_every_text_is_read_once(commands, expected, paths, monkeypatch):
    """Whatever a command adds, appends (+) or repeats, also interrupted (!), each text is read once and in order."""
    for name, text in SHORT.items():
        (paths.texts / f"{name}.txt").write_text(text)
    shutil.rmtree(paths.memory, ignore_errors=True)
    for command in commands:
        texts, options = [paths.texts / f"{x}.txt" for x in command.strip("+!").split()], {"append": True}
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) if command[-1] == "!" else nullcontext():
            stop_reading_at(190 if command[-1] == "!" else math.inf, patch)
            run_read(paths, *texts, **options if command[0] == "+" else {})
    assert_has_read(paths, expected.format(**SHORT))


def test_the_memory_is_saved_by_time(paths, monkeypatch):
    """Between two saves lie --save_seconds and the time of a piece, however many tokens that are."""
    saved, clock = [], iter(range(10**6))
    monkeypatch.setattr(read.Reading, "save", lambda reading: saved.append(reading.num_read))
    monkeypatch.setattr(read.time, "monotonic", lambda: next(clock))  # a second passes from piece to piece
    (paths.texts / "long.txt").write_text(TEXT)
    total = run_read(paths, paths.texts / "long.txt", save_seconds=3, piece=32).num_read
    assert saved[:-1] == list(range(saved[0], total, saved[0])) and saved[-1] == total
    assert saved[0] in (64, 96)


def test_the_weights_are_hashed_once(paths, monkeypatch):
    """A reading of many saves computes the hash of all weights once."""
    calls, works = [], cache_files.weight_facts
    monkeypatch.setattr(cache_files, "weight_facts", lambda model: calls.append(1) or works(model))
    run_read(paths, paths.texts)
    run_read(paths, paths.texts)
    assert len(calls) == 2


def test_two_readings_of_one_memory_lose_nothing(paths, monkeypatch):
    """Of two commands that read into one folder, the one that saves later finds the other's memory and leaves it."""
    b, c = (paths.texts / f"{name}.txt" for name in "bc")
    read_on, others = read.Reading.read, [b]

    def read_beside(reading, ids):
        while others:
            run_read(paths, others.pop())
        return read_on(reading, ids)

    monkeypatch.setattr(read.Reading, "read", read_beside)
    with pytest.raises(ValueError, match=f"another process .* kept in {paths.memory}-"):
        run_read(paths, c)
    assert_has_read(paths, b.read_text())


def test_other_texts_are_refused(paths):
    """Going on with other texts raises an error. So does a memory whose record of its texts is missing or damaged."""
    a, b = paths.texts / "a.txt", paths.texts / "b.txt"
    run_read(paths, a, b)
    for texts in ([b], [a]):
        with pytest.raises(ValueError, match="has read 2 other texts: give the texts that it has read"):
            run_read(paths, *texts)
    for reading in (None, 5, {}, {"texts": ["0"], "tokens": "5"}):
        cache = expected(paths, "by other means")
        cache.about["reading"] = reading
        cache.save_pretrained(paths.memory, paths.net)
        message = "was not made by reading texts" if reading is None else "its reading is"
        with pytest.raises(ValueError, match=message):
            run_read(paths, a)
