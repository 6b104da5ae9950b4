"""eval/studies/recalled_facts.py: baselines have the size of Titans, and a repeated command trains nothing."""

import json

import pytest

from eval.common.compared_models import count_parameters
from eval.studies import recalled_facts as study


@pytest.mark.parametrize("row", ["gated-deltanet", "mamba2"])
def test_baselines_have_as_many_parameters(row):
    """A baseline's parameters are within 2 % of those of LMM."""
    sizes = [count_parameters(name, study.config_of(name)) for name in (row, "lmm")]
    assert abs(sizes[0] / sizes[1] - 1) < 0.02


def test_runs_and_table(tmp_path, capsys, monkeypatch):
    """A repeated command trains nothing, and table and picture have a row's recall; another row is refused."""
    monkeypatch.setattr(study, "QUESTIONS", 2)
    monkeypatch.setattr(study.demo, "DISTANCES", (16, 64))
    file = tmp_path / "facts.jsonl"
    command = ["gated-deltanet-late", "--seeds", "0", "1", "--steps", "1", "--batch_size", "1", "--output", str(file)]
    for _ in range(2):
        study.main(command)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["run"]["seed"] for line in lines] == [0, 1]
    for line, right in zip(lines, (0.5, 1.0), strict=True):
        line["result"]["64"] = right
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    study.main(["--output", str(file), "--plot", str(tmp_path / "facts.png")])
    assert (tmp_path / "facts.png").stat().st_size > 0
    assert "| gated-deltanet-late | 0.002 | 1 |" in (report := capsys.readouterr().out) and "least 0.50" in report
    with pytest.raises(ValueError, match="ROW 'rnn' must be one of lmm"):
        study.main(["rnn", "--output", str(file)])
