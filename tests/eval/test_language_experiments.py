"""eval/language: runs are scored by position and compared text by text."""

import re
from pathlib import Path

import numpy as np
import pytest

from eval import tables
from eval.common import compared_models as models
from eval.common.records import append_record, read_records
from eval.language import compare_runs, token_blocks, train_and_score

RESULTS = Path(compare_runs.__file__).parents[1] / "results"


@pytest.fixture
def texts(tmp_path):
    """Two folders of short texts."""
    for folder in ("train", "score"):
        (tmp_path / folder).mkdir()
        for i in range(2):
            (tmp_path / folder / f"{i}.txt").write_text(f"The ship {folder} number {i} sailed on. " * 60)
    return tmp_path


def run(texts, name, *options):
    output = texts / "runs.jsonl"
    folders = ["--train_text", texts / "train", "--score_text", texts / "score", "--output", output, "--label", name]
    sizes = ["--vocab_size", 300, "--block_length", 32, "--score_length", 96, "--batch_size", 2, "--steps", 2]
    small = ["--parameters", 700_000, "--stretches", 2, *options]
    train_and_score.main(["lmm", *map(str, [*folders, *sizes, *small])])
    return output


def test_a_run_and_its_twin_are_compared(texts, capsys):
    """A run records its settings, curve and losses per stretch, and the table has both runs with their difference. A
    pair or a text that no run has is an error, and a finished run is kept.
    """
    run(texts, "lmm")
    output = run(texts, "off", "--set", "memory_max_lr=0")
    record = read_records(output, "language")[1]
    assert record["settings"] == {"memory_max_lr": 0} and record["config"]["memory_max_lr"] == 0
    assert [step for step, _ in record["training"]["loss"]] == [1, 2] and record["training"]["block_length"] == 32
    assert record["edges"] == [0, 64, 96] and [len(x) for x in record["stretches"]] == [3] * 4
    assert np.allclose(np.mean([x[1:] for x in record["stretches"]], axis=0), record["mean"], atol=1e-4)
    capsys.readouterr()
    compare_runs.main([str(output), "--pairs", "lmm:off"])
    printed = capsys.readouterr().out
    assert "| lmm |" in printed and "| lmm less off | 1 |" in printed
    text, losses = record["stretches"][0][0], [x[1:] for x in record["stretches"]]
    mine = [x for x, stretch in zip(losses, record["stretches"], strict=True) if stretch[0] == text]
    compare_runs.main([str(output), "--rows", "off", "--texts", text])
    assert " | ".join(f"{x:.3f}" for x in np.mean(mine, axis=0)) in capsys.readouterr().out and len(mine) < len(losses)
    for options, message in (
        (["--texts", text, "another"], "--texts: lmm was not scored on another"),
        (["--rows", "mag"], "--rows mag: no run in .* has such a name"),
        (["--pairs", "lmm:other"], "--pairs must be NAME:BASELINE, all of lmm, off, but has lmm:other"),
        (["--pairs", "lmm:off:off"], "--pairs must be NAME:BASELINE"),
    ):
        with pytest.raises(ValueError, match=message):
            compare_runs.main([str(output), *options])
    before = output.read_bytes()
    with pytest.raises(ValueError, match="has lmm with seed 0: give another --label"):
        run(texts, "lmm")
    assert output.read_bytes() == before


@pytest.mark.parametrize("name", models.NAMES)
def test_models_are_of_equal_size(name):
    """Every model has the parameters asked for, within 5 %."""
    config = models.fit_config(name, 1_200_000, {"vocab_size": 2048})
    assert abs(models.count_parameters(config) / 1_200_000 - 1) < 0.05


@pytest.mark.parametrize("name", ["mag", "mamba2"])
def test_a_model_too_small_for_mlps_is_an_error(name):
    """The error says which size is possible, and that size is."""
    with pytest.raises(ValueError, match=f"the parameters of {name} must be at least .*, but are 300000") as error:
        models.fit_config(name, 300_000, {"vocab_size": 2048})
    smallest = int(re.search(r"least (\d+)", str(error.value))[1])
    assert models.count_parameters(models.fit_config(name, smallest, {"vocab_size": 2048})) == smallest


def changed_rows(folder, losses: dict[str, dict[int, list]]) -> dict:
    """Reads rows whose records are a published run's but for name, seed and stretches."""
    published = read_records(RESULTS / "language" / "forms-1200k.jsonl", "language")[0]
    for name, by_seed in losses.items():
        for seed, stretches in by_seed.items():
            about = {"name": name, "training": published["training"] | {"seed": seed}}
            append_record(published | about | {"edges": [0, 64], "stretches": stretches}, folder / "runs.jsonl")
    return compare_runs.read_rows([folder], ["*"])[0]


def test_difference_by_hand(tmp_path):
    """A difference is of means over texts, not stretches."""
    losses = {"a": (1.0, 1.0, 4.0), "b": (0.5, 0.5, 3.0)}
    stretches = {name: [[*x] for x in zip("xxy", found, strict=True)] for name, found in losses.items()}
    rows = changed_rows(tmp_path, {name: {0: found, 1: found} for name, found in stretches.items()})
    assert compare_runs.paired_difference(rows["b"], rows["a"]) == ["2", "-0.750 [-1.000, -0.500]"]  # x -0.5, y -1


def test_intervals_are_over_seeds_and_texts(tmp_path):
    """An interval covers what the seeds do, although all texts agree; the difference of a single seed has none."""
    gains = {0: 0.1, 1: 0.3}
    losses = {
        name: {seed: [[x, 1.0 - y * gain] for x in "xy"] for seed, gain in gains.items()}
        for name, y in (("a", 0), ("b", 1))
    }
    rows = changed_rows(tmp_path, losses)
    assert compare_runs.paired_difference(rows["b"], rows["a"]) == ["2", "-0.200 [-0.300, -0.100]"]
    single = rows["b"].loc[[0]]
    assert compare_runs.paired_difference(single, rows["a"]) == ["1", "-0.100"]


def test_stretches_are_spread_over_a_text():
    """The first and the last stretch reach the ends of the text."""
    stretches = token_blocks.cut_stretches([np.arange(100)], length=9, number=3)
    assert stretches[:, 0].tolist() == [0, 45, 90] and stretches[-1, -1] == 99


def test_rows_of_any_runs(capsys):
    """Runs of a study that has left print a line for each row with its mean and interval over seeds, and differences of
    equal seed from a baseline, fields that differ apart.
    """
    file = RESULTS / "state_tracking.jsonl"
    tables.main([str(file), "--baselines", "lmm"])
    printed = capsys.readouterr().out.splitlines()
    results = {
        tuple(x["run"][y] for y in ("row", "task", "seed")): x["result"]["4"]
        for x in read_records(file, "state_tracking")
    }
    for task in ("parity", "s3"):
        lmm, other = (np.array([results[row, task, seed] for seed in range(3)]) for row in ("lmm", "gated-deltanet"))
        (line,) = [x for x in printed if x.startswith(f"| lmm | {task} | 3 |")]
        assert f"| {lmm.mean():.3f} [" in line
        change = other - lmm
        half = 4.302653 * change.std(ddof=1) / 3**0.5  # Student's t with two degrees of freedom
        expected = f"{change.mean():+.3f} [{change.mean() - half:+.3f}, {change.mean() + half:+.3f}] |"
        (line,) = [x for x in printed if x.startswith(f"| gated-deltanet | {task} |") and "+" in x]
        assert line.endswith(expected)
    tables.main([str(file), "--rows", "lmm", "--each_seed"])
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("| lmm | s3 | 3 |")]
    assert line.endswith(f"| {', '.join(f'{x:.3f}' for x in lmm)} |")
