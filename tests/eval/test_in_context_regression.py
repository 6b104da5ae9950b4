"""eval/studies/in_context_regression.py: closed forms are those of the definition, runs resume, tables pair seeds."""

import json

import pytest
import torch

from eval.studies import in_context_regression as study
from titans_hf import TitansConfig
from titans_hf.configuration_titans import field_facts

TINY = ["--steps", "2", "--batch_size", "1"]


@pytest.fixture(autouse=True)
def few_sequences(monkeypatch):
    monkeypatch.setattr(study, "SCORED", 2)
    monkeypatch.setattr(study, "VALIDATED", 2)
    monkeypatch.setattr(study, "POINTS", 100)


def test_closed_form_regression():
    """Every error is that of ridge regression solved anew for the pairs before it."""
    x, shown, true = (part.double() for part in study.draw("bursts", 1, 40, torch.Generator().manual_seed(0)))
    errors = study.prediction_errors(x @ x.mT, shown, true, 0.1)[0]
    for t in (0, 5, 39):
        before = x[0, :t]
        weights = torch.linalg.solve(before.mT @ before + 0.1 * torch.eye(3), before.mT @ shown[0, :t])
        torch.testing.assert_close(errors[t], (x[0, t] @ weights - true[0, t]).square())


@pytest.mark.parametrize("row", ["delta-2-momentum", "delta-1-plain+memory_conv_kernel=1", "gated-deltanet"])
def test_a_prediction_sees_no_value_of_its_own_pair(row):
    """The prediction at t does not depend on values from t on, but on x_t and on the values before."""
    torch.manual_seed(0)
    model = study.Learner(study.config_of(row, None), 3).double()
    x, shown, _ = (part.double().requires_grad_() for part in study.draw("sines", 1, 30, torch.Generator()))
    slopes = torch.autograd.grad(model(x, shown)[0, 20], (x, shown))
    assert slopes[0][0, 20].abs().sum() > 0
    assert slopes[1][0, :20].abs().sum() > 0 and slopes[1][0, 20:].abs().sum() == 0


@torch.no_grad()
def test_gated_deltanet_starts_with_keys_a_token_late():
    """Its keys start as the queries of the token before, as those of Titans do."""
    net = study.Learner(study.config_of("gated-deltanet", None), 3).body.layers[0].linear_attn
    projected = net.in_proj_qkvz(torch.randn(1, 10, 32)).mT[:, :96]
    queries, keys, _ = net.conv1d(projected)[..., :10].split(32, 1)
    torch.testing.assert_close(keys[..., 1:], queries[..., :-1])


def test_rows_are_what_their_names_say():
    """A cell sets rule, depth and momentum; chunks are of 16 with the chunk rule; a step can be given."""
    config = study.config_of("chunk-1-plain", 0.25)
    found = (config.memory_update_rule, config.memory_depth, config.memory_momentum, config.memory_chunk_size)
    assert found == ("chunk", 1, False, 16)
    assert (config.memory_max_lr, study.config_of("off", None).memory_max_lr) == (0.25, 0)
    assert study.config_of("ttt", 0.25).to_dict() == study.config_of("chunk-2-plain", 0.25).to_dict() | {
        "memory_forget": False
    }
    assert study.config_of("delta-1-plain+memory_conv_kernel=1", None, 16).memory_conv_kernel == 1
    assert study.config_of("delta-2-momentum+memory_expansion=4", None, 16).memory_expansion == 4
    for cell, form in {"delta-2-momentum": "titans", "delta-1-plain": "delta"}.items():
        fields = study.SIZES.shape | study.SIZES.titans | {"variant": "lmm", "memory_form": form}
        whole, named = study.config_of(cell, None), TitansConfig(**fields)
        for name in field_facts(TitansConfig):
            if name.startswith("memory_") and name not in ("memory_form", "memory_expansion"):
                assert getattr(whole, name) == getattr(named, name), name
    with pytest.raises(ValueError, match="ROW 'chunk-3-plain' must be"):
        study.config_of("chunk-3-plain", None)


def test_runs_and_tables(tmp_path, capsys):
    """A repeated command trains nothing; the table has the better step by validation, and paired differences."""
    file = tmp_path / "runs.jsonl"
    command = ["delta-1-plain", "delta-1-momentum", *TINY, "--output", str(file)]
    study.main(command)
    study.main(command)
    study.main(["delta-1-plain", "--max_lr", "0.01", *TINY, "--output", str(file)])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["name"] for line in lines] == [
        "sines: delta-1-plain, seed 0",
        "sines: delta-1-momentum, seed 0",
        "sines: delta-1-plain, step 0.01, seed 0",
    ]
    for line, valid, test in zip(lines, (0.5, 0.4, 0.6), (0.3, 0.2, 0.1), strict=True):
        line["result"]["valid"][study.LAST], line["result"]["test"][study.LAST] = valid, test
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    study.main(["--output", str(file)])
    report = capsys.readouterr().out
    assert "| delta-1-plain | 0.5 | 1 |" in report and "| kernel ridge |" in report
    assert "| momentum | delta-1-momentum less delta-1-plain | -0.1000 |" in report
