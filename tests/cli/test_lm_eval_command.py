"""lm-eval's own command line on a Titans checkpoint: a prompt is read whole."""

import json
import sys

import pytest
from byte_model import save_byte_model
from datasets.exceptions import DatasetGenerationError

import titans_hf_console as console
from titans_hf import TitansConfig, TitansModel

NUM_NEW = 128


@pytest.mark.slow
def test_a_prompt_is_read_whole_in_constant_memory(monkeypatch, tmp_path):
    """`titans-hf lm-eval --model titans` reads every token of a prompt once, 512 per call."""
    pytest.importorskip("lm_eval")
    calls, forward = [], TitansModel.forward

    def noting_forward(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        calls.append(result.last_hidden_state.shape[1])
        return result

    monkeypatch.setattr(TitansModel, "forward", noting_forward)
    save_byte_model(tmp_path / "model", "mag")
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "The key is 7. " * 270, "answer": "7"}) + "\n")
    (tmp_path / "tasks").mkdir()
    task = {"task": "local", "dataset_path": "json", "test_split": "test", "output_type": "generate_until"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}}, "doc_to_target": "{{answer}}"}
    task |= {"doc_to_text": "{{text}}", "metric_list": [{"metric": "exact_match"}]}
    task |= {"generation_kwargs": {"max_gen_toks": NUM_NEW, "until": []}}
    (tmp_path / "tasks" / "local.yaml").write_text(json.dumps(task))  # JSON is YAML
    options = f"--model titans --model_args pretrained={tmp_path / 'model'} --tasks local --device cpu"
    folders = ["--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["titans-hf", "lm-eval", "run", *options.split(), *folders, "--log_samples"])
    console.main()
    (samples,) = tmp_path.rglob("samples_local*.jsonl")
    prompt, _ = json.loads(samples.read_text())["arguments"]["gen_args_0"].values()
    *pieces, _ = [size for size in calls if size > 1]
    assert len(prompt) > 3000 and max(calls) == 512 and pieces == [512] * len(pieces)
    assert len(prompt) <= sum(calls) <= len(prompt) + NUM_NEW


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
