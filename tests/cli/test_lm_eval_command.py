"""lm-eval's own command line on a Titans checkpoint."""

import sys

import pytest
from datasets.exceptions import DatasetGenerationError

import titans_hf_console as console
from titans_hf import TitansConfig


def test_a_task_without_rows_is_one_line(monkeypatch, capsys):
    """A task's data file that holds no rows ends in one line."""
    pytest.importorskip("lm_eval")
    from titans_hf.cli import lm_eval_command

    def without_rows():
        raise DatasetGenerationError("An error occurred") from ValueError("no rows")

    monkeypatch.setattr(lm_eval_command, "cli_evaluate", without_rows)
    monkeypatch.setattr(sys, "argv", ["titans-hf", "lm-eval", "run"])
    with pytest.raises(SystemExit):
        console.main()
    assert capsys.readouterr().err.endswith("error: the data of a task cannot be read: no rows\n")


def test_the_limit_is_no_field_of_the_configuration(tmp_path):
    """The context has no limit, by which lm-eval's own class would cut prompts, and config.json contains none."""
    TitansConfig().save_pretrained(tmp_path)
    assert TitansConfig().n_positions > 2**32
    assert "n_positions" not in (tmp_path / "config.json").read_text()
    assert "n_positions" not in TitansConfig().to_dict()
