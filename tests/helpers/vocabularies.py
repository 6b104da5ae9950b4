"""Tokenizers of the kinds that are in use, trained on a small text."""

import random

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = "the key was red and door open captain's lamp, (a small one) don't 東京 König!? ...\n\n    aaaaaaaa ".split(" ")


def trained(model, trainer, **parts) -> PreTrainedTokenizerFast:
    raw = Tokenizer(model)
    for name, part in parts.items():
        setattr(raw, name, part)
    raw.train_from_iterator([" ".join(random.Random(0).choices(WORDS, k=1200))], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>")


SPECIAL = dict(special_tokens=["<unk>", "</s>"], show_progress=False)


def sentencepiece() -> PreTrainedTokenizerFast:
    """A vocabulary as Llama 2 has it: spaces are letters, and one stands before every text."""
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    decoder = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    parts = dict(normalizer=normalizers.Sequence(spaces), decoder=decoders.Sequence(decoder))
    return trained(models.BPE(unk_token="<unk>"), trainers.BpeTrainer(vocab_size=300, **SPECIAL), **parts)


def wordpiece() -> PreTrainedTokenizerFast:
    parts = dict(normalizer=normalizers.BertNormalizer(), pre_tokenizer=pre_tokenizers.BertPreTokenizer())
    trainer = trainers.WordPieceTrainer(vocab_size=300, **SPECIAL)
    return trained(models.WordPiece(unk_token="<unk>"), trainer, decoder=decoders.WordPiece(), **parts)
