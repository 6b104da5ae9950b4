"""The options of train.py, beside those of transformers' TrainingArguments."""

from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available


@dataclass
class ModelArguments:
    config: str | None = field(
        default=None,
        metadata={
            "help": "Train from scratch: a JSON file with a model_type, a folder with a config.json, or the name of a "
            "configuration of this package, as in tiny-mag."
        },
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Go on from the weights of a checkpoint: a folder or a name on the Hub."}
    )
    config_overrides: str = field(
        default="",
        metadata={
            "help": "Changes of the configuration, as in hidden_size=64,memory_forget=false,sliding_window=null or "
            "rope_parameters.rope_theta=1e6; values are JSON, else text."
        },
    )
    tokenizer: str | None = field(
        default=None,
        metadata={
            "help": "A folder, a name on the Hub, or the word `bytes` (one token per byte of UTF-8). Default: that of "
            "--model_name_or_path."
        },
    )


@dataclass
class DataArguments:
    train_data: str = field(
        metadata={
            "help": "A file (.txt, .md, .json, .jsonl, .csv, .tsv, .parquet), a folder of such files, or a data set, "
            "saved or on the Hub. A text file is one document."
        }
    )
    eval_data: str | None = field(
        default=None,
        metadata={"help": "Like train_data. Default: its validation split, else its last --eval_fraction of blocks."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a data set on the Hub."})
    text_column: str = field(default="text", metadata={"help": "Column of the data that holds the text."})
    eval_fraction: float = field(default=0.01, metadata={"help": "Share of the blocks held out without eval data."})
    streaming: bool = field(
        default=False,
        metadata={
            "help": "Read the data while training, without a copy on disk; needs --max_steps. --max_eval_blocks (100) "
            "blocks are evaluated on, by default of as many documents at the start of the training data."
        },
    )
    block_length: int = field(default=1024, metadata={"help": "Tokens in a training sequence."})
    packing: bool = field(
        default=True,
        metadata={
            "help": "All documents as one stream, cut into blocks. False: every document is a sequence of its own, of "
            "at most --block_length tokens; with columns prompt and completion only completions are learnt."
        },
    )
    max_eval_blocks: int | None = field(
        default=None, metadata={"help": "Evaluate on this many blocks, evenly spread, instead of all."}
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that tokenize. Default: one per core, one for less than 8 MB."}
    )


@dataclass
class RunArguments:
    tokens_per_step: int = field(
        default=2**19,
        metadata={"help": "Tokens in an optimizer step (paper: 0.5M), unless --gradient_accumulation_steps is given."},
    )
    carry_memory: bool = field(
        default=False,
        metadata={
            "help": "For long documents (Titans only): every row of a batch continues the same row of the batch "
            "before, with its memory; gradients stay within a block. In order, never shuffled."
        },
    )
    max_minutes: float | None = field(
        default=None,
        metadata={"help": "Stop, evaluate and save after this time. The schedule still spans all planned steps."},
    )
    license: str | None = field(
        default=None,
        metadata={"help": "Licence of the weights, for the model card, as the Hub names it (apache-2.0, cc-by-4.0)."},
    )
    push_dry_run: str | None = field(
        default=None, metadata={"help": "A new folder: write there what --push_to_hub would push, instead of pushing."}
    )


@dataclass
class PaperArguments(TrainingArguments):
    output_dir: str = field(metadata={"help": "Folder for the checkpoints, the best model and the results."})
    learning_rate: float = field(default=4e-4, metadata={"help": "Peak learning rate (paper)."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule (paper)."})
    weight_decay: float = field(default=0.1, metadata={"help": "Weight decay (paper), not for norms and biases."})
    warmup_steps: float = field(default=0.02, metadata={"help": "Steps, or below 1 a share of them (our choice)."})
    adam_beta1: float = field(default=0.9, metadata={"help": "First AdamW beta (our choice)."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Second AdamW beta (our choice)."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradient clipping (our choice)."})
    num_train_epochs: float = field(
        default=1.0, metadata={"help": "Passes over the data, unless --max_steps is given."}
    )
    gradient_accumulation_steps: int | None = field(default=None, metadata={"help": "Overrides --tokens_per_step."})
    train_sampling_strategy: str | None = field(
        default=None, metadata={"help": "Default: random, or sequential with --carry_memory."}
    )
    bf16: bool = field(
        default=is_torch_bf16_gpu_available(), metadata={"help": "Mixed precision. Default: where the GPU can."}
    )
    dataloader_pin_memory: bool = field(default=torch.cuda.is_available(), metadata={"help": "Default: with a GPU."})
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Leave a loss of NaN out of the log."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between two lines of the log."})
    eval_strategy: str = field(default="steps", metadata={"help": "When to evaluate: steps, epoch or no."})
    save_strategy: str | None = field(default=None, metadata={"help": "Default: --eval_strategy, or steps for no."})
    eval_steps: float | None = field(
        default=None, metadata={"help": "Steps, or below 1 a share of all steps. Default: --save_steps, or 0.05."}
    )
    save_steps: float | None = field(
        default=None, metadata={"help": "Like --eval_steps, and a multiple of it. Default: --eval_steps."}
    )
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept, the best one included."})
    load_best_model_at_end: bool | None = field(
        default=None, metadata={"help": "Keep the best model, not the last. Default: unless --eval_strategy is no."}
    )
    metric_for_best_model: str | None = field(default="eval_loss", metadata={"help": "What makes a model the best."})

    def __post_init__(self):
        if self.save_strategy is None:
            self.save_strategy = "steps" if self.eval_strategy == "no" else self.eval_strategy
        if self.eval_steps is None:
            self.eval_steps = 0.05 if self.save_steps is None else self.save_steps
        if self.save_steps is None:
            self.save_steps = self.eval_steps
        if self.load_best_model_at_end is None:
            self.load_best_model_at_end = self.eval_strategy != "no"
        super().__post_init__()
