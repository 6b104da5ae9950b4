"""titans_hf.cli.shared: tables, text files, checks of options, progress."""

import argparse
import time
from argparse import Namespace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tqdm import tqdm
from tqdm.auto import tqdm as auto_tqdm

from titans_hf.cli.shared import command_line
from titans_hf.cli.shared.argument_checks import check_minimums
from titans_hf.cli.shared.checkpoints import load_config, load_tokenizer
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.figures import save_figure
from titans_hf.cli.shared.markdown_tables import markdown_table
from titans_hf.cli.shared.text_files import find_files
from titans_hf_console import HelpFormatter


def test_a_cell_stays_within_its_row_and_column():
    """A bar or a line break in a value is escaped."""
    table = markdown_table(["a", "b"], [["x|y", "two\nlines"], [1, 2.5]])
    assert table.splitlines() == ["| a | b |", "| --- | --- |", r"| x\|y | two lines |", "| 1 | 2.5 |"]


def test_files_are_those_of_the_suffixes_in_all_subfolders(tmp_path):
    """All commands list the same files of a folder."""
    for name in ("b.txt", "sub/a.TXT", "notes.md", "README.md", "c.png", ".hidden.txt", ".git/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.txt").mkdir()
    found = find_files(tmp_path, "--text")
    assert found == [tmp_path / "b.txt", tmp_path / "notes.md", tmp_path / "sub" / "a.TXT"]
    assert find_files(tmp_path, "--text", (".md",)) == [tmp_path / "notes.md"]
    assert find_files(tmp_path / "notes.md", "--text") == [tmp_path / "notes.md"]


def test_progress_in_a_log_file_is_a_line_a_minute(monkeypatch, capsys):
    """Without a terminal a bar of any package is a line every so often, and a short one is nothing."""
    for name in ("__init__", "status_printer"):
        monkeypatch.setattr(tqdm, name, vars(tqdm)[name])
    monkeypatch.setattr(command_line, "LINE_SECONDS", 0.25)
    run_command(lambda: [time.sleep(0.01) for _ in auto_tqdm(range(100), desc="long")] + list(auto_tqdm(range(9))))
    lines = capsys.readouterr().err.split("\n")
    assert 3 <= sum(map(bool, lines)) <= 6 and all(line.startswith("long:") for line in lines if line)
    assert not any("\r" in line for line in lines)


def test_a_name_without_a_network_fails_at_once(monkeypatch):
    """A name that is no folder fails at once where the Hub cannot be reached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    for load in (load_config, load_tokenizer):
        with pytest.raises(ValueError, match=r"MODEL runs/tiny-mug .*: no such folder, and not available from the Hub"):
            load("runs/tiny-mug", "MODEL")
    assert time.monotonic() - start < 10


def test_help_shows_defaults():
    """Help shows the default of every option that has one, 0 too."""
    parser = argparse.ArgumentParser(formatter_class=HelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--keep", action="store_true", help="keep it")
    parser.add_argument("--data", help="a folder")
    lines = [line.strip() for line in parser.format_help().splitlines()]
    assert lines[-3:] == ["--seed SEED  of the draws (default: 0)", "--keep       keep it", "--data DATA  a folder"]


def test_the_traceback_of_an_error_can_be_had(monkeypatch):
    """With TITANS_HF_DEBUG=1 an error is raised; test_command_refusals.py has the line that is printed otherwise."""
    monkeypatch.setenv("TITANS_HF_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        run_command(Path("missing").read_bytes)


def test_numbers_below_their_minimum_are_refused():
    """Numbers, each of a list too, and nan are compared with a minimum."""
    check_minimums(Namespace(steps=1, lengths=[0, 2], limit=None), steps=1, lengths=0, limit=1)
    for value, message in ((0, "is 0"), (float("nan"), "is nan"), ([3, -1], "is -1")):
        with pytest.raises(ValueError, match=f"^--steps must be at least 1, but {message}$"):
            check_minimums(Namespace(steps=value), steps=1)


def test_names_in_a_picture_are_no_formulas(tmp_path):
    """One legend lies beside all panels and names a line once. Names that are no formula are drawn as they are."""
    figure = Figure(layout="constrained")
    panels = figure.subplots(1, 2)
    for axes in panels:
        axes.plot([1, 2], [3, 4], label="run$_{x$")
        axes.set_title("$_{")
    save_figure(figure, tmp_path / "figure.png")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["run$_{x$"]
    assert legend.get_window_extent().x0 > max(axes.get_window_extent().x1 for axes in panels)
