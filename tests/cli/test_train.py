"""titans-hf train: a tiny run from text to a pipeline, fine-tuning, and two processes."""

import json
import math
import subprocess

import numpy as np
import pytest
import torch
from tiny_run import LAUNCH, LLAMA, SHORT, TITANS, losses
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from titans_hf.cli import train
from titans_hf.cli.training.data import load_splits, make_blocks
from titans_hf_console import RunArguments

pytestmark = pytest.mark.usefixtures("own_cache_and_no_network")


@pytest.mark.parametrize("config", [LLAMA, TITANS], ids=lambda config: config["model_type"])
def test_training_gives_a_model_that_loads_and_generates(options, tmp_path, texts, config):
    """A trained model loads with the reported losses, generates, and has its files."""
    metrics = train.main(options(config, eval_data=texts))
    folder = tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == config["model_type"] and model.config.use_cache
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (None, 1, 0)
    documents = load_splits(str(texts), "--eval_data", "validation")["validation"]
    blocks, tokens_per_byte = make_blocks(documents, RunArguments(train_data="", block_length=32), tokenizer)
    ids, counts = zip(*((x["input_ids"][None], len(x["input_ids"]) - 1) for x in blocks), strict=True)
    with torch.no_grad():
        loss = np.average([model(x, labels=x).loss.item() for x in ids], weights=counts)
    assert metrics["eval_loss"] == pytest.approx(loss, abs=1e-4)
    assert metrics["eval_loss"] == pytest.approx(min(value for _, value in losses(folder, "eval_loss")))
    assert metrics["eval_loss"] < math.log(320) - 1
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    assert metrics["eval_bits_per_byte"] == pytest.approx(metrics["eval_loss"] / math.log(2) * tokens_per_byte)
    assert json.loads((folder / "eval_results.json").read_text())["eval_perplexity"] == metrics["eval_perplexity"]
    record = json.loads((folder / "run.json").read_text())
    assert record["steps"] == 8 and 7 * 128 < record["tokens_seen"] <= 8 * 128
    assert record["block_length"] == 32
    generate = pipeline("text-generation", model=str(folder), device="cpu")
    assert generate("Zwölf", max_new_tokens=4, do_sample=False)[0]["generated_text"].startswith("Zwölf")


def test_fine_tuning(options, tmp_path):
    """A run starts from a checkpoint and its tokenizer; --train_only memory changes the memory's parameters alone."""

    def changed(name: str, **more) -> set[str]:
        tuned = dict(config=None, tokenizer=None, model_name_or_path=tmp_path / "out", output_dir=tmp_path / name)
        train.main(options(TITANS, **SHORT, **tuned | more))
        after = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        return {name for name in start if not torch.equal(start[name], after[name])}

    train.main(options(TITANS, **SHORT))
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model(torch.tensor([[5, 6]])).cache is not None  # whose config Trainer would save without a cache
    start = model.state_dict()
    assert not changed("tuned", learning_rate=0.0)
    card = (tmp_path / "tuned" / "README.md").read_text()
    assert "From out on texts" in card and "From scratch" not in card and str(tmp_path) not in card
    assert changed("memory", train_only="memory") == {name for name in start if "memory" in name}
    with pytest.raises(ValueError, match="--model_name_or_path"):
        changed("other", config_overrides="hidden_size=16")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="processes find each other where there is a GPU")
def test_processes_that_know_nothing_of_each_other_are_refused(options, tmp_path):
    """Processes without a common group raise an error."""
    run = subprocess.run([*LAUNCH, *options(use_cpu=None)], capture_output=True, text=True, timeout=240)
    assert run.returncode and "2 processes were started, but each would train by itself" in run.stderr
    assert not (tmp_path / "out").exists()
