"""The parser of titans-hf train: its own options, and transformers' TrainingArguments with other defaults."""

import sys
from dataclasses import dataclass

import torch
import transformers
from transformers import HfArgumentParser
from transformers.utils import is_torch_bf16_gpu_available

from titans_hf_console import OURS, PAPER, TRAIN_USAGE, RunArguments


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """Missing options of saving and evaluation follow the given ones."""

    def __post_init__(self):
        self.save_strategy: str = self.save_strategy or ("steps" if self.eval_strategy == "no" else self.eval_strategy)
        self.eval_steps: float = self.eval_steps or self.save_steps or 0.05
        self.save_steps: float = self.save_steps or self.eval_steps
        if self.load_best_model_at_end is None:
            self.load_best_model_at_end: bool = self.eval_strategy != "no"
        super().__post_init__()


def make_parser() -> HfArgumentParser:
    parser = HfArgumentParser((RunArguments, TrainingArguments), usage=TRAIN_USAGE)
    parser.set_defaults(**PAPER, **OURS)
    parser.set_defaults(disable_tqdm=not sys.stderr.isatty())  # else a log file gets the bar with each line of losses
    parser.set_defaults(bf16=is_torch_bf16_gpu_available(), dataloader_pin_memory=torch.cuda.is_available())
    return parser
