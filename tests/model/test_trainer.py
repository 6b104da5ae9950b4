"""Trainer: mixed precision, gradient accumulation and compiled training. Resuming is tested with titans-hf train."""

import pytest
import torch
from common import TWO_VARIANTS, VARIANTS, make_ids, make_model, redraw
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments

LENGTHS = (30, 9, 22, 17, 25, 11, 30, 2)


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    labels = pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "labels": labels, "attention_mask": (labels != -100).long()}


def fit(model, folder, **options) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains by plain gradient descent, so that parameters show their gradients -> losses and parameters."""
    common = dict(output_dir=folder, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True)
    common |= dict(logging_steps=1, optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant", learning_rate=0.02)
    common |= dict(train_sampling_strategy="sequential", dataloader_pin_memory=False, max_steps=3)
    rows = [{"input_ids": make_ids(length, seed=seed)} for seed, length in enumerate(LENGTHS)]
    trainer = Trainer(model, TrainingArguments(**common | options), data_collator=collate, train_dataset=rows)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert len(losses) == 3 and losses[-1] < losses[0]
    return losses, model.state_dict()


def distance(actual: dict, expected: dict, start: dict) -> float:
    """Returns the distance between two trainings' parameters, relative to the second's distance from the start."""
    norms = [[(a[name] - b[name]).double().norm() for name in b] for a, b in ((actual, expected), (start, expected))]
    return (torch.stack(norms[0]).norm() / torch.stack(norms[1]).norm()).item()


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_accumulated_gradients_are_those_of_one_batch(variant, tmp_path):
    """Accumulated batches train like one."""
    losses, runs = [], []
    for size in (4, 1):
        options = dict(per_device_train_batch_size=size, gradient_accumulation_steps=4 // size)
        run = fit(make_model(variant), tmp_path, **options)
        losses.append(run[0])
        runs.append(run[1])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert distance(runs[1], runs[0], make_model(variant).state_dict()) < 1e-6  # transformers' loss is in float32


@pytest.mark.parametrize("variant", TWO_VARIANTS)
def test_mixed_precision(variant, tmp_path):
    """With bf16 losses are near float32's and parameters stay float32."""
    runs, seen = [], set()
    for bf16 in (False, True):
        model = redraw(make_model(variant, dtype=torch.float32), scale=0.1)
        start = {name: parameter.clone() for name, parameter in model.state_dict().items()}
        if bf16:
            model.lm_head.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
        runs.append(fit(model, tmp_path, per_device_train_batch_size=4, bf16=bf16))
    (losses, parameters), (rough_losses, rough_parameters) = runs
    assert seen == {torch.bfloat16}
    assert all(parameter.dtype == torch.float32 for parameter in rough_parameters.values())
    assert rough_losses == pytest.approx(losses, rel=0.01)
    assert distance(rough_parameters, parameters, start) < 0.1


def test_smoothed_labels_are_those_of_the_next_token(tmp_path):
    """`label_smoothing_factor` smooths the labels of the next token."""
    rows, losses = [{"input_ids": ids, "labels": ids} for ids in make_ids(4, 20)], []
    for factor in (0.0, 1e-9):
        options = dict(label_smoothing_factor=factor, use_cpu=True, report_to="none")
        trainer = Trainer(make_model("mag"), TrainingArguments(tmp_path, **options), eval_dataset=rows)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_training(variant, tmp_path):
    """`torch_compile` trains the same parameters (with the eager backend)."""
    runs = []
    for compiled in (False, True):
        options = dict(torch_compile=compiled, torch_compile_backend="eager" if compiled else None)
        runs.append(fit(make_model(variant), tmp_path, per_device_train_batch_size=4, **options))
    assert runs[1][0] == pytest.approx(runs[0][0], abs=1e-5)
    assert distance(runs[1][1], runs[0][1], make_model(variant).state_dict()) < 1e-6
