"""Trains a causal language model from scratch: Titans, or any other model type that transformers knows.

    python scripts/train.py --config scripts/configs/tiny-mag.json --tokenizer bytes \
        --train_data FOLDER --eval_data FOLDER --output_dir runs/tiny

Every option of transformers' TrainingArguments can be given too. The defaults are those of the Titans paper
(arXiv 2501.00663, section 5.1) where it states them.
"""

import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import reduce
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import is_torch_bf16_gpu_available

import titans_hf  # noqa: F401  registers the model type "titans"
from titans_hf_scripts.shared.command_line import run_command
from titans_hf_scripts.training.carried_memory_trainer import CarriedMemoryTrainer, check_carry_memory
from titans_hf_scripts.training.contiguous_batches import ContiguousBatches, collate_contiguous
from titans_hf_scripts.training.data import collate, load_blocks, load_tokenizer
from titans_hf_scripts.training.run_folder import CardTrainer, check_push, data_facts, save_results, write_dry_run


@dataclass
class ScriptArguments:
    config: str = field(metadata={"help": "Model configuration: a JSON file with a model_type, or a folder with one."})
    tokenizer: str = field(metadata={"help": "Tokenizer folder, or the word `bytes`: one token per byte of UTF-8."})
    train_data: str = field(
        metadata={
            "help": "A text file, a folder of .txt files (one document each), or a data set, saved or on the hub."
        }
    )
    eval_data: str | None = field(
        default=None,
        metadata={"help": "Like train_data. Default: its validation split, else its last --eval_fraction of blocks."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a data set on the hub."})
    text_column: str = field(default="text", metadata={"help": "Column of the data set that holds the text."})
    eval_fraction: float = field(default=0.01, metadata={"help": "Share of the blocks held out without eval data."})
    config_overrides: str = field(default="", metadata={"help": "As in hidden_size=64,num_hidden_layers=2"})
    block_length: int = field(default=1024, metadata={"help": "Tokens in a training sequence."})
    packing: bool = field(
        default=True,
        metadata={
            "help": "All documents as one stream, cut into blocks. False: every document is a sequence of its own, of "
            "at most --block_length tokens; with columns prompt and completion only completions are learnt."
        },
    )
    tokens_per_step: int = field(
        default=2**19,
        metadata={"help": "Tokens in an optimizer step (paper: 0.5M), unless --gradient_accumulation_steps is given."},
    )
    max_eval_blocks: int | None = field(
        default=None, metadata={"help": "Evaluate on this many blocks, evenly spread, instead of all."}
    )
    carry_memory: bool = field(
        default=False,
        metadata={
            "help": "For long documents (Titans only): every row of a batch goes on where the same row of the batch "
            "before ended, with what its memory holds; gradients stay within a block. In order, never shuffled."
        },
    )
    max_minutes: float | None = field(
        default=None,
        metadata={"help": "Stop, evaluate and save after this time. The schedule still spans all planned steps."},
    )
    license: str | None = field(
        default=None,
        metadata={"help": "Licence of the weights, for the model card, as the hub names it (apache-2.0, cc-by-4.0)."},
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
    eval_steps: float | None = field(default=0.05, metadata={"help": "Steps, or below 1 a share of all steps."})
    save_steps: float = field(default=0.05, metadata={"help": "Like --eval_steps, and a multiple of it."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints kept, the best one included."})
    load_best_model_at_end: bool = field(default=True, metadata={"help": "Keep the best model, not the last."})
    metric_for_best_model: str | None = field(default="eval_loss", metadata={"help": "What makes a model the best."})


class TokenLossTrainer(CardTrainer):
    """Evaluates per token: Trainer averages over sequences, where a short last block weighs as much as a full one."""

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        inputs = self._prepare_inputs(inputs)
        targets = inputs.pop("labels")[:, 1:]
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**inputs, use_cache=False).logits[:, :-1]
        losses = F.cross_entropy(logits.transpose(1, 2).float(), targets, reduction="none")
        return None, losses.sum(1), (targets != -100).sum(1)


class TimeLimit(TrainerCallback):
    def __init__(self, minutes: float):
        self.seconds = 60 * minutes

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        # Averaged, because all processes have to stop at the same step.
        elapsed = reduce(torch.tensor(time.monotonic() - self.start, device=args.device), "mean")
        if elapsed > self.seconds:
            control.should_log = control.should_evaluate = control.should_save = control.should_training_stop = True


def perplexity(prediction: EvalPrediction, tokens_per_byte: float) -> dict[str, float]:
    """Metrics from the summed loss and the number of predicted tokens of every block."""
    loss = prediction.predictions.sum(dtype=np.float64) / prediction.label_ids.sum()
    return {"loss": loss, "perplexity": np.exp(loss), "bits_per_byte": loss / math.log(2) * tokens_per_byte}


def load_config(path: str, overrides: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    if not Path(path).exists():
        raise FileNotFoundError(f"--config {path}: no such file or folder")
    config = AutoConfig.from_pretrained(path)
    if overrides:
        changes = dict(item.split("=") for item in overrides.split(","))
        if unknown := changes.keys() - config.to_dict().keys():
            raise ValueError(f"--config_overrides: {config.model_type} has no {', '.join(sorted(unknown))}")
        # Built anew, so that values derived from an overridden one follow it.
        settings, _ = PreTrainedConfig.get_config_dict(path)
        config = type(config)(**settings | {name: parse_value(value) for name, value in changes.items()})
    if config.vocab_size < len(tokenizer):
        raise ValueError(
            f"the config's vocab_size {config.vocab_size} is smaller than the tokenizer's vocabulary {len(tokenizer)}"
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    return config


def parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def accumulation_steps(args: ScriptArguments, training_args: TrainingArguments) -> int:
    tokens = training_args.train_batch_size * args.block_length * training_args.world_size
    steps, rest = divmod(args.tokens_per_step, tokens)
    if rest or not steps:
        raise ValueError(
            f"--tokens_per_step {args.tokens_per_step} is not a multiple of the {tokens} tokens that the devices take "
            f"at once: try --tokens_per_step {max(1, round(args.tokens_per_step / tokens)) * tokens}, another "
            "--per_device_train_batch_size, or --gradient_accumulation_steps"
        )
    return steps


def find_checkpoint(training_args: TrainingArguments) -> str | None:
    """The checkpoint to go on from; a folder with checkpoints is never trained into by accident."""
    folder, wanted = training_args.output_dir, training_args.resume_from_checkpoint or "false"
    last = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    if wanted.lower() == "false":
        if last:
            raise ValueError(f"{folder} holds checkpoints: pass --resume_from_checkpoint true or another --output_dir")
        return None
    checkpoint = last if wanted.lower() == "true" else wanted
    if checkpoint is None or not Path(checkpoint).is_dir():
        raise FileNotFoundError(f"--resume_from_checkpoint {wanted}: no checkpoint in {checkpoint or folder}")
    return checkpoint


def prepare_blocks(args: ScriptArguments, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset, float]:
    """Blocks to train on, blocks to evaluate on, and the latter's tokens per byte."""
    train_blocks, eval_blocks, tokens_per_byte = load_blocks(
        tokenizer,
        args.block_length,
        args.train_data,
        args.eval_data,
        args.eval_fraction,
        args.dataset_config,
        args.text_column,
        args.packing,
    )
    if args.max_eval_blocks and args.max_eval_blocks < len(eval_blocks):
        eval_blocks = eval_blocks.select(np.linspace(0, len(eval_blocks) - 1, args.max_eval_blocks, dtype=int))
    return train_blocks, eval_blocks, tokens_per_byte


def make_trainer(
    args: ScriptArguments,
    training_args: TrainingArguments,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    blocks: tuple[Dataset, Dataset],
    tokens_per_byte: float,
) -> CardTrainer:
    """`blocks`: those to train on, those to evaluate on."""
    (train_data, eval_data), trainer_class, collator = blocks, TokenLossTrainer, collate
    if args.carry_memory:
        trainer_class, collator = CarriedMemoryTrainer, collate_contiguous
        train_rows, eval_rows = training_args.train_batch_size, training_args.eval_batch_size
        train_data = ContiguousBatches(train_data, train_rows * training_args.world_size, tokenizer.eos_token_id)
        eval_data = ContiguousBatches(eval_data, eval_rows * training_args.world_size, tokenizer.eos_token_id)
    set_seed(training_args.seed)
    return trainer_class(
        # Whatever dtype the config names: mixed precision is a training option, and its weights are float32.
        model=AutoModelForCausalLM.from_config(config, dtype=torch.float32),
        args=training_args,
        train_dataset=train_data,
        eval_dataset=eval_data,
        data_collator=collator,
        processing_class=tokenizer,
        compute_metrics=partial(perplexity, tokens_per_byte=tokens_per_byte),
        callbacks=[TimeLimit(args.max_minutes)] if args.max_minutes else None,
    )


def summary(trainer: Trainer, data: dict[str, Any], block_length: int) -> str:
    """What is going to be trained on what; `data` as from `data_facts`."""
    args = trainer.args
    blocks_per_pass = args.train_batch_size * args.world_size
    passes = math.ceil(len(trainer.train_dataset) / blocks_per_pass)
    steps_per_epoch = math.ceil(passes / args.gradient_accumulation_steps)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch)
    step_tokens = blocks_per_pass * args.gradient_accumulation_steps * block_length
    return (
        f"model: {trainer.model.config.model_type}, {trainer.model.num_parameters():,} parameters\n"
        f"train: {data['train_tokens']:,} tokens in {data['train_blocks']:,} blocks\n"
        f"eval:  {data['eval_tokens']:,} tokens in {data['eval_blocks']:,} blocks\n"
        f"steps: {steps:,} of {step_tokens:,} tokens"
    )


def main(argv: list[str] | None = None) -> dict[str, float]:
    args, training_args = HfArgumentParser((ScriptArguments, PaperArguments)).parse_args_into_dataclasses(argv)
    if args.block_length < 2:
        raise ValueError(f"--block_length {args.block_length}: a block needs at least 2 tokens")
    check_push(training_args, args.push_dry_run)
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    if num_processes != training_args.world_size:  # Trainer goes on, as many times
        raise ValueError(f"{num_processes} processes were started, but each would train by itself: pass --use_cpu true")
    if training_args.gradient_accumulation_steps is None:
        training_args.gradient_accumulation_steps = accumulation_steps(args, training_args)
    # The loss curve is drawn against it.
    training_args.include_num_input_tokens_seen = "all"
    checkpoint = find_checkpoint(training_args)
    tokenizer = load_tokenizer(args.tokenizer)
    config = load_config(args.config, args.config_overrides, tokenizer)
    if args.carry_memory:
        check_carry_memory(config, training_args, args.max_eval_blocks, args.packing)
    training_args.remove_unused_columns = False  # the collators take all there are
    training_args.train_sampling_strategy = training_args.train_sampling_strategy or (
        "sequential" if args.carry_memory else "random"
    )
    with training_args.main_process_first(desc="preparing the data"):
        train_blocks, eval_blocks, tokens_per_byte = prepare_blocks(args, tokenizer)
    data = data_facts(args.train_data, args.eval_data, train_blocks, eval_blocks)
    trainer = make_trainer(args, training_args, config, tokenizer, (train_blocks, eval_blocks), tokens_per_byte)
    trainer.accelerator.print(summary(trainer, data, args.block_length))
    if training_args.push_to_hub and trainer.is_world_process_zero():
        trainer.model.config.save_pretrained(training_args.output_dir)  # what is pushed before the end needs the code
    trainer.train(resume_from_checkpoint=checkpoint)
    facts = {
        "command": sys.argv if argv is None else argv,
        "license": args.license,
        "data": data,
        "arguments": {name: getattr(args, name) for name in ("block_length", "packing", "carry_memory")},
    }
    metrics = save_results(trainer, facts)
    if training_args.push_to_hub:
        trainer.push_to_hub()
    elif args.push_dry_run and trainer.is_world_process_zero():
        write_dry_run(training_args.output_dir, args.push_dry_run)
    return metrics


if __name__ == "__main__":
    run_command(main)
