"""eval/mad/tables.py: figures are those of the runs, at the rate that the validation sequences choose."""

import pytest

from eval import tables
from eval.common.records import append_record
from eval.common.records import read_records as read
from eval.common.tables import check_alike
from eval.mad.tables import ALIKE, best_results, differences, last, table


def read_records(folder):
    return read(folder, "mad")


@pytest.fixture
def folder(tmp_path):
    """Runs whose last [validation, test] accuracy is given by model, task, rate and seed."""
    accuracies = {
        ("lmm", "recall", 1e-3): [(0.9, 0.8), (0.7, 0.9)],
        ("lmm", "recall", 5e-4): [(0.7, 1.0), (0.7, 1.0)],
        ("lmm", "compression", 1e-3): [(0.5, 0.4), (0.5, 0.4)],
        ("lmm", "compression", 5e-4): [(0.6, 0.5), (0.3, 0.9)],
        ("llama", "recall", 1e-3): [(1.0, 0.95)],
        ("llama", "recall", 5e-4): [(0.2, 0.2)],
    }
    for (model, task, rate), seeds in accuracies.items():
        for seed, (validation, test) in enumerate(seeds):
            save(tmp_path, model, task, rate, seed, [[1, 0.1, 0.1, 2.0], [2, validation, test, 1.0]])
    return tmp_path


def save(folder, model, task, rate, seed, curve, **changed):
    run = {"model": model, "row": model, "data": task, "learning_rate": rate, "seed": seed}
    run |= {"epochs": 2, "batch_size": 128, "weight_decay": 0.0, "bf16": False, "task_settings": {}} | changed
    record = {"benchmark": "mad", "run": run, "curve": curve, "parameters": 1000 + (task == "compression")}
    append_record(record | {"name": f"{run['row']}-{task}-{rate}-{seed}"}, folder / "runs.jsonl")


def test_the_rate_is_chosen_by_validation_and_seeds_are_averaged(folder):
    """The learning rate with the best validation is chosen, and its test scores are averaged over seeds."""
    results = best_results(read_records(folder))
    lines = table(results, ["recall", "compression"]).splitlines()
    assert lines[0] == "| model | parameters | seeds | recall, 2 epochs | compression, 2 epochs |"
    assert lines[2] == "| lmm | 1,000 to 1,001 | 2 | 85.0 ± 7.1 (0.001) | 40.0 ± 0.0 (0.001) |"
    assert lines[3] == "| llama | 1,000 | 1 | 95.0 (0.001) | – |"
    assert lines[4] == "| the paper's Transformer | – | – | – | 49.4 |"


def test_differences_by_hand(folder):
    """A difference is in percentage points of the means."""
    results = best_results(read_records(folder))
    assert differences(results, ["recall", "compression"], "llama").splitlines()[2:] == ["| lmm | -10.0 | – |"]


def test_labels_are_rows_of_their_own(folder):
    """Runs of a model with other settings are another row."""
    save(folder, "lmm", "recall", 1e-3, 0, [[2, 0.3, 0.2, 1.0]], row="lmm off")
    assert last(best_results(read_records(folder))["lmm off"]["recall"]) == [20.0]


def test_runs_that_were_not_made_alike_are_refused(folder):
    """Runs of one task with different settings raise an error."""
    save(folder, "mag", "recall", 1e-3, 0, [[4, 0.3, 0.2, 1.0]], epochs=4)
    with pytest.raises(ValueError, match="recall, mag: epochs is 4, elsewhere 2"):
        check_alike((record["run"] for record in read_records(folder)), ALIKE)


def test_rates_with_different_seeds_are_refused(folder):
    """Rates that were tried with different seeds raise an error."""
    save(folder, "llama", "recall", 1e-3, 1, [[2, 0.3, 0.2, 1.0]])
    with pytest.raises(ValueError, match="llama on recall has other seeds at one learning rate"):
        best_results(read_records(folder))


def test_the_command_prints_the_tables_and_draws_the_plot(folder, capsys):
    """Tables and plot come from the files alone; a file that is no run is named."""
    tables.main([str(folder), "--output", str(folder / "out"), "--baselines", "llama"])
    printed = capsys.readouterr().out
    assert "| lmm |" in printed and "| less llama |" in printed and (folder / "out" / "mad.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="--baselines must be of llama, lmm, but has mamba2"):
        tables.main([str(folder), "--baselines", "mamba2"])
    append_record({"name": "x"}, folder / "runs.jsonl")
    with pytest.raises(ValueError, match=r"runs.jsonl, line 11, is no run of eval.mad"):
        tables.main([str(folder)])
