"""scripts/bench.py: each benchmark measures what its table names, and checks results before timing."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from scripts import bench, on_a_gpu
from titans_hf import neural_memory
from titans_hf.cli.training.size import count_parameters


def run(tmp_path, *arguments):
    size = ["--size", "tiny"] * (arguments[0] not in ("memory", "gpu"))
    bench.main([*arguments, *size, "--output", str(tmp_path / "rows.jsonl")])
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


def test_the_peak_of_memory():
    """`peak_bytes` is the peak during the call alone."""
    work = lambda: torch.ones(10_000_000).sum() + torch.ones(5_000_000).sum()  # noqa: E731
    assert 40e6 <= bench.peak_bytes(work, torch.device("cpu")) < 41e6
    assert bench.peak_bytes(lambda: None, torch.device("cpu")) < 1e6


@pytest.mark.parametrize("name", bench.NAMES)
def test_models_are_of_equal_size(name):
    """Every compared model is within 6 % of the nominal size, in two sizes."""
    for size in ("tiny", "30m"):
        shape, parameters = bench.SIZES[size]
        sizes = bench.SHAPE | dict(zip(bench.FIELDS, shape, strict=True))
        assert abs(count_parameters(bench.fit_config(name, parameters, sizes)) / parameters - 1) < 0.06, size


def test_models(tmp_path, monkeypatch, capsys):
    """A row for each model and length; --set changes the Titans alone; what needs too much memory has no figures."""

    def too_little(run, device):
        raise torch.OutOfMemoryError("none left")

    command = ["models", "--lengths", "16", "32", "--repeats", "1", "--models", "lmm", "llama"]
    rows = run(tmp_path, *command, "--set", "memory_form=delta", "intermediate_size=8")
    assert [(row["model"], row["tokens"]) for row in rows] == [("lmm", 16), ("lmm", 32), ("llama", 16), ("llama", 32)]
    assert rows[0]["parameters"] < 900_000 < rows[2]["parameters"]
    assert all(row["train tokens/s"] > 0 and row["train peak KB/token"] > 1 for row in rows)
    assert "| llama | 32 |" in capsys.readouterr().out
    monkeypatch.setattr(bench, "peak_bytes", too_little)
    assert run(tmp_path, *command)[-1]["train peak KB/token"] is None
    for setting, message in (
        ("memory_moment=true", "--set memory_moment: TitansConfig has no such field"),
        ("memory_momentum=7", "memory_momentum"),
    ):
        with pytest.raises((ValueError, StrictDataclassError), match=message):
            run(tmp_path, *command, "--set", setting)


def test_a_wrong_cache_is_not_timed(monkeypatch):
    """A step that differs from the whole text stops the benchmark before timing."""
    args = bench.argparse.Namespace(size="tiny", set=[], dtype="float32", device=torch.device("cpu"))
    right = bench.read
    monkeypatch.setattr(bench, "read", lambda model, ids, **given: right(model, ids))  # the cache is not read
    with pytest.raises(AssertionError, match="TitansForCausalLM: a step is off by"):
        bench.build("lmm", args)


def test_decoding(tmp_path):
    """The reported cache of LMM keeps its size as the context grows; Llama's has the keys of its context."""
    rows = run(tmp_path, "decode", "--contexts", "256", "263", "--steps", "2", "--models", "lmm", "llama")
    sizes = [row["cache MB"] for row in rows]
    assert sizes[0] == sizes[1]
    assert sizes[2:] == pytest.approx([4 * 2 * context * 128 * 4 / 1e6 for context in (256, 263)])


def test_a_wrong_memory_is_not_timed(monkeypatch, tmp_path):
    """A program whose outputs differ from those of float64 stops the benchmark before timing."""
    right = neural_memory.delta_rule

    def wrong(q, k, v, theta, *args, **options):
        return right(q, k, v, (1.01 if theta.dtype == torch.float32 else 1) * theta, *args, **options)

    monkeypatch.setattr(neural_memory, "delta_rule", wrong)
    with pytest.raises(AssertionError, match="torch: the output is off by"):
        run(tmp_path, "memory", "--heads", "1", "--batch_size", "1", "--repeats", "1", "--lengths", "64")


def test_remembering(tmp_path):
    """A row of each memory and piece; full attention's cache is of the context, a memory's of its window."""
    sizes = ["--contexts", "64", "640", "--window", "64", "--tokens", "64", "--pieces", "16", "64", "--steps", "1"]
    rows = run(tmp_path, "remember", "--models", "llama", *sizes)
    assert [row["memory"] for row in rows[2::2]] == list(bench.MEMORIES) and rows[-1]["piece"] == 64
    first, _, full, _, memory, *_ = (row["cache MB"] for row in rows)
    assert full == pytest.approx(10 * first) and full > 2 * memory
    assert all(row["read tokens/s"] > 0 and row["read peak MB"] > 0 for row in rows)


def test_parts_of_the_command_for_a_gpu(tmp_path):
    """Every part of `gpu` is a command. A part that takes too long says so, and the next part begins."""
    for part in list(on_a_gpu.PARTS)[1:]:
        for others in ({}, on_a_gpu.SHORT, on_a_gpu.SMALLEST):
            command = on_a_gpu.command_of(part, others)
            assert bench.make_parser().parse_args(command).benchmark == command[0]
    command = "gpu --device cpu --smallest --parts test-gpu remember-llama"
    with pytest.raises(SystemExit, match="failed: test-gpu, remember-llama"):
        run(tmp_path, *command.split(), "--seconds", "0.01")
    first, second = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert second["part"] == "remember-llama" and first["status"] == second["status"] == "longer than 0.01 seconds"
