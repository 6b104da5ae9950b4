"""Runs lm-eval's own command line with the model class "titans", which reads a prompt of any length with a memory.

titans-hf lm-eval run --model titans --model_args pretrained=runs/tiny-mag --tasks lambada_openai
titans-hf lm-eval run --model titans --model_args pretrained=my-llama,window=1024 --tasks lambada_openai
"""

import re
import sys

from datasets.exceptions import DatasetGenerationError
from lm_eval.__main__ import cli_evaluate

import titans_hf.cli.titans_lm  # noqa: F401  registers the model class
from titans_hf.cli.shared.checkpoints import check_checkpoint
from titans_hf.cli.shared.command_line import run_command


def main() -> None:
    """Runs the subcommand of lm-eval that `sys.argv` names. Raises ValueError for a damaged checkpoint, and for a data
    file of a task that holds no rows or is damaged.
    """
    if model := re.search(r"\bpretrained=([^,\s]+)", " ".join(sys.argv)):
        check_checkpoint(model[1], "--model_args pretrained")
    try:
        cli_evaluate()
    except DatasetGenerationError as error:
        raise ValueError(f"the data of a task cannot be read: {error.__cause__ or error}") from error


if __name__ == "__main__":
    run_command(main)
