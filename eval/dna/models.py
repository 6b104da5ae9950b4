"""Models that classify DNA: Titans, Llama and Mamba2 of one size, and the convolutions of GenomicBenchmarks."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, Mamba2Model, Mamba2PreTrainedModel, PreTrainedConfig
from transformers.modeling_outputs import SequenceClassifierOutput

from eval.common.compared_models import VARIANTS, fit_config
from eval.dna.sequences import END, PAD, VOCAB_SIZE

OFF = "-off"  # after the name of a Titans: with its memory off
NAMES = ("lmm", "lmm-off", "mag", "mag-off", "llama", "mamba2", "cnn")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
MEMORY = {"memory_form": "delta", "memory_num_heads": 1, "memory_chunk_size": 32}


class ConvolutionalClassifier(nn.Module):
    """The CNN of GenomicBenchmarks: three convolutions of 8 bases, each with batch norm, ReLU and max-pool, and two
    linear layers. Sequences are padded or cut to `length` tokens.
    """

    CHANNELS, KERNEL, EMBEDDING, HIDDEN = (16, 8, 4), 8, 100, 512

    def __init__(self, length: int, num_labels: int):
        super().__init__()
        self.length = length
        self.embed = nn.Embedding(VOCAB_SIZE, self.EMBEDDING)
        layers: list[nn.Module] = []
        for before, after in zip((self.EMBEDDING, *self.CHANNELS), self.CHANNELS, strict=False):
            layers += [nn.Conv1d(before, after, self.KERNEL), nn.BatchNorm1d(after), nn.ReLU(), nn.MaxPool1d(2)]
            length = (length - self.KERNEL + 1) // 2
        hidden = nn.Linear(length * self.CHANNELS[-1], self.HIDDEN)
        self.layers = nn.Sequential(*layers, nn.Flatten(), hidden, nn.ReLU(), nn.Linear(self.HIDDEN, num_labels))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Classifies input_ids (B, T): logits (B, classes), and the loss with labels (B,)."""
        missing = self.length - input_ids.shape[1]  # negative where the sequences are too long
        x = self.embed(nn.functional.pad(input_ids, (0, missing), value=PAD))
        return _output(self.layers(x.mT), labels)


class Mamba2ForSequenceClassification(Mamba2PreTrainedModel):
    """Classifies a sequence by its last token, as transformers' generic classes do, which do not fit Mamba2."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.backbone = Mamba2Model(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SequenceClassifierOutput:
        """Classifies input_ids (B, T), padded at the end: logits (B, classes), and the loss with labels (B,)."""
        hidden_states = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        last = (input_ids != self.config.pad_token_id).sum(1) - 1
        return _output(self.score(hidden_states[torch.arange(len(last)), last]), labels)


def _output(logits: Tensor, labels: Tensor | None) -> SequenceClassifierOutput:
    loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
    return SequenceClassifierOutput(loss=loss, logits=logits)


def build_model(name: str, num_labels: int, longest: int, shape: dict[str, Any], settings: dict[str, Any]) -> nn.Module:
    """Builds a model of about shape["parameters"] parameters with random weights; `settings` replace fields of Titans.
    The CNN has a fixed size, for sequences of at most `longest` tokens.
    """
    if name == "cnn":
        return ConvolutionalClassifier(longest, num_labels)
    width, variant = shape["hidden_size"], name.removesuffix(OFF)
    fields = dict(vocab_size=VOCAB_SIZE, pad_token_id=PAD, eos_token_id=END, num_labels=num_labels)
    fields |= dict(hidden_size=width, use_cache=False, initializer_range=0.05)
    if name == "mamba2":
        fields |= {"num_heads": 4, "head_dim": width // 2, "state_size": 16, "chunk_size": 16}
    else:
        fields |= HEADS | {"num_hidden_layers": shape["num_hidden_layers"]}
    if variant in VARIANTS:
        fields |= MEMORY | settings | ({"memory_max_lr": 0} if name.endswith(OFF) else {})
    config = fit_config(variant, shape["parameters"], fields)
    if name == "mamba2":
        return Mamba2ForSequenceClassification(config)
    return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
