"""Fine-tuning on conversations with TRL's SFTTrainer: padded, padding-free and packed."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from common import ATTENTIONS, make_model
from covering import covering
from datasets import Dataset

import titans_hf.cli
from titans_hf.cli.training.tokenizer import byte_tokenizer

trl = pytest.importorskip("trl", reason="fine-tuning on conversations needs trl: pip install -e '.[finetune]'")

pytestmark = pytest.mark.usefixtures("own_cache_and_no_network")
RATE = 0.02


@pytest.fixture
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (Path(titans_hf.cli.__file__).parent / "configs" / "chat_template.jinja").read_text()
    return tokenizer


@pytest.fixture
def chats():
    """Conversations of very different lengths."""
    turns = [("hi", "yes"), ("add 1 and 2, and then 3 and 4", "that is 10, or " * 3), ("what?", "no, never!")]
    talks = [turns[:1], turns, turns[1:2], turns[2:], turns[::-1], turns[:1]]
    roles = ("user", "assistant")
    said = [
        [dict(zip(("role", "content"), x, strict=True)) for y in c for x in zip(roles, y, strict=True)] for c in talks
    ]
    return Dataset.from_list([{"messages": x} for x in said])


def fine_tune(variant: str, folder, tokenizer, chats, **options):
    """Makes two steps of plain gradient descent on all conversations, so that parameters show the gradients."""
    common = dict(output_dir=folder, use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True)
    common |= dict(optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant", learning_rate=RATE, max_steps=2)
    common |= dict(per_device_train_batch_size=6, max_length=400, assistant_only_loss=True, logging_steps=1)
    common |= dict(gradient_checkpointing=False, dataloader_pin_memory=False)
    model = make_model(variant, vocab_size=260)
    arguments = trl.SFTConfig(**common | options)
    trainer = trl.SFTTrainer(model, arguments, train_dataset=chats, processing_class=tokenizer)
    trainer.train()
    return trainer


def fine_tune_naively(variant: str, tokenizer, chats) -> torch.nn.Module:
    """Makes the same steps one conversation at a time, with the loss of the assistant's tokens alone."""
    model = make_model(variant, vocab_size=260).train()
    for _ in range(2):
        losses = []
        for messages in chats["messages"]:
            chat = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            ids, learnt = torch.tensor(chat["input_ids"]), torch.tensor(chat["assistant_masks"])[1:] == 1
            logits = model(ids[None]).logits[0, :-1]
            losses.append(F.cross_entropy(logits[learnt], ids[1:][learnt], reduction="none"))
        torch.cat(losses).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
        model.zero_grad()
    return model


WAYS = {
    "padded": {},
    "padding-free": dict(padding_free=True, max_length=None),
    "packed": dict(packing=True, packing_strategy="bfd"),
}


@covering(1, {"variant": ATTENTIONS, "way": WAYS})
def test_conversations_are_learnt_alike(variant, way, tmp_path, tokenizer, chats):
    """Padded, padding-free and packed training give the parameters of one conversation at a time."""
    trainer = fine_tune(variant, tmp_path, tokenizer, chats, **WAYS[way])
    rows = next(iter(trainer.get_train_dataloader()))["input_ids"]
    assert rows.shape[0] == (6 if way == "padded" else 1)
    expected = fine_tune_naively(variant, tokenizer, chats)
    start = dict(make_model(variant, vocab_size=260).named_parameters())
    for (name, parameter), other in zip(trainer.model.named_parameters(), expected.parameters(), strict=True):
        moved = (other - start[name]).abs().max().item()
        assert moved > 0, name
        assert (parameter - other).abs().max().item() < 1e-3 * moved, name  # TRL's loss is in float32
