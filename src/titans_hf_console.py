"""The command `titans-hf`: its subcommands, which are modules of `titans_hf.cli`, and their options.

This module lies beside the package and needs the standard library alone: importing anything of the package imports
torch and transformers first. That takes seconds, which help does not need. The docstring of an `..._options` is the
command's help.
"""

import argparse
import inspect
import sys
import textwrap
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

TEXT_SUFFIXES = (".txt", ".md")
DEVICE_HELP = "cpu, cuda, ... (default: the GPU if there is one)"


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows a description as it is written, and the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        without = action.default is None or action.default is False
        return action.help if without else super()._get_help_string(action)


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
    num_parameters: int | None = option(
        "Size of a new model, such as 1_000_000: finds hidden_size, and intermediate_size in proportion. A width in "
        "--config_overrides stays.",
        None,
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
        "`memory`: train only the parameters of the memories; the optimizer keeps no state of other parameters.", None
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


TRAIN_USAGE = "titans-hf train --train_data DATA --output_dir FOLDER [options]"


def train_options(parser: argparse.ArgumentParser) -> None:
    """Trains or fine-tunes a causal language model: Titans, or any other model type that transformers knows.

        titans-hf train --config tiny-mag --tokenizer bytes --train_data FOLDER --output_dir runs/tiny
        titans-hf train --model_name_or_path runs/tiny --train_data FILE.jsonl --output_dir runs/tuned

    Every option of transformers' TrainingArguments can be given too. Learning rate, schedule, weight decay and
    tokens per step are by default as in the Titans paper (arXiv 2501.00663, first version, section 5.1).
    """
    others = ", ".join(f"--{name} {value}" for name, value in (PAPER | OURS).items() if value is not None)
    parser.usage = TRAIN_USAGE
    parser.epilog = textwrap.fill(f"Options of TrainingArguments that have another default here: {others}.", 100)
    parser.add_argument("--output_dir", required=True, help="Folder of the checkpoints, the model and its card.")
    for x in fields(RunArguments):
        needed = x.default is MISSING
        default = None if needed else x.default
        parser.add_argument(f"--{x.name}", required=needed, default=default, help=x.metadata["help"])


def merge_options(parser: argparse.ArgumentParser) -> None:
    """Merges an adapter (LoRA) into the weights of the model that it was trained on, and saves model and tokenizer.

    titans-hf merge runs/tiny-mag-lora runs/tiny-mag-merged
    """
    parser.add_argument("adapter", type=Path, help="the folder of the adapter, which names its model")
    parser.add_argument("output", type=Path, help="a new folder for the merged model")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, --window and --device to a command that reads with a memory."""
    text = "a Titans, or any causal language model: a folder or a name on the Hub"
    parser.add_argument("model", metavar="MODEL", help=text)
    parser.add_argument("--window", type=int, help="tokens in sight of a MODEL other than a Titans (default: 1024)")
    parser.add_argument("--device", help=DEVICE_HELP)


def read_options(parser: argparse.ArgumentParser) -> None:
    """Reads any amount of text into a memory, for titans-hf ask to answer from.

        titans-hf read MODEL TEXT... --memory DIR

    TEXT is a file, a folder or - for standard input. In a folder and its subfolders the files with one of
    --suffixes are read, sorted by path. A README.md is read only if there is no other file. Every text is tokenized
    by itself; a line end comes before each text but the first. The memory is saved every --save_seconds. After an
    interruption, the same command checks that the texts are the same and resumes from the last save; further texts
    may be given at the end. With --append, TEXT is read after all texts that the memory has read. A repeated
    --append goes on where it ended, and reads nothing if it was complete. A memory contains the texts that it has
    read: treat it like the texts themselves.
    """
    add_model_options(parser)
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="a file, a folder, or - for standard input")
    parser.add_argument("--memory", type=Path, required=True, help="the folder to save to, and to resume from")
    parser.add_argument("--suffixes", nargs="+", default=TEXT_SUFFIXES, help="endings of a folder's files to read")
    parser.add_argument("--save_seconds", type=float, default=60, help="seconds between two saves")
    parser.add_argument("--piece", type=int, default=4096, help="tokens read at once; fewer need less working memory")
    parser.add_argument("--append", action="store_true", help="read TEXT after all texts that the memory has read")


def ask_options(parser: argparse.ArgumentParser) -> None:
    """Answers prompts from a memory saved by titans-hf read, without reading the texts again.

        titans-hf ask MODEL --memory DIR --prompt "The key was" --prompt "The door was"
        titans-hf ask MODEL --memory DIR     # asks for prompts, until an empty line

    Every prompt is continued from the saved memory, which does not change. With --keep, each prompt and its answer
    are read into the memory, which is then saved.
    """
    add_model_options(parser)
    parser.add_argument("--memory", type=Path, required=True, help="the folder that titans-hf read has saved to")
    parser.add_argument("--prompt", action="append", help="a text to be continued; may be given several times")
    parser.add_argument("--show_passage", action="store_true", help="show what was read again for each prompt")
    parser.add_argument("--keep", action="store_true", help="prompts and answers become part of the saved memory")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="the longest answer, in tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for the most probable token")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws with a --temperature above 0")


def surprise_options(parser: argparse.ArgumentParser) -> None:
    """Draws the memory's surprise at each token of a text: surprise.png.

        titans-hf surprise MODEL TEXT --output DIR

    TEXT is a file, or - for standard input. The picture shows by layer and token the norm of the gradient by which the
    memory learns a token (its surprise; paper, eq. 12), and the gates of that update: theta (learning rate), eta
    (momentum decay, 0 without momentum), alpha (forgetting rate).
    """
    parser.add_argument("model", metavar="MODEL", help="a Titans: a folder or a name on the Hub")
    parser.add_argument("text", metavar="TEXT", help="a file, or - for standard input")
    parser.add_argument("--output", type=Path, required=True, help="the folder for surprise.png")
    parser.add_argument("--max_tokens", type=int, default=20_000, help="the longest text that is drawn")
    parser.add_argument("--device", help=DEVICE_HELP)


def demo_options(parser: argparse.ArgumentParser) -> None:
    """Trains two small models on key-value recall within minutes, then asks both at growing distances.

    Both get "k1 v1 ... k6 v6 filler k?" and have to answer the v that came with that k. They are trained with at
    most 16 tokens of filler and asked with up to 1024, through `generate()`. The Titans stores the pairs in the
    weights of its memory (the default variant, LMM, has no attention); the Transformer (Mistral) has a sliding
    window only. The symbols are words, so that people can ask the saved model themselves: keys are names, values
    cities.
    """
    parser.add_argument("--variant", choices=("mac", "mag", "mal", "lmm"), default="lmm", help="the model's variant")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of 32 sequences")
    parser.add_argument("--questions", type=int, default=128, help="sequences asked per distance")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the training texts and the questions")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/demo"), help="folder of the models, the picture")


# By name: the module whose `main()` a command runs, a summary, the extra of the wheel that it needs, and its options;
# None where transformers and lm-eval parse them.
COMMANDS = {
    "train": ("titans_hf.cli.train", "train or fine-tune a causal language model", "train", train_options),
    "merge": ("titans_hf.cli.merge", "merge a LoRA adapter into its model", "finetune", merge_options),
    "read": ("titans_hf.cli.read", "read texts into a memory and save it", "train", read_options),
    "ask": ("titans_hf.cli.ask", "answer prompts from a saved memory", "train", ask_options),
    "surprise": ("titans_hf.cli.surprise", "show how much each word changed the memory", "train", surprise_options),
    "serve": ("titans_hf.cli.serve", "serve a checkpoint over HTTP, with OpenAI's API", "serve", None),
    "lm-eval": ("titans_hf.cli.lm_eval_command", "run lm-eval's own command line, for any task", "eval", None),
    "demo": ("titans_hf.cli.demo", "train two small models and compare their recall", "demo", demo_options),
}


def shipped_files() -> dict[str, Path]:
    """Returns by name what the package brings: configurations, a chat template, and a small trained model."""
    folder = Path(__file__).with_name("titans_hf")
    return {x.name: x for pattern in ("cli/configs/**/*.*", "checkpoints/*") for x in sorted(folder.glob(pattern))}


def parse(name: str, argv: list[str] | None) -> argparse.Namespace:
    """Parses the arguments of a command, None for those of `sys.argv`."""
    options = COMMANDS[name][3]
    parser = argparse.ArgumentParser(description=inspect.cleandoc(options.__doc__), formatter_class=HelpFormatter)
    options(parser)
    return parser.parse_args(argv)


def usage() -> str:
    """Returns the help of `titans-hf`."""
    rows = "\n".join(f"  {name:<12}{summary}" for name, (_, summary, *_) in COMMANDS.items())
    return (
        f"usage: titans-hf COMMAND [options]\n\ncommands:\n{rows}\n\n"
        "titans-hf COMMAND --help shows the options of a command, titans-hf --version the version,\n"
        "titans-hf --path NAME the path of a file that comes with it, as fsdp2.yaml, or of the model recall-lmm.\n"
        "An error is one line; with TITANS_HF_DEBUG=1 in the environment its traceback is shown."
    )


def main() -> None:
    """Runs the subcommand that `sys.argv` names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(usage())
    elif name == "--version":
        print(f"titans-hf {version('titans-hf')}")
    elif name == "--path" and " ".join(sys.argv[2:]) in shipped_files():
        print(shipped_files()[sys.argv[2]])
    elif name == "--path":
        message = f"there is no file {' '.join(sys.argv[2:])}, only {', '.join(shipped_files())}"
        print(f"titans-hf --path: error: {message}", file=sys.stderr)
        raise SystemExit(2)
    elif name in COMMANDS:
        sys.argv[:2] = [f"titans-hf {name}"]
        if COMMANDS[name][3] is not None and {"-h", "--help"} & {*sys.argv[1:]}:
            parse(name, ["--help"])
        import_module("titans_hf.cli.shared.command_line").run_command(partial(_run, name))
    else:
        print(f"titans-hf: error: there is no command {name}, only {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)


def _run(name: str) -> None:
    """Imports the command's module and runs its `main`. Raises ModuleNotFoundError that names the extra to install."""
    module, _, extra, _ = COMMANDS[name]
    try:
        main = import_module(module).main
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").startswith("titans_hf"):
            raise
        missing = (error.name or "").partition(".")[0]
        raise ModuleNotFoundError(
            f'the package {missing} is missing: pip install "titans_hf[{extra}]"', name=missing
        ) from error
    main()
