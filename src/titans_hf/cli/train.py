"""Trains or fine-tunes a causal language model: Titans, or any other model type that transformers knows."""

import gc
import math
import os
import sys
import time
from functools import partial

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import reduce
from transformers import (
    AutoModelForCausalLM,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    TrainerCallback,
    set_seed,
)

import titans_hf  # noqa: F401  registers the model type "titans"
from titans_hf.cli.shared import checkpoints
from titans_hf.cli.shared.argument_checks import check_minimums
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.training.checkpoints import RunFacts, find_checkpoint, how_to_go_on
from titans_hf.cli.training.data import Blocks, PackedBlocks, RepeatedPassages, collate, load_blocks
from titans_hf.cli.training.model import freeze_all_but_memory, load_config, refuse_unknown
from titans_hf.cli.training.run_folder import CardTrainer, describe, save_results
from titans_hf.cli.training.tokenizer import load_tokenizer
from titans_hf.cli.training.trainer_arguments import TrainingArguments, make_parser
from titans_hf_console import RunArguments


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


def check_arguments(run: RunArguments, training: TrainingArguments) -> None:
    """Raises ValueError for options that contradict each other; fills in the options that depend on others."""
    minimums = dict(block_length=256 if run.repeat_passages else 2, max_eval_blocks=1, tokens_per_step=1)
    check_minimums(run, **minimums, repeat_passages=0)
    check_minimums(training, per_device_train_batch_size=1, per_device_eval_batch_size=1, gradient_accumulation_steps=1)
    if (run.config is None) == (run.model_name_or_path is None) or (run.config and run.tokenizer is None):
        raise ValueError("give either --config and --tokenizer, to train from scratch, or --model_name_or_path")
    if run.num_parameters is not None and run.config is None:
        raise ValueError("--num_parameters is the size of a new model: give --config in place of --model_name_or_path")
    if training.hub_token:  # Trainer would write the token to training_args.bin, and push it
        os.environ["HF_TOKEN"], training.hub_token = training.hub_token, None
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    if num_processes != training.world_size:  # Trainer would train once in each
        raise ValueError(f"{num_processes} processes were started, but each would train by itself: pass --use_cpu true")
    if training.gradient_accumulation_steps is None:
        device_tokens = training.train_batch_size * training.world_size * run.block_length
        training.gradient_accumulation_steps = max(1, round(run.tokens_per_step / device_tokens))


def make_trainer(
    run: RunArguments,
    training: TrainingArguments,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    blocks: Blocks,
) -> CardTrainer:
    train_data = blocks.train
    if run.repeat_passages:
        if not isinstance(train_data, PackedBlocks):
            raise ValueError(
                f"--repeat_passages must be 0 with --streaming and for rows of input_ids, but is "
                f"{run.repeat_passages}: it makes blocks of texts anew"
            )
        train_data = RepeatedPassages(train_data, run.repeat_passages, training.seed)
    set_seed(training.seed)
    if run.model_name_or_path is None:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        options = dict(config=config, dtype=torch.float32)
        model = checkpoints.load_model(run.model_name_or_path, "--model_name_or_path", **options)
    if run.train_only == "memory":
        freeze_all_but_memory(model)
    return CardTrainer(
        model=model,
        args=training,
        train_dataset=train_data,
        eval_dataset=blocks.evaluation,
        data_collator=collate,
        processing_class=tokenizer,
        compute_metrics=partial(perplexity, tokens_per_byte=blocks.tokens_per_byte),
        callbacks=[TimeLimit(run.max_minutes)] if run.max_minutes else None,
    )


def train(argv: list[str] | None) -> dict[str, float]:
    """Trains and saves the model; returns its metrics."""
    run, training, others = make_parser().parse_args_into_dataclasses(argv, return_remaining_strings=True)
    check_arguments(run, training)
    refuse_unknown(others, run)
    checkpoint = find_checkpoint(training)
    named = "--tokenizer" if run.tokenizer else "--model_name_or_path"
    tokenizer = load_tokenizer(run.tokenizer or run.model_name_or_path, named)
    config = load_config(run, tokenizer)
    with training.main_process_first(desc="preparing the data"):
        blocks = load_blocks(run, tokenizer, training.seed)
    trainer = make_trainer(run, training, config, tokenizer, blocks)
    record = describe(run, training, blocks)
    facts = RunFacts(trainer.model, record)
    trainer.add_callback(facts)
    if checkpoint:
        facts.check(checkpoint)
    if training.push_to_hub and trainer.is_world_process_zero():
        # With the configuration comes the code, which a push during the training needs.
        trainer.model.config.save_pretrained(training.output_dir)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt:
        trainer.accelerator.print(how_to_go_on(trainer.state.global_step, training), file=sys.stderr)
        raise
    metrics = save_results(trainer, record)
    if training.push_to_hub:
        trainer.push_to_hub()
    return metrics


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains and saves the model; returns its metrics."""
    metrics = train(argv)
    # A process that exits while connected may abort. The model's wrapper goes first: if its reference to the group
    # were the last one, the group would hold Python's lock, and wait for ever for a thread of Gloo that wants the lock.
    gc.collect()
    PartialState().destroy_process_group()
    return metrics


if __name__ == "__main__":
    run_command(main)
