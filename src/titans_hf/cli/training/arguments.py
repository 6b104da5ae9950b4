"""The options of train.py, beside those of transformers' TrainingArguments."""

from dataclasses import MISSING, dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils import is_torch_bf16_gpu_available


def option(help: str, default: Any = MISSING) -> Any:
    """Makes a field that HfArgumentParser shows with its help; without a default it must be given."""
    return field(default=default, metadata={"help": help})


@dataclass
class ModelArguments:
    config: str | None = option(
        "Train from scratch: a JSON file with a model_type, a folder with a config.json, or the name of a "
        "configuration of this package, as in tiny-mag.",
        None,
    )
    model_name_or_path: str | None = option(
        "Go on from the weights of a checkpoint: a folder or a name on the Hub.", None
    )
    config_overrides: str = option(
        "Changes of the configuration, as in hidden_size=64,memory_forget=false,sliding_window=null; values are JSON, "
        "else text.",
        "",
    )
    tokenizer: str | None = option(
        "A folder, a name on the Hub, or the word `bytes` (one token per byte of UTF-8). Default: that of "
        "--model_name_or_path.",
        None,
    )


@dataclass
class DataArguments:
    train_data: str = option(
        "A file (.txt, .md, .json, .jsonl, .csv, .tsv, .parquet), a folder of such files, or a data set, saved or on "
        "the Hub. A text file is one document. All documents are one stream, cut into blocks. Rows with the columns "
        "input_ids and labels are blocks as they are."
    )
    eval_data: str | None = option(
        "Like train_data. Default: its validation split, else its last --eval_fraction of blocks.", None
    )
    dataset_config: str | None = option("Configuration of a data set on the Hub.", None)
    text_column: str = option("Column of the data that holds the text.", "text")
    eval_fraction: float = option("Share of the blocks held out without eval data.", 0.01)
    streaming: bool = option(
        "Read the data while training, without a copy on disk; needs --max_steps. --max_eval_blocks (100) blocks are "
        "evaluated on, by default of as many documents at the start of the training data.",
        False,
    )
    block_length: int = option("Tokens in a training sequence.", 1024)
    max_eval_blocks: int | None = option("Evaluate on this many blocks, evenly spread, instead of all.", None)
    preprocessing_num_workers: int | None = option(
        "Processes that tokenize. Default: one per core, one for less than 8 MB.", None
    )


@dataclass
class RunArguments:
    tokens_per_step: int = option(
        "Tokens in an optimizer step (paper: 0.5M), unless --gradient_accumulation_steps is given.", 2**19
    )
    carry_memory: bool = option(
        "For long documents (Titans only): every row of a batch continues the same row of the batch before, with its "
        "memory; gradients stay within a block. In order, never shuffled.",
        False,
    )
    max_minutes: float | None = option(
        "Stop, evaluate and save after this time. The schedule still spans all planned steps.", None
    )
    license: str | None = option(
        "Licence of the weights, for the model card, as the Hub names it (apache-2.0, cc-by-4.0).", None
    )


@dataclass
class PaperArguments(TrainingArguments):
    output_dir: str = option("Folder for the checkpoints, the best model and the results.")
    learning_rate: float = option("Peak learning rate (paper).", 4e-4)
    lr_scheduler_type: str = option("Learning rate schedule (paper).", "cosine")
    weight_decay: float = option("Weight decay (paper), not for norms and biases.", 0.1)
    warmup_steps: float = option("Steps, or below 1 a share of them (our choice).", 0.02)
    adam_beta1: float = option("First AdamW beta (our choice).", 0.9)
    adam_beta2: float = option("Second AdamW beta (our choice).", 0.95)
    max_grad_norm: float = option("Gradient clipping (our choice).", 1.0)
    num_train_epochs: float = option("Passes over the data, unless --max_steps is given.", 1.0)
    gradient_accumulation_steps: int | None = option("Overrides --tokens_per_step.", None)
    train_sampling_strategy: str | None = option("Default: random, or sequential with --carry_memory.", None)
    bf16: bool = option("Mixed precision. Default: where the GPU can.", is_torch_bf16_gpu_available())
    use_cache: bool = option("What the saved configurations say: whether a plain call returns the memory.", True)
    dataloader_pin_memory: bool = option("Default: with a GPU.", torch.cuda.is_available())
    logging_nan_inf_filter: bool = option("Leave a loss of NaN out of the log.", False)
    logging_steps: float = option("Steps between two lines of the log.", 10)
    eval_strategy: str = option("When to evaluate: steps, epoch or no.", "steps")
    save_strategy: str | None = option("Default: --eval_strategy, or steps for no.", None)
    eval_steps: float | None = option("Steps, or below 1 a share of all steps. Default: --save_steps, or 0.05.", None)
    save_steps: float | None = option("Like --eval_steps, and a multiple of it. Default: --eval_steps.", None)
    save_total_limit: int | None = option("Checkpoints kept, the best one included.", 2)
    load_best_model_at_end: bool | None = option(
        "Keep the best model, not the last. Default: unless --eval_strategy is no.", None
    )
    metric_for_best_model: str | None = option("What makes a model the best.", "eval_loss")

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
