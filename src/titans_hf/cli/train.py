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
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.utils import reduce
from transformers import (
    EvalPrediction,
    HfArgumentParser,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import get_reporting_integration_callbacks

import titans_hf  # noqa: F401  registers the model type "titans"
from titans_hf.cli.shared.argument_checks import check_folder, check_minimums
from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.training.arguments import DataArguments, ModelArguments, PaperArguments, RunArguments
from titans_hf.cli.training.carried_memory_trainer import CarriedMemoryTrainer, check_carry_memory
from titans_hf.cli.training.checkpoints import (
    RunFacts,
    check_facts,
    config_facts,
    find_checkpoint,
    read_record,
)
from titans_hf.cli.training.contiguous_batches import ContiguousBatches, collate_contiguous
from titans_hf.cli.training.data import Blocks, collate, describe_source, load_blocks
from titans_hf.cli.training.model import check_model_arguments, load_config, load_model, unused_weights
from titans_hf.cli.training.run_folder import (
    CardTrainer,
    check_push,
    data_facts,
    public_name,
    save_results,
    write_dry_run,
)
from titans_hf.cli.training.tokenizer import load_tokenizer

ARGUMENTS = (ModelArguments, DataArguments, RunArguments, PaperArguments)
FEW_STEPS = 100


class TokenLossTrainer(CardTrainer):
    """Evaluates per token: Trainer's own mean over sequences gives a short last block the weight of a full one."""

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


def perplexity(prediction: EvalPrediction, tokens_per_byte: float) -> dict[str, float]:
    """Computes the metrics from the summed loss and the number of predicted tokens of every block."""
    loss = prediction.predictions.sum(dtype=np.float64) / prediction.label_ids.sum()
    return {"loss": loss, "perplexity": np.exp(loss), "bits_per_byte": loss / math.log(2) * tokens_per_byte}


def accumulation_steps(args: RunArguments, block_length: int, training_args: TrainingArguments) -> int:
    """Returns the gradient accumulation that makes up `tokens_per_step`. Raises ValueError where none does."""
    tokens = training_args.train_batch_size * block_length * training_args.world_size
    steps, rest = divmod(args.tokens_per_step, tokens)
    if rest or not steps:
        raise ValueError(
            f"--tokens_per_step {args.tokens_per_step} is not a multiple of the {tokens} tokens that the devices take "
            f"at once: try --tokens_per_step {max(1, round(args.tokens_per_step / tokens)) * tokens}, another "
            "--per_device_train_batch_size, or --gradient_accumulation_steps"
        )
    return steps


def check_numbers(data: DataArguments, run: RunArguments, training: PaperArguments) -> None:
    """Raises ValueError for numbers that train nothing, or that would be taken for others."""
    check_minimums(data, block_length=2, max_eval_blocks=1, preprocessing_num_workers=1)
    check_minimums(run, tokens_per_step=1, max_minutes=0)
    check_minimums(training, per_device_train_batch_size=1, per_device_eval_batch_size=1)
    check_minimums(training, gradient_accumulation_steps=1, learning_rate=0, weight_decay=0, seed=0)
    if not 0 < data.eval_fraction < 1:
        raise ValueError(f"--eval_fraction must be between 0 and 1, but is {data.eval_fraction}")
    if training.max_steps < 1 and not training.num_train_epochs > 0:
        raise ValueError(f"--num_train_epochs must be above 0, but is {training.num_train_epochs}")


def check_report_to(training: PaperArguments) -> None:
    """Raises ValueError for a --report_to that is unknown or whose package is missing, before the data is prepared."""
    for name in training.report_to:
        try:
            get_reporting_integration_callbacks(name)[0]()
        except (ValueError, RuntimeError, ImportError) as error:
            raise ValueError(f"--report_to {name}: {error}") from error


def check_arguments(model: ModelArguments, data: DataArguments, run: RunArguments, training: PaperArguments) -> None:
    """Raises ValueError for options that contradict each other; fills in those that depend on others."""
    check_numbers(data, run, training)
    check_folder(training.output_dir, "--output_dir")
    if data.streaming and training.max_steps < 1:
        raise ValueError("--streaming needs --max_steps: how long a stream is cannot be known")
    check_model_arguments(model)
    check_push(training, run.push_dry_run)
    check_report_to(training)
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    if num_processes != training.world_size:  # Trainer would go on, as many times
        raise ValueError(f"{num_processes} processes were started, but each would train by itself: pass --use_cpu true")
    if training.gradient_accumulation_steps is None:
        training.gradient_accumulation_steps = accumulation_steps(run, data.block_length, training)
    training.include_num_input_tokens_seen = "all"  # the loss curve is drawn over them
    training.remove_unused_columns = False  # the collators take all columns
    training.train_sampling_strategy = training.train_sampling_strategy or (
        "sequential" if run.carry_memory else "random"
    )


def make_trainer(
    model_args: ModelArguments,
    run_args: RunArguments,
    training_args: TrainingArguments,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    blocks: Blocks,
) -> CardTrainer:
    (train_data, eval_data, tokens_per_byte), trainer_class, collator = blocks, TokenLossTrainer, collate
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


def planned_steps(trainer: Trainer) -> int:
    """Returns the number of optimizer steps of the whole run."""
    args = trainer.args
    if args.max_steps > 0:
        return args.max_steps
    batches = math.ceil(len(trainer.train_dataset) / (args.train_batch_size * args.world_size))
    return math.ceil(args.num_train_epochs * math.ceil(batches / args.gradient_accumulation_steps))


def summary(trainer: Trainer, data: dict[str, Any], block_length: int) -> str:
    """Describes the run; `data` as from `data_facts`."""
    args, steps = trainer.args, planned_steps(trainer)
    step_tokens = tokens_of_step(args, block_length)
    device_tokens = step_tokens // args.gradient_accumulation_steps
    train = "a stream" if data["train_blocks"] is None else f"{data['train_blocks']:,} blocks"
    lines = [
        f"model: {trainer.model.config.model_type}, {trainer.model.num_parameters():,} parameters",
        f"train: {data['train_tokens']:,} tokens in {train}",
        f"eval:  {data['eval_tokens']:,} tokens in {data['eval_blocks']:,} blocks",
        f"steps: {steps:,} of {step_tokens:,} tokens",
    ]
    if args.max_steps < 1 and steps < FEW_STEPS:
        better = max(1, steps * step_tokens // (10 * FEW_STEPS * device_tokens)) * device_tokens
        lines.append(
            f"warning: {steps:,} optimizer steps are too few to learn from. Give a smaller --tokens_per_step, as in "
            f"--tokens_per_step {better}, or more --num_train_epochs"
        )
    return "\n".join(lines)


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
    training_args: TrainingArguments,
) -> dict[str, float]:
    """Trains and saves the model, unless the run is finished already; returns its metrics."""
    check_arguments(model_args, data_args, run_args, training_args)
    record = read_record(training_args.output_dir)
    if record and record["command"] == command and record["steps"] >= record["planned_steps"]:
        return report_finished(training_args.output_dir, record)
    checkpoint = find_checkpoint(training_args)
    named = "--tokenizer" if model_args.tokenizer else "--model_name_or_path"
    tokenizer = load_tokenizer(model_args.tokenizer or model_args.model_name_or_path, named)
    config = load_config(model_args, tokenizer)
    if model_args.config and (message := unused_weights(model_args.config)):
        warnings.warn(message, stacklevel=1)
    if run_args.carry_memory:
        check_carry_memory(config, training_args, data_args)
    with training_args.main_process_first(desc="preparing the data"):
        blocks = load_blocks(data_args, tokenizer, training_args.seed)
    trainer = make_trainer(model_args, run_args, training_args, config, tokenizer, blocks)
    options = dict(block_length=data_args.block_length, packing=data_args.packing, carry_memory=run_args.carry_memory)
    steps = planned_steps(trainer)
    data = data_facts(data_args, blocks, streamed_tokens=steps * tokens_of_step(training_args, data_args.block_length))
    keep_facts(trainer, checkpoint, options, data)
    if checkpoint and record and record["steps"] >= steps:
        return report_finished(training_args.output_dir, record)
    sources = [describe_source(data_args.train_data, "--train_data")]
    if data_args.eval_data:
        sources.append(describe_source(data_args.eval_data, "--eval_data"))
    trainer.accelerator.print(*filter(None, sources), summary(trainer, data, data_args.block_length), sep="\n")
    if training_args.push_to_hub and trainer.is_world_process_zero():
        trainer.save_config()  # pushes before the end need the code
    trainer.train(resume_from_checkpoint=checkpoint)
    facts = {
        "command": command,
        "license": run_args.license,
        "base_model": public_name(model_args.model_name_or_path),
        "planned_steps": steps,
        "data": data,
        "arguments": options,
    }
    metrics = save_results(trainer, facts)
    publish(trainer, run_args.push_dry_run)
    return metrics


def keep_facts(trainer: Trainer, checkpoint: str | None, options: dict[str, Any], data: dict[str, Any]) -> None:
    """Keeps in every checkpoint what a run that goes on from it must share: options, seed, numbers of tokens, model.
    `data` is as from `data_facts`.

    Raises ValueError if `checkpoint`, which this run goes on from, has others.
    """
    facts = options | {"seed": trainer.args.seed, "eval_tokens": data["eval_tokens"]}
    if data["train_blocks"] is not None:  # the tokens of a stream are unknown
        facts |= {"train_tokens": data["train_tokens"]}
    facts |= config_facts(trainer.model.config)
    if checkpoint:
        check_facts(checkpoint, facts)
    trainer.add_callback(RunFacts(facts))


def publish(trainer: CardTrainer, dry_run: str | None) -> None:
    """Pushes the run's folder with --push_to_hub; otherwise copies what a push would upload to `dry_run`, if given."""
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    elif dry_run and trainer.is_world_process_zero():
        write_dry_run(trainer.args.output_dir, dry_run)


def tokens_of_step(args: TrainingArguments, block_length: int) -> int:
    return args.train_batch_size * args.world_size * args.gradient_accumulation_steps * block_length


def report_finished(folder: str, record: dict[str, Any]) -> dict[str, float]:
    """Prints that the run in `folder` is finished, and returns its metrics."""
    loss = record["metrics"]["eval_loss"]
    print(
        f"{folder} is finished: {record['steps']:,} of {record['planned_steps']:,} steps, evaluation loss {loss:.4f}. "
        "Give another --output_dir, or more steps with --resume_from_checkpoint true"
    )
    return record["metrics"]


if __name__ == "__main__":
    run_command(main)
