"""Models of equal size, and tables of any runs."""

import re
from pathlib import Path

import numpy as np
import pytest

from eval import tables
from eval.common import compared_models as models
from eval.common.records import read_records
from eval.common.tables import with_interval
from titans_hf.cli.training.size import count_parameters

SIZES = {"hidden_size": 128, "vocab_size": 2048}
RESULTS = Path(tables.__file__).parent / "results"


@pytest.mark.parametrize("name", ["mag", "mamba2"])
def test_a_model_too_small_for_mlps_is_an_error(name):
    """The error says which size is possible, and that size is."""
    with pytest.raises(ValueError, match=f"parameters of {name} must be at least .*, but is 300000") as error:
        models.fit_config(name, 300_000, SIZES)
    smallest = int(re.search(r"least (\d+)", str(error.value))[1])
    assert count_parameters(models.fit_config(name, smallest, SIZES)) == smallest


def test_rows_of_any_runs(capsys):
    """Each row of a study that has left has its mean and interval, and differences of equal seed from a baseline."""
    file = RESULTS / "state_tracking.jsonl"
    tables.main([str(file), "--baselines", "lmm"])
    printed = capsys.readouterr().out.splitlines()
    records = [(x["run"], x["result"]["4"]) for x in read_records(file, "state_tracking")]
    results = {(run["row"], run["task"], run["seed"]): x for run, x in records}
    for task in ("parity", "s3"):
        lmm, other = (np.array([results[row, task, seed] for seed in range(3)]) for row in ("lmm", "gated-deltanet"))
        (line,) = [x for x in printed if x.startswith(f"| lmm | {task} | 3 |")]
        assert f"| {lmm.mean():.3f} [" in line
        (line,) = [x for x in printed if x.startswith(f"| gated-deltanet | {task} |") and "+" in x]
        assert line.endswith(f"{with_interval(other - lmm, '+.3f')} |")
    tables.main([str(file), "--rows", "lmm", "--each_seed"])
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("| lmm | s3 | 3 |")]
    assert line.endswith(f"| {', '.join(f'{x:.3f}' for x in lmm)} |")
