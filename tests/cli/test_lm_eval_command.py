"""lm-eval's own command line on a Titans checkpoint: every prompt is read whole."""

import json
import sys

import pytest
from byte_model import save_byte_model

pytest.importorskip("lm_eval")
from lm_eval.__main__ import cli_evaluate

import titans_hf_console as console
from titans_hf import TitansConfig, TitansModel

NUM_NEW = 128


@pytest.fixture
def calls(monkeypatch):
    """The number of tokens of every call of the model."""
    sizes, forward = [], TitansModel.forward

    def noting_forward(self, *args, **kwargs):
        result = forward(self, *args, **kwargs)
        sizes.append(result.last_hidden_state.shape[1])
        return result

    monkeypatch.setattr(TitansModel, "forward", noting_forward)
    return sizes


def run_lm_eval(monkeypatch, folder, command: list[str], main) -> int:
    """Evaluates one long document by a command line of lm-eval; returns the number of tokens of its prompt."""
    save_byte_model(folder / "model", "mag")
    (folder / "data.jsonl").write_text(json.dumps({"text": "The key is 7. " * 270, "answer": "7"}) + "\n")
    (folder / "tasks").mkdir()
    task = {"task": "local", "dataset_path": "json", "test_split": "test", "output_type": "generate_until"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}}, "doc_to_target": "{{answer}}"}
    task |= {"doc_to_text": "{{text}}", "metric_list": [{"metric": "exact_match"}]}
    task |= {"generation_kwargs": {"max_gen_toks": NUM_NEW, "until": []}}
    (folder / "tasks" / "local.yaml").write_text(json.dumps(task))  # JSON is YAML
    options = f"--model_args pretrained={folder / 'model'} --tasks local --include_path {folder / 'tasks'}"
    options = [*options.split(), "--device", "cpu", "--log_samples"]
    monkeypatch.setattr(sys, "argv", [*command, *options, "--output_path", str(folder / "results")])
    main()
    (samples,) = folder.rglob("samples_local*.jsonl")
    prompt, _ = json.loads(samples.read_text())["arguments"]["gen_args_0"].values()
    assert len(prompt) > 3000
    return len(prompt)


@pytest.mark.slow
def test_a_prompt_is_read_whole_in_constant_memory(monkeypatch, tmp_path, calls):
    """`titans-hf lm-eval --model titans` reads every token of a prompt once, 512 per call."""
    command = ["titans-hf", "lm-eval", "run", "--model", "titans"]
    num_tokens = run_lm_eval(monkeypatch, tmp_path, command, console.main)
    assert max(calls) == 512
    *pieces, _ = [size for size in calls if size > 1]
    assert num_tokens <= sum(calls) <= num_tokens + NUM_NEW and pieces == [512] * len(pieces)


@pytest.mark.slow
def test_plain_hf_reads_a_prompt_whole(monkeypatch, tmp_path, calls):
    """`lm_eval --model hf` reads a Titans' prompt whole."""
    num_tokens = run_lm_eval(monkeypatch, tmp_path, ["lm_eval", "--model", "hf"], cli_evaluate)
    assert calls[0] == num_tokens


def test_the_limit_is_no_field_of_the_configuration(tmp_path):
    """The context has no limit, and config.json contains none."""
    TitansConfig().save_pretrained(tmp_path)
    assert TitansConfig().n_positions > 2**32
    assert "n_positions" not in (tmp_path / "config.json").read_text()
    assert "n_positions" not in TitansConfig().to_dict()
