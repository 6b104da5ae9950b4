"""--carry_memory: truncated backpropagation through time over the consecutive blocks of long documents."""

import itertools
import json
import subprocess
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common import TWO_VARIANTS, make_ids, make_model
from covering import covering
from datasets import Dataset
from tiny_run import LAUNCH, TITANS, StopAt
from transformers import AutoModelForCausalLM, TrainingArguments

from titans_hf import TitansCache
from titans_hf.cli import train
from titans_hf.cli.training.carried_memory import CarriedMemoryTrainer, ContiguousBatches, collate_contiguous

pytestmark = pytest.mark.usefixtures("own_cache_and_no_network")
EOS, RATE = 1, 0.02
BLOCK = 9  # no multiple of the chunk (4) or the segment (8), and shorter than the window (12)


def make_stream() -> torch.Tensor:
    """Returns documents shorter and longer than a block, which start at block boundaries and within blocks."""
    documents = [make_ids(length, seed=length) % 48 + 2 for length in (35, 3, 0, 13, 26, 1, 7, 40)]
    return torch.cat([torch.cat([document, torch.tensor([EOS])]) for document in documents])


def make_trainer(model, folder, num_rows: int, **options) -> CarriedMemoryTrainer:
    """One epoch of plain gradient descent, so that the parameters show the gradients."""
    common = dict(output_dir=folder, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True)
    common |= dict(optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant", learning_rate=RATE, num_train_epochs=1)
    common |= dict(train_sampling_strategy="sequential", remove_unused_columns=False, dataloader_pin_memory=False)
    common |= dict(per_device_train_batch_size=num_rows, per_device_eval_batch_size=num_rows)
    blocks = Dataset.from_dict({"input_ids": [block.tolist() for block in make_stream().split(BLOCK)]})
    batches = ContiguousBatches(blocks.with_format("torch"), num_rows, EOS)
    return CarriedMemoryTrainer(
        model,
        TrainingArguments(**common | options),
        data_collator=collate_contiguous,
        train_dataset=batches,
        eval_dataset=batches,
        compute_metrics=partial(train.perplexity, tokens_per_byte=1.0),
    )


def naive_losses(model, batches: ContiguousBatches):
    """Step by step the losses of all predicted tokens, one document of one row after the other, each alone."""
    stream, caches = make_stream(), [None] * batches.num_rows
    for step in range(batches.num_steps):
        losses = []
        for row, (start, end) in enumerate(itertools.pairwise(batches.bounds)):
            first = (start + step) * BLOCK
            block = stream[first : min(first + BLOCK, end * BLOCK)]
            for piece in block.tensor_split((block == EOS).nonzero().flatten() + 1):
                last = first + len(piece)
                if first < last:
                    starts = (step == 0 and first == start * BLOCK) or stream[first - 1] == EOS
                    caches[row] = TitansCache(model.config) if starts else caches[row].detach()
                    logits = model(piece[None], cache=caches[row]).logits[0]
                    targets = stream[first + 1 : last + 1 if stream[last - 1] != EOS else last]
                    losses.append(F.cross_entropy(logits[: len(targets)], targets, reduction="none"))
                first = last
        yield torch.cat(losses)


@covering(1, {"variant": TWO_VARIANTS, "num_rows,accumulated": [(3, 1), (2, 2)]})
def test_training_is_truncated_backpropagation(variant, num_rows, accumulated, tmp_path):
    """Losses and gradients equal a naive loop."""
    trainer = make_trainer(make_model(variant), tmp_path, num_rows, gradient_accumulation_steps=accumulated)
    trainer.train()
    model, data = make_model(variant).train(), trainer.train_dataset
    steps = naive_losses(model, data)
    while batches := list(itertools.islice(steps, accumulated)):
        torch.cat(batches).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
        model.zero_grad()
    assert trainer.state.global_step == -(-data.num_steps // accumulated)
    start = dict(make_model(variant).named_parameters())
    for (name, actual), expected in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        moved = (expected - start[name]).abs().max().item()
        assert moved > 0, name
        assert (actual - expected).abs().max().item() < 1e-4 * moved, name  # transformers' loss is in float32


def test_evaluation_reads_whole_documents(tmp_path):
    """Evaluation uses a cache of its own."""
    trainer = make_trainer(make_model("mag"), tmp_path, 1)
    model, stream = trainer.model, make_stream()
    trainer.caches[True] = carried = TitansCache(model.config)
    metrics = trainer.evaluate()
    losses = []
    with torch.no_grad():
        for document in stream.tensor_split((stream == EOS).nonzero().flatten() + 1)[:-1]:
            losses.append(F.cross_entropy(model(document[None]).logits[0, :-1], document[1:], reduction="none"))
    assert metrics["eval_loss"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-6)
    assert trainer.evaluate()["eval_loss"] == metrics["eval_loss"]
    assert trainer.caches[True] is carried and carried.get_seq_length() == 0


@pytest.mark.parametrize("variant", ["mac", "mag"])
def test_resumed_run_is_bit_identical(options, tmp_path, monkeypatch, variant):
    """A run resumed within a document equals an uninterrupted one."""
    config, common = TITANS | {"variant": variant}, dict(carry_memory="true", tokens_per_step=64, block_length=16)
    common |= dict(eval_steps=4)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    metrics = train.main(options(config, output_dir=whole, **common))
    monkeypatch.setattr(train, "TimeLimit", StopAt)
    monkeypatch.setattr(StopAt, "steps", [])
    train.main(options(config, output_dir=parts, max_minutes=4, **common))
    common |= dict(max_minutes=8, resume_from_checkpoint="true")
    resumed = train.main(options(config, output_dir=parts, **common))
    assert StopAt.steps == list(range(1, 9))
    first, second = (AutoModelForCausalLM.from_pretrained(run / "checkpoint-8").state_dict() for run in (whole, parts))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert resumed["eval_loss"] == metrics["eval_loss"]


def test_resuming_with_other_rows_is_refused(options, tmp_path):
    """Resuming with another batch size, or from a checkpoint without memory, must fail: rows would inherit other
    documents' memory.
    """
    common = dict(carry_memory="true", tokens_per_step=None, gradient_accumulation_steps=1, max_steps=4)
    train.main(options(TITANS, **common))
    common |= dict(max_steps=8, resume_from_checkpoint="true")
    with pytest.raises(ValueError, match="is of a run with rows 2, not 3"):
        train.main(options(TITANS, per_device_train_batch_size=3, **common))
    (tmp_path / "out" / "checkpoint-4" / "carried_memory_0.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"carried_memory_0\.pt"):
        train.main(options(TITANS, **common))


@pytest.mark.slow
def test_two_processes_train_like_one(options, tmp_path, monkeypatch):
    """Two processes share the rows of one batch."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    common = dict(carry_memory="true", gradient_accumulation_steps=1, block_length=16, tokens_per_step=None)
    alone = train.main(options(TITANS, output_dir=tmp_path / "alone", per_device_eval_batch_size=4, **common))
    common |= dict(per_device_train_batch_size=1, per_device_eval_batch_size=2)
    subprocess.run([*LAUNCH, *options(TITANS, **common)], check=True, capture_output=True, timeout=240)
    assert (tmp_path / "out" / "checkpoint-8" / "carried_memory_1.pt").exists()
    together = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert together["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-4)
