"""Two answers of `transformers serve` that it fails to give for a checkpoint of one's own (status 500 as of 5.23)."""

import time
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import CacheNotFound

if TYPE_CHECKING:
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import BaseHandler

NO_TEMPLATE = (
    "The tokenizer of {model} has no chat template, so that it takes no messages: set `tokenizer.chat_template` and "
    "save the tokenizer beside the model, or send text to /v1/completions."
)


def extend_server() -> None:
    """Makes /v1/models list the served checkpoint, and a chat without a chat template an error that says so. Does
    nothing where the packages for serving are missing: the command `serve` says which.
    """
    if find_spec("fastapi") is None or find_spec("openai") is None:
        return
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler

    downloaded_models = ModelManager.get_gen_models
    ModelManager.get_gen_models = lambda manager, cache_dir=None: list_models(manager, downloaded_models, cache_dir)
    for handler in (ChatCompletionHandler, ResponseHandler):
        handler._resolve_model = resolve_chat_model


def list_models(
    manager: "ModelManager | SimpleNamespace", downloaded_models: Callable, cache_dir: str | None = None
) -> list[dict[str, Any]]:
    """The models that a request may name: the one given to `serve`, which then takes no other, or those downloaded."""
    if manager.force_model is not None:
        return [{"owned_by": "", "id": manager.force_model, "object": "model", "created": int(time.time())}]
    try:
        return downloaded_models(cache_dir)
    except CacheNotFound:
        return []


def resolve_chat_model(handler: "BaseHandler", body: dict[str, Any]) -> tuple:
    """`BaseHandler._resolve_model`. Raises HTTPException (400) for a model whose tokenizer has no chat template."""
    from fastapi import HTTPException
    from transformers.cli.serving.utils import BaseHandler

    model_id, model, processor = BaseHandler._resolve_model(handler, body)
    if getattr(processor, "chat_template", None) is None:
        raise HTTPException(status_code=400, detail=NO_TEMPLATE.format(model=body["model"]))
    return model_id, model, processor
