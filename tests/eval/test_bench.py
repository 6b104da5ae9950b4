"""scripts/bench.py: each benchmark measures what its table names, checks results before timing, and saves its rows."""

import json

import pytest
import torch
from covering import in_one_test
from transformers import DynamicCache

from eval.common.compared_models import count_parameters
from scripts import bench
from scripts.benchmarks import (
    decode,
    measure,
    memory_alone,
    model_shapes,
    whole_models,
)


def run(tmp_path, *arguments):
    repeats = ["--repeats", "1"] if arguments[0] in bench.REPEATED else []
    bench.main([*arguments, *repeats, "--output", str(tmp_path)])
    path = tmp_path / f"{arguments[0]}.json"
    assert path.with_suffix(".png").stat().st_size > 5000
    assert path.with_suffix(".md").read_text().count("\n") == len(json.loads(path.read_text())["rows"]) + 2
    return json.loads(path.read_text())["rows"]


def test_the_peak_of_memory():
    """`peak_bytes` is the peak during the call alone."""
    cpu = torch.device("cpu")
    freed = torch.ones(20_000_000)
    del freed

    def work():
        x = torch.ones(10_000_000)
        del x
        return torch.ones(5_000_000)

    assert 40e6 < measure.peak_bytes(work, cpu) < 56e6
    assert measure.peak_bytes(lambda: None, cpu) < 16e6


def test_work_that_ends_its_process_is_an_error():
    """A measurement whose process fails raises RuntimeError."""
    with pytest.raises(RuntimeError, match="ended without an answer"):
        measure.peak_bytes(lambda: 1 / 0, torch.device("cpu"))


def test_what_is_wrong_is_not_timed(monkeypatch):
    """A wrong memory output stops the benchmark before timing."""
    cpu, chunk_rule = torch.device("cpu"), {"memory_update_rule": "chunk"}
    memory = memory_alone.make_memory(1, 16, cpu, **chunk_rule)
    right = memory_alone.memorize_on_grid
    monkeypatch.setattr(memory_alone, "NUM_CHECKED_TOKENS", 20)
    monkeypatch.setattr(
        memory_alone, "memorize_on_grid", lambda *args, **options: right(*args, **options | {"chunk_size": 8})
    )
    with pytest.raises(AssertionError, match="chunk 16, depth 2: the output is off by"):
        memory_alone.check(memory)


@in_one_test("form", ["titans", "delta", "paper"])
def test_every_form_of_the_memory_is_checked(form, monkeypatch):
    """The memory of each form equals the token loop of its rule."""
    monkeypatch.setattr(memory_alone, "NUM_CHECKED_TOKENS", 20)
    memory_alone.check(memory_alone.make_memory(1, 16, torch.device("cpu"), memory_form=form))


@in_one_test(
    "form,counts",
    [({"memory_update_rule": "chunk", "memory_depth": 1}, (6, 2, 1)), ({"memory_form": "delta"}, (5, 3, 0))],
)
def test_the_floor_counts_every_product(form, counts):
    """`Products.multiply_adds` equals a count by hand for one layer of two rows of three memories: of (C, D) with
    (D, D), of (C, D) with (D, C), and of (C, C) with (C, C).
    """
    chunk, size = 16, memory_alone.HEAD_DIM
    by_hand = counts[0] * chunk * size * size + counts[1] * chunk * chunk * size + counts[2] * chunk**3
    memory = memory_alone.make_memory(3, chunk, torch.device("cpu"), **form)
    assert memory_alone.Products(memory, batch_size=2).multiply_adds == 2 * 3 * by_hand


def test_models_are_of_equal_size():
    """Every compared model is within 6 % of the nominal size."""
    for size, expected in model_shapes.PARAMETERS.items():
        for name in model_shapes.NAMES if size in ("tiny", "30m") else (*model_shapes.VARIANTS, "llama", "mamba2"):
            number = count_parameters(name, model_shapes.fit_config(name, size))
            assert abs(number / expected - 1) < 0.06, name


def test_settings_are_of_titans_alone(tmp_path):
    """--set changes the Titans' configurations and no other, and what it cannot set is an error."""
    pairs = ["memory_momentum=true", "sliding_window=32", "num_attention_heads=2", "num_key_value_heads=2"]
    config = model_shapes.fit_config("mag", "tiny", **model_shapes.settings_of("mag", "tiny", pairs))
    assert config.memory_momentum is True and config.sliding_window == 32
    assert config.num_attention_heads == 2
    assert model_shapes.settings_of("llama", "tiny", pairs) == {}
    with pytest.raises(ValueError, match="--set memory_moment: TitansConfig has no such field"):
        run(tmp_path, "decode", "--models", "llama", "--set", "memory_moment=true")
    with pytest.raises(ValueError, match="--set memory_head_dim: TitansConfig has no such field"):
        run(tmp_path, "decode", "--models", "llama", "--set", "memory_head_dim=64")
    with pytest.raises(ValueError, match="--set variant: the benchmark sets it"):
        run(tmp_path, "decode", "--models", "llama", "--set", "variant=mac")
    with pytest.raises(ValueError, match="--set memory_depth: the benchmark sets it"):
        run(tmp_path, "models", "--models", "mag", "--set", "memory_depth=2")
    with pytest.raises(ValueError, match=r"--set: .*memory_momentum"):
        run(tmp_path, "decode", "--models", "llama", "--set", "memory_momentum=7")


def test_memory(monkeypatch, tmp_path):
    """The memory benchmark reports each length, its time relative to the bare products, and a peak that grows with the
    length.
    """
    monkeypatch.setattr(memory_alone, "check", lambda memory: None)
    rows = run(tmp_path, "memory", "--lengths", "64", "200", "--chunks", "64", "--set", "memory_form=delta")
    assert [row["tokens"] for row in rows] == [64, 200]
    assert all(0 < row["forward of products"] < 2 for row in rows)
    assert rows[0]["both peak MB"] < rows[1]["both peak MB"]


def test_all_parts_of_the_command_for_a_gpu(monkeypatch, tmp_path, capsys):
    """`gpu` has a table, JSON and a picture of the memory of each form, of models (Llama once) and of decoding; what
    needs too much memory is a row without figures, and a part that fails does not stop the others. Without a GPU it is
    an error.
    """

    def too_little(run, device):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(memory_alone, "check", lambda memory: memory.config.memory_form == "titans" or 1 / 0)
    monkeypatch.setattr(model_shapes, "check", lambda model: None)
    monkeypatch.setattr(whole_models, "peak_bytes", too_little)
    tiny = ["--sizes", "tiny", "--models", "lmm", "llama", "--lengths", "32", "--contexts", "32", "--repeats", "1"]
    failing = "memory-titans-with-kernels, memory-delta, memory-delta-without-kernel, decode-tiny-with-kernels"
    with pytest.raises(SystemExit, match=failing):
        bench.main(["gpu", "--device", "cpu", "--batch_size", "1", *tiny, "--output", str(tmp_path)])
    assert "ZeroDivisionError" in capsys.readouterr().err
    rows = {path.parent.name: json.loads(path.read_text())["rows"] for path in tmp_path.glob("*/*.json")}
    assert {"memory-titans", "models-tiny", "models-tiny-delta", "decode-tiny"} == rows.keys()
    assert (
        [row["model"] for row in rows["models-tiny"]] == ["lmm", "llama"] == [x["model"] for x in rows["decode-tiny"]]
    )
    assert [row["model"] for row in rows["models-tiny-delta"]] == ["lmm"]
    assert all(row["train tokens/s"] > 0 and row["train peak KB/token"] is None for row in rows["models-tiny"])
    assert len([*tmp_path.glob("*/*.png"), *tmp_path.glob("*/*.md")]) == 2 * len(rows)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--device cuda cannot be used"):
            bench.main(["gpu", "--output", str(tmp_path)])


@pytest.mark.slow
def test_models(tmp_path):
    """The model benchmark reports all models and lengths, and the one without memory is smaller."""
    rows = run(tmp_path, "models", "--lengths", "64", "128", "--models", "mag", "mamba2", "without memory")
    assert [row["model"] for row in rows] == ["mag"] * 2 + ["mamba2"] * 2 + ["without memory"] * 2
    assert rows[4]["parameters"] < 0.8 * rows[0]["parameters"]


@pytest.mark.slow
def test_decoding(tmp_path):
    """The reported cache of LMM keeps its size as the context grows, and Llama's doubles with it."""
    rows = run(
        tmp_path, "decode", "--size", "tiny", "--contexts", "256", "512", "--steps", "2", "--models", "lmm", "llama"
    )
    sizes = [row["cache MB"] for row in rows]
    assert sizes[0] == sizes[1] and sizes[3] == 2 * sizes[2] == pytest.approx(4 * 2 * 512 * 128 * 4 / 1e6)


@pytest.mark.slow
def test_a_long_prompt(tmp_path):
    """The prompt benchmark reports every --every tokens and the end, and a folder without texts raises an error."""
    (tmp_path / "a.txt").write_text("x" * 700)
    options = ("--text", str(tmp_path), "--tokens", "2000", "--piece", "256", "--every", "1000")
    rows = run(tmp_path / "out", "prompt", *options)
    assert [row["tokens"] for row in rows] == [1024, 2000]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no"):
        run(tmp_path, "prompt", "--text", str(tmp_path / "empty"))


def test_bytes_of_a_cache():
    """`num_bytes` counts the keys and values of a DynamicCache."""
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), layer_idx=0)
    assert decode.num_bytes(cache) == 2 * 24 * 4


def test_full_attention_has_the_keys_of_its_context():
    """A context that is no multiple of what is read has as many keys."""
    model = model_shapes.build(model_shapes.fit_config("llama", "tiny"), torch.device("cpu"), torch.float32)
    cache = decode.Reader(model, decode.NUM_READ_TOKENS + 7).cache
    assert {layer.keys.shape[2] for layer in cache.layers} == {decode.NUM_READ_TOKENS + 7}
