"""Trainer: accumulated gradients and smoothed labels. Resuming is tested with titans-hf train."""

import pytest
import torch
from common import assert_same, make_config, make_ids, make_model, redraw
from transformers import Trainer, TrainingArguments

from titans_hf import (
    TitansForCausalLM,
    TitansForQuestionAnswering,
    TitansForSequenceClassification,
    TitansForTokenClassification,
)

OPTIONS = dict(use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False)
# Plain gradient descent: the parameters show the gradients.
OPTIONS |= dict(optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant", learning_rate=0.1, max_steps=1)
# A row of nine tokens -> its labels. In a language model each row has another number of them.
LABELS = {
    TitansForCausalLM: lambda i, ids: {"labels": ids.masked_fill(torch.arange(9) < 2 * i, -100)},
    TitansForSequenceClassification: lambda i, ids: {"labels": i % 3},
    TitansForTokenClassification: lambda i, ids: {"labels": torch.arange(9) % 3},
    TitansForQuestionAnswering: lambda i, ids: {"start_positions": i, "end_positions": 8 - i},
}


@pytest.mark.parametrize("kind", LABELS)
def test_accumulated_gradients_are_those_of_one_batch(kind, tmp_path):
    """Four batches of one row train like one batch of four."""
    rows = [{"input_ids": ids} | LABELS[kind](i, ids) for i, ids in enumerate(1 + make_ids(4, 9, vocab_size=49))]
    runs = []
    for size in (4, 1):
        model = redraw(kind(make_config("mag", num_labels=3, pad_token_id=0)).double())
        options = dict(per_device_train_batch_size=size, gradient_accumulation_steps=4 // size)
        trainer = Trainer(model, TrainingArguments(tmp_path, **OPTIONS, **options), train_dataset=rows)
        runs.append((trainer.train().training_loss, dict(model.named_parameters())))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-5)
    assert_same(runs[1][1], runs[0][1], 1e-6)  # Transformers' loss is in float32


def test_smoothed_labels_are_those_of_the_next_token(tmp_path):
    """`label_smoothing_factor` smooths the labels of the next token."""
    rows, losses = [{"input_ids": ids, "labels": ids} for ids in make_ids(4, 20)], []
    for factor in (0.0, 1e-9):
        options = dict(label_smoothing_factor=factor, use_cpu=True, report_to="none")
        trainer = Trainer(make_model("mag"), TrainingArguments(tmp_path, **options), eval_dataset=rows)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
