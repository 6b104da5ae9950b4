"""titans-hf train: runs that were interrupted, stopped by the time limit or finished, and their checkpoints."""

import json
import subprocess
import sys

import pytest
import torch
from tiny_run import LLAMA, SHORT, TITANS, StopAt, losses
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from titans_hf.cli import train

pytestmark = pytest.mark.usefixtures("own_cache_and_no_network")


def test_resumed_run_is_bit_identical(options, tmp_path, monkeypatch, capsys):
    """A resumed run has the weights and losses of an uninterrupted one, and says after which step it goes on."""
    config = TITANS | {"attention_dropout": 0.1}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    metrics = train.main(options(config, output_dir=whole))
    monkeypatch.setattr(train, "TimeLimit", StopAt)
    monkeypatch.setattr(StopAt, "steps", [])
    train.main(options(config, output_dir=parts, max_minutes=4))
    assert StopAt.steps == [1, 2, 3, 4]
    resumed = train.main(options(config, output_dir=parts, max_minutes=8, resume_from_checkpoint="true"))
    assert StopAt.steps == list(range(1, 9)) and capsys.readouterr().out.count("goes on after step 4\n") == 1

    for checkpoint in ("checkpoint-8", "."):
        first, second = (AutoModelForCausalLM.from_pretrained(run / checkpoint).state_dict() for run in (whole, parts))
        assert all(torch.equal(first[name], second[name]) for name in first)
    for key in ("loss", "eval_loss"):
        assert losses(whole, key) == losses(parts, key)
    assert resumed["eval_loss"] == metrics["eval_loss"]


def test_time_limit_stops_evaluates_and_saves(options, tmp_path):
    """--max_minutes ends a run with an evaluation and a checkpoint."""
    train.main(options(max_minutes=1e-9))
    assert get_last_checkpoint(tmp_path / "out").endswith("checkpoint-1")
    assert [step for step, _ in losses(tmp_path / "out", "eval_loss")] == [1]
    assert json.loads((tmp_path / "out" / "run.json").read_text())["planned_steps"] == 8


def test_what_is_resumed(options, tmp_path):
    """A finished run is resumed with more steps; other data, another seed or model is named in an error."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.txt").write_text("another text " * 300)
    train.main(options(TITANS, **SHORT))
    again = SHORT | dict(max_steps=4, resume_from_checkpoint="true")
    for config, changes, message in (
        (TITANS, {"seed": 5}, "seed 42, not 5"),
        (TITANS, {"block_length": 16, "tokens_per_step": 64}, "block_length 32, not 16"),
        (TITANS, {"train_data": tmp_path / "other"}, "train_tokens [0-9]+, not [0-9]+"),
        (TITANS | {"sliding_window": 8}, {}, "sliding_window 16, not 8"),
    ):
        with pytest.raises(ValueError, match=f"checkpoint-2 is of a run with {message}: "):
            train.main(options(config, **again | changes))
    run = tmp_path / "out" / "run.json"
    assert json.loads(run.read_text())["steps"] == 2
    train.main(options(TITANS, **again))
    assert json.loads(run.read_text())["steps"] == 4
    table = (tmp_path / "out" / "README.md").read_text().split("### Training results")[1]
    heading, _, *rows = [line.split("|") for line in table.splitlines() if "|" in line]
    column = [name.strip() for name in heading].index("Validation Loss")
    shown = [float(row[column]) for row in rows]  # of the checkpoint's logs and of the new ones
    assert shown == pytest.approx([x for _, x in losses(tmp_path / "out", "eval_loss")], abs=1e-4) and len(shown) == 2


def test_a_run_that_was_killed_after_its_last_step_is_finished(options, tmp_path):
    """The same command with --resume_from_checkpoint true makes no step, and writes what an uninterrupted run has."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    train.main(options(LLAMA, output_dir=whole, **SHORT))
    code = "import os, sys; from transformers import Trainer; from titans_hf.cli import train; "
    code += "Trainer.save_state = lambda self: os.kill(os.getpid(), 9); train.main(sys.argv[1:])"
    assert subprocess.run([sys.executable, "-c", code, *options(LLAMA, **SHORT)]).returncode == -9
    assert (out / "model.safetensors").exists() and not (out / "run.json").exists()
    train.main(options(LLAMA, **SHORT, resume_from_checkpoint="true"))
    records = [json.loads((folder / "run.json").read_text()) for folder in (whole, out)]
    for name in ("steps", "planned_steps", "best_step", "tokens_seen"):
        assert records[0][name] == records[1][name]
    assert records[0]["metrics"]["eval_loss"] == records[1]["metrics"]["eval_loss"] and (out / "README.md").exists()
    assert (whole / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


class Interrupt(TrainerCallback):
    """Stands in for TimeLimit: Ctrl-C after the third step."""

    def __init__(self, minutes):
        pass

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_an_interrupted_run_says_how_to_go_on(options, monkeypatch, capsys):
    """Ctrl-C ends with the option that goes on, and the steps that are lost."""
    monkeypatch.setattr(train, "TimeLimit", Interrupt)
    with pytest.raises(KeyboardInterrupt):
        train.main(options(LLAMA, max_minutes=1, save_steps=2, eval_steps=2))
    said = "stopped at step 3: the same command with --resume_from_checkpoint true goes on, 1 steps are lost\n"
    assert capsys.readouterr().err.endswith(said)


def test_a_checkpoint_that_was_cut_off_is_skipped(options, tmp_path):
    """Resuming skips a checkpoint without its last file, with a warning."""
    whole = train.main(options(LLAMA))
    last = tmp_path / "out" / "checkpoint-8"
    (tmp_path / "out" / "run.json").unlink()  # the run had not ended
    (last / "trainer_state.json").unlink()
    with pytest.warns(UserWarning, match="checkpoint-8 is incomplete and skipped: .*trainer_state.json"):
        resumed = train.main(options(LLAMA, resume_from_checkpoint="true"))
    assert resumed["eval_loss"] == whole["eval_loss"]
    (last / "trainer_state.json").write_text("{")
    with pytest.warns(UserWarning, match="is incomplete"), pytest.raises(FileNotFoundError, match="no complete"):
        train.main(options(LLAMA, resume_from_checkpoint=last))
