"""Runs transformers' own commands for Titans and adapters too: `serve MODEL --memory DIR` and `chat MODEL URL`."""

import sys
from importlib.util import find_spec

import click
from huggingface_hub.utils import httpx
from transformers.cli.transformers import main as transformers_main

for _package in ("accelerate", "fastapi", "openai", "uvicorn"):  # transformers would notice late that one is missing
    if find_spec(_package) is None:
        raise ModuleNotFoundError(name=_package)


def main() -> None:
    """Runs the command in `sys.argv`. Raises ValueError for bad options, and for a chat with a model that the server
    cannot load; ConnectionError if a chat gets no answer.
    """
    if sys.argv[1] == "serve":
        from titans_hf.cli.serving.server import make_command

        try:
            make_command().main(sys.argv[2:], prog_name="titans-hf serve", standalone_mode=False)
        except click.ClickException as error:
            raise ValueError(error.format_message()) from error
        return
    try:
        transformers_main()
    except (httpx.HTTPError, ValueError) as error:
        cause = (
            error if isinstance(error, httpx.HTTPError) else error.__context__
        )  # the ValueError names its own server
        if not isinstance(cause, httpx.HTTPError):
            raise
        raise ConnectionError(f"the server does not answer: {cause}. titans-hf serve MODEL starts one") from error
    except RuntimeError as error:
        raise ValueError(f"the server cannot load the model: {error}") from error
