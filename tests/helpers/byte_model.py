"""A small checkpoint that reads bytes, for the tests of commands that take one."""

from pathlib import Path

import torch
from common import make_model

from titans_hf import TitansForCausalLM
from titans_hf.cli.training.tokenizer import byte_tokenizer


def save_byte_model(folder: Path, variant: str, **changes) -> TitansForCausalLM:
    """Saves the model and its tokenizer; returns the model."""
    model = make_model(variant, dtype=torch.float32, vocab_size=259, pad_token_id=0, eos_token_id=1, **changes)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model
