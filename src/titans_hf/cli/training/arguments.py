"""The options of titans-hf train itself, and its help, which needs only the standard library."""

import sys
import textwrap
from argparse import ArgumentParser
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from titans_hf.cli.shared.command_line import HelpFormatter

HELP_ALL = "--help_all"
USAGE = "titans-hf train --train_data DATA --output_dir FOLDER [options]"


def option(help: str, default: Any = MISSING) -> Any:
    """Makes a field that HfArgumentParser shows with its help; without a default it must be given."""
    return field(default=default, metadata={"help": help})


@dataclass
class RunArguments:
    train_data: str = option(
        "A file (.txt, .md, .json, .jsonl, .csv, .tsv, .parquet), a folder of such files, or a data set, saved or on "
        "the Hub. A text file is one document. All documents are one stream, cut into blocks. Rows with the columns "
        "input_ids and labels are used as blocks."
    )
    config: str | None = option(
        "Train from scratch: a JSON file with a model_type, a folder with a config.json, or a name such as tiny-mag.",
        None,
    )
    model_name_or_path: str | None = option("Start from the weights of a checkpoint: a folder or a Hub name.", None)
    config_overrides: str = option(
        "Such as hidden_size=64,memory_forget=false,sliding_window=null; values in JSON, else text.", ""
    )
    tokenizer: str | None = option(
        "A folder, a Hub name, or `bytes`: one token per byte of UTF-8. Default: the checkpoint's.", None
    )
    eval_data: str | None = option(
        "Like train_data. Default: train_data's validation split, else its last --eval_fraction of blocks.", None
    )
    dataset_config: str | None = option("Configuration of a data set on the Hub.", None)
    text_column: str = option("Column of the data that holds the text.", "text")
    eval_fraction: float = option("Share of the blocks held out without eval data.", 0.01)
    streaming: bool = option(
        "Read the data while training, without a copy on disk; needs --max_steps. Evaluation takes --max_eval_blocks "
        "(default 100) blocks; without --eval_data, from as many documents at the start of the training data.",
        False,
    )
    block_length: int = option("Tokens in a training sequence.", 1024)
    max_eval_blocks: int | None = option("Evaluate on this many blocks, evenly spread, instead of all.", None)
    preprocessing_num_workers: int | None = option("Processes that tokenize.", None)
    tokens_per_step: int = option(
        "Tokens in an optimizer step (paper: 0.5M), rounded to a multiple of the batch on all devices.", 2**19
    )
    train_only: Literal["memory"] | None = option(
        "`memory`: train only the parameters of the memories; the optimizer keeps no state of other parameters.",
        None,
    )
    repeat_passages: float = option(
        "Share of the training blocks in which earlier passages of 16 to 160 tokens come again, which gives a memory a "
        "reason to recall (docs/train.md); 0 for none.",
        0.0,
    )
    max_minutes: float | None = option(
        "Stop, evaluate and save after this time. The learning rate's schedule does not change; the card says so.", None
    )
    license: str | None = option("Licence of the weights for the model card, as the Hub names it (cc-by-4.0).", None)


PAPER = dict(learning_rate=4e-4, lr_scheduler_type="cosine", weight_decay=0.1)  # section 5.1 of the first version
OURS = dict(
    warmup_steps=0.02,  # below 1: a share of all steps
    adam_beta2=0.95,
    num_train_epochs=1.0,
    gradient_accumulation_steps=None,  # follows from --tokens_per_step
    use_cache=True,  # Trainer would save configurations whose plain calls return no memory
    remove_unused_columns=False,  # the collators take all columns
    include_num_input_tokens_seen=True,  # the loss curve is drawn over the tokens
    logging_nan_inf_filter=False,
    logging_steps=10,
    eval_strategy="steps",
    save_strategy=None,
    save_steps=None,
    save_total_limit=2,
    load_best_model_at_end=None,
    metric_for_best_model="eval_loss",
)


def show_help(description: str, argv: list[str] | None) -> None:
    """If the arguments ask for help, shows the help of the command's own options and exits. --help_all shows the
    options of TrainingArguments too, but needs the seconds in which transformers is imported.
    """
    given = sys.argv[1:] if argv is None else argv
    if HELP_ALL in given:
        from titans_hf.cli.training.trainer_arguments import make_parser

        make_parser().print_help()
        raise SystemExit
    if not {"-h", "--help"} & set(given):
        return
    others = ", ".join(f"--{name} {value}" for name, value in (PAPER | OURS).items() if value is not None)
    parser = ArgumentParser(
        usage=USAGE,
        description=description,
        epilog=textwrap.fill(f"Options of TrainingArguments that have another default here: {others}.", 100),
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--output_dir", required=True, help="Folder of the checkpoints, the model and its card.")
    for option in fields(RunArguments):
        needed = option.default is MISSING
        default = None if needed else option.default
        parser.add_argument(f"--{option.name}", required=needed, default=default, help=option.metadata["help"])
    parser.add_argument(HELP_ALL, action="store_true", help="Show the options of TrainingArguments too.")
    parser.print_help()
    raise SystemExit
