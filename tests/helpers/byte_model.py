"""A small checkpoint that reads bytes, for the tests of commands that take one."""

from pathlib import Path

import torch
from common import make_model
from transformers import LlamaConfig, LlamaForCausalLM

from titans_hf import TitansForCausalLM
from titans_hf.cli.training.tokenizer import byte_tokenizer


def save_byte_model(folder: Path, variant: str, **changes) -> TitansForCausalLM:
    """Saves the model and its tokenizer; returns the model."""
    model = make_model(variant, dtype=torch.float32, vocab_size=259, pad_token_id=0, eos_token_id=1, **changes)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def save_llama(folder: Path, **changes) -> LlamaForCausalLM:
    """Saves a random Llama that reads bytes, its tokenizer with a chat template, and a card; returns the model."""
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    ids = dict(vocab_size=259, pad_token_id=0, bos_token_id=None, eos_token_id=1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **ids, "max_position_embeddings": 64, **changes})).eval()
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n\n# Original\n")
    return model
