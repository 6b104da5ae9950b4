"""Fixtures for tiny runs of `titans-hf train`."""

import json
import os
from pathlib import Path

import pytest
from tiny_run import LLAMA

ROOT = Path(__file__).parents[1]
# A checkout tests itself and not an installed titans-hf: here by `pythonpath` in pyproject.toml, in subprocesses by:
OWN = [str(ROOT / "src"), str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([*OWN, *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture
def paths(tmp_path):
    """A checkpoint, a text in three parts, and where to save the memory of it."""
    from reading_runs import make_paths

    return make_paths(tmp_path)


@pytest.fixture
def memory(tmp_path):
    """A model and a folder with its memory of two rows."""
    from memory_folders import save_memory

    return save_memory(tmp_path)


@pytest.fixture
def own_cache_and_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def texts(tmp_path):
    """Documents whose lengths, eos included, are shorter than, equal to and longer than a block of 32."""
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    long = "Zwölf Boxkämpfer, </s> 東京 " * 20
    for name, text in {"a.txt": "short", "b [1].txt": "x" * 31, "c.txt": long, "more/d.txt": ""}.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "README.md").write_text("not a text file")
    return folder


@pytest.fixture
def options(tmp_path, texts):
    """A function making the command line of a tiny run; keywords replace options, and None leaves one out."""

    def make(model=LLAMA, **changes):
        path = tmp_path / f"{model['model_type']}.json"
        path.write_text(json.dumps(model))
        values = dict(config=path, tokenizer="bytes", train_data=texts, output_dir=tmp_path / "out", block_length=32)
        values |= dict(per_device_train_batch_size=2, tokens_per_step=128, max_steps=8, logging_steps=1, eval_steps=2)
        values |= dict(save_steps=4, learning_rate=0.01, use_cpu="true", bf16="false") | changes
        return [text for name, value in values.items() if value is not None for text in (f"--{name}", str(value))]

    return make
