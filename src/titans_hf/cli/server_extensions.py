"""Additions to `transformers serve` for a local checkpoint: an option to start from a saved memory, and the answer to
a request that fails with status 500 (as of transformers 5.24).
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from titans_hf import TitansCache
from titans_hf.cli.shared.checkpoints import check_checkpoint

if TYPE_CHECKING:
    from transformers.cli.serving.utils import BaseHandler

NO_TEMPLATE = (
    "The tokenizer of {model} has no chat template, so that it takes no messages: set `tokenizer.chat_template` and "
    "save the tokenizer beside the model, or send text to /v1/completions."
)


def extend_server() -> None:
    """Makes a chat without a chat template end in a clear error. Does nothing if the packages for serving are missing,
    which the command `serve` then names.
    """
    if find_spec("fastapi") is None or find_spec("openai") is None:
        return
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.response import ResponseHandler

    for handler in (ChatCompletionHandler, ResponseHandler):
        handler._resolve_model = resolve_chat_model


def add_memory_option(command: click.Command) -> None:
    """Adds to the command `serve` an option --memory, the folder of the memory from which every request starts."""
    serve = command.callback

    def serve_from_memory(memory: str | None, **options) -> object:
        if memory is not None:
            start_models_from(memory, options["force_model"], options["compile"])
        return serve(**options)

    text = "Folder of a saved memory, from which every request starts."
    command.params.append(click.Option(["--memory"], metavar="DIR", help=text))
    command.callback = serve_from_memory


def add_checks(command: click.Command) -> None:
    """Makes the command `serve` raise ValueError for a MODEL with a bad configuration or damaged weights."""
    serve = command.callback

    def serve_checked(force_model: str | None, **options) -> object:
        if force_model is not None:
            check_checkpoint(force_model, "MODEL")
        return serve(force_model=force_model, **options)

    command.callback = serve_checked


def start_models_from(memory: str, model_name: str | None, compiled: bool) -> None:
    """Makes the server load its model with `start_from` the memory in the folder `memory`.

    Raises ValueError if `model_name` is None or `compiled` is True. Loading the model, which happens before the server
    starts, raises FileNotFoundError for a folder without a memory and ValueError for the memory of another model.
    """
    if model_name is None:
        raise ValueError(f"--memory {memory} needs MODEL: the checkpoint that made it")
    if compiled:
        raise ValueError(f"--memory {memory} cannot be used with --compile")
    from transformers.cli.serving.model_manager import ModelManager

    load_model = ModelManager._load_model

    def load_model_with_memory(*args, **kwargs):
        model = load_model(*args, **kwargs)
        if model.config.model_type != "titans":
            raise ValueError(f"--memory {memory}: {model_name} is a {model.config.model_type} model without a memory")
        model.start_from(TitansCache.from_pretrained(memory, model))
        return model

    ModelManager._load_model = load_model_with_memory


def resolve_chat_model(handler: "BaseHandler", body: dict[str, Any]) -> tuple:
    """Calls `BaseHandler._resolve_model`. Raises HTTPException (400) if the tokenizer has no chat template."""
    from fastapi import HTTPException
    from transformers.cli.serving.utils import BaseHandler

    model_id, model, processor = BaseHandler._resolve_model(handler, body)
    if getattr(processor, "chat_template", None) is None:
        raise HTTPException(status_code=400, detail=NO_TEMPLATE.format(model=body["model"]))
    return model_id, model, processor
