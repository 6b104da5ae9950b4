"""Trains or fine-tunes a causal language model: Titans, or any other model type that transformers knows.

    titans-hf train --config tiny-mag --tokenizer bytes --train_data FOLDER --output_dir runs/tiny
    titans-hf train --model_name_or_path runs/tiny --train_data FILE.jsonl --output_dir runs/tuned

Every option of transformers' TrainingArguments can be given too. The defaults are those of the Titans paper
(arXiv 2501.00663, section 5.1) where it states them.
"""

import math
import os
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import reduce
from transformers import (
    EvalPrediction,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    TrainerCallback,
    set_seed,
)

import titans_hf  # noqa: F401  registers the model type "titans"
from titans_hf.cli.shared.argument_checks import check_minimums
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.training.arguments import DataArguments, ModelArguments, PaperArguments, RunArguments
from titans_hf.cli.training.carried_memory_trainer import CarriedMemoryTrainer, check_carry_memory
from titans_hf.cli.training.checkpoints import RunFacts, find_checkpoint
from titans_hf.cli.training.contiguous_batches import ContiguousBatches, collate_contiguous
from titans_hf.cli.training.data import Blocks, collate, load_blocks
from titans_hf.cli.training.model import check_model_arguments, load_config, load_model
from titans_hf.cli.training.run_folder import CardTrainer, data_facts, public_name, save_results
from titans_hf.cli.training.tokenizer import load_tokenizer

ARGUMENTS = (ModelArguments, DataArguments, RunArguments, PaperArguments)
FEW_STEPS = 100


class TimeLimit(TrainerCallback):
    """Stops the training after some minutes, with a log line, an evaluation and a checkpoint."""

    def __init__(self, minutes: float):
        self.seconds = 60 * minutes

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        # Averaged, because all processes have to stop at the same step.
        elapsed = reduce(torch.tensor(time.monotonic() - self.start, device=args.device), "mean")
        if elapsed > self.seconds:
            control.should_log = control.should_evaluate = control.should_save = control.should_training_stop = True


def perplexity(prediction: EvalPrediction, tokens_per_byte: float | None) -> dict[str, float]:
    """Computes the metrics from the summed loss and the number of predicted tokens of every block."""
    loss = prediction.predictions.sum(dtype=np.float64) / prediction.label_ids.sum()
    metrics = {"loss": loss, "perplexity": np.exp(loss)}
    if tokens_per_byte is not None:
        metrics["bits_per_byte"] = loss / math.log(2) * tokens_per_byte
    return metrics


def accumulation_steps(tokens_per_step: int, device_tokens: int) -> int:
    """Returns the gradient accumulation that makes up `tokens_per_step`. Raises ValueError where none does."""
    steps, rest = divmod(tokens_per_step, device_tokens)
    if rest or steps < 1:
        nearest = max(1, round(tokens_per_step / device_tokens)) * device_tokens
        raise ValueError(
            f"--tokens_per_step {tokens_per_step} is not a multiple of the {device_tokens} tokens that the devices "
            f"take at once: try --tokens_per_step {nearest}, another --per_device_train_batch_size, or "
            "--gradient_accumulation_steps"
        )
    return steps


def check_arguments(model: ModelArguments, data: DataArguments, run: RunArguments, training: PaperArguments) -> None:
    """Raises ValueError for options that contradict each other; fills in those that depend on others."""
    check_minimums(data, block_length=2, max_eval_blocks=1)
    check_minimums(training, per_device_train_batch_size=1, per_device_eval_batch_size=1, gradient_accumulation_steps=1)
    check_model_arguments(model)
    if data.streaming and training.max_steps < 1:
        raise ValueError("--streaming needs --max_steps: how long a stream is cannot be known")
    if training.hub_token:
        raise ValueError(
            "--hub_token: what is given here is written to run.json and training_args.bin, and pushed: set the "
            "environment variable HF_TOKEN or run `hf auth login`"
        )
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    if num_processes != training.world_size:  # Trainer would go on, as many times
        raise ValueError(f"{num_processes} processes were started, but each would train by itself: pass --use_cpu true")
    if training.gradient_accumulation_steps is None:
        device_tokens = training.train_batch_size * training.world_size * data.block_length
        training.gradient_accumulation_steps = accumulation_steps(run.tokens_per_step, device_tokens)
    training.include_num_input_tokens_seen = "all"  # the loss curve is drawn over them
    training.remove_unused_columns = False  # the collators take all columns
    training.train_sampling_strategy = training.train_sampling_strategy or (
        "sequential" if run.carry_memory else "random"
    )


def make_trainer(
    model_args: ModelArguments,
    run_args: RunArguments,
    training_args: PaperArguments,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    blocks: Blocks,
) -> CardTrainer:
    (train_data, eval_data, tokens_per_byte), trainer_class, collator = blocks, CardTrainer, collate
    if run_args.carry_memory:
        trainer_class, collator = CarriedMemoryTrainer, collate_contiguous
        train_rows, eval_rows = training_args.train_batch_size, training_args.eval_batch_size
        train_data = ContiguousBatches(train_data, train_rows * training_args.world_size, tokenizer.eos_token_id)
        eval_data = ContiguousBatches(eval_data, eval_rows * training_args.world_size, tokenizer.eos_token_id)
    set_seed(training_args.seed)
    return trainer_class(
        model=load_model(model_args, config),
        args=training_args,
        train_dataset=train_data,
        eval_dataset=eval_data,
        data_collator=collator,
        processing_class=tokenizer,
        compute_metrics=partial(perplexity, tokens_per_byte=tokens_per_byte),
        callbacks=[TimeLimit(run_args.max_minutes)] if run_args.max_minutes else None,
    )


def planned_steps(trainer: CardTrainer) -> int:
    """Returns the number of optimizer steps of the whole run."""
    args = trainer.args
    if args.max_steps > 0:
        return args.max_steps
    batches = math.ceil(len(trainer.train_dataset) / (args.train_batch_size * args.world_size))
    return math.ceil(args.num_train_epochs * math.ceil(batches / args.gradient_accumulation_steps))


def summary(trainer: CardTrainer, data: dict[str, Any], steps: int, step_tokens: int) -> str:
    """Describes the run; `data` as from `data_facts`."""
    train = "a stream" if data["train_blocks"] is None else f"{data['train_blocks']:,} blocks"
    few = trainer.args.max_steps < 1 and steps < FEW_STEPS
    return (
        f"model: {trainer.model.config.model_type}, {trainer.model.num_parameters():,} parameters\n"
        f"train: {data['train_tokens']:,} tokens in {train}\n"
        f"eval:  {data['eval_tokens']:,} tokens in {data['eval_blocks']:,} blocks\n"
        f"steps: {steps:,} of {step_tokens:,} tokens"
        + few
        * ", too few to learn from: give a smaller --tokens_per_step, or more --num_train_epochs"
    )


def main(argv: list[str] | None = None) -> dict[str, float]:
    arguments = HfArgumentParser(ARGUMENTS).parse_args_into_dataclasses(argv)
    metrics = run_training(sys.argv if argv is None else argv, *arguments)
    PartialState().destroy_process_group()  # a process that exits while it is connected to the others may abort
    return metrics


def run_training(
    command: list[str],
    model_args: ModelArguments,
    data_args: DataArguments,
    run_args: RunArguments,
    training_args: PaperArguments,
) -> dict[str, float]:
    """Trains and saves the model; returns its metrics."""
    check_arguments(model_args, data_args, run_args, training_args)
    checkpoint = find_checkpoint(training_args)
    named = "--tokenizer" if model_args.tokenizer else "--model_name_or_path"
    tokenizer = load_tokenizer(model_args.tokenizer or model_args.model_name_or_path, named)
    config = load_config(model_args, tokenizer)
    if run_args.carry_memory:
        check_carry_memory(config, training_args, data_args)
    with training_args.main_process_first(desc="preparing the data"):
        blocks = load_blocks(data_args, tokenizer, training_args.seed)
    trainer = make_trainer(model_args, run_args, training_args, config, tokenizer, blocks)
    steps, rows = planned_steps(trainer), training_args.train_batch_size * training_args.world_size
    step_tokens = rows * training_args.gradient_accumulation_steps * data_args.block_length
    data = data_facts(data_args, blocks, streamed_tokens=steps * step_tokens)
    options = {"block_length": data_args.block_length, "carry_memory": run_args.carry_memory}
    facts = options | {"seed": training_args.seed, "eval_tokens": data["eval_tokens"]}
    if not data_args.streaming:  # the tokens of a stream are unknown
        facts["train_tokens"] = data["train_tokens"]
    if run_args.carry_memory:
        facts["rows"] = rows
    trainer.add_callback(run_facts := RunFacts(trainer.model.config, **facts))
    if checkpoint:
        run_facts.check(checkpoint, steps)
    trainer.accelerator.print(summary(trainer, data, steps, step_tokens))
    if training_args.push_to_hub and trainer.is_world_process_zero():
        trainer.model.config.save_pretrained(training_args.output_dir)  # pushes before the end need the code
    trainer.train(resume_from_checkpoint=checkpoint)
    record = {
        "command": command,
        "license": run_args.license,
        "base_model": public_name(model_args.model_name_or_path),
        "planned_steps": steps,
        "data": data,
        "arguments": options,
    }
    metrics = save_results(trainer, record)
    if training_args.push_to_hub:
        trainer.push_to_hub()
    return metrics


if __name__ == "__main__":
    run_command(main)
