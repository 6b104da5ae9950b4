"""Checks requests before the server of transformers sees them, and notices when their clients have gone.

What is wrong in a request, or is asked for and not served, is status 422 with one line that names the field.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Annotated, Any

import torch
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import BaseModel, Field, FiniteFloat, Json, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor
from transformers import GenerationConfig
from transformers.cli.serving.utils import BaseHandler
from transformers.utils import logging

from titans_hf.cli.shared.command_line import message_of

logger = logging.get_logger(__name__)
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# Fields that transformers ignores and that change no answer, and values that ask for nothing.
HARMLESS = set("include metadata parallel_tool_calls prediction service_tier store stream_options user".split())
NOTHING = (None, False, 0, "auto", "disabled", ["text"], {"type": "text"}, {"format": {"type": "text"}})

NumTokens = Annotated[int, Field(ge=1)]
StopString = Annotated[str, Field(min_length=1)]


class ChatMessage(BaseModel, extra="allow"):
    role: str
    content: str | list[dict[str, Any]] | None = None


class ServedRequest(BaseModel):
    """The fields of a request that are served. The server sets `owner`, what the client has sent to tell users apart,
    and `gone`, whether nobody waits for the answer.
    """

    messages: list[ChatMessage] = Field(None, min_length=1)
    input: str | list[Any] | dict[str, Any] = Field(None, min_length=1)
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    max_output_tokens: NumTokens | None = None
    temperature: FiniteFloat | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: FiniteFloat | None = Field(None, gt=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: StopString | list[StopString] | None = None
    logit_bias: dict[int, FiniteFloat] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    generation_config: Json[dict[str, Any]] | None = None
    user: str | None = None
    owner: tuple = ()
    gone: bool = False

    @property
    def asks_length(self) -> bool:
        lengths = (self.max_tokens, self.max_completion_tokens, self.max_output_tokens, self.generation_config)
        return any(x is not None for x in lengths)

    def check(self, input_ids: Tensor | None = None, scores: Tensor | None = None, **kwargs) -> Tensor | None:
        """Raises HTTPException (503) if nobody waits for the answer. As a stopping criterion, ends no row otherwise."""
        if self.gone:
            raise HTTPException(503, "the answer was given up: the client has gone")
        return None if input_ids is None else torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


REQUEST: ContextVar[ServedRequest] = ContextVar("REQUEST")


class CheckedHandler(BaseHandler):
    """Refuses what transformers would ignore. Seeds nothing: each request has random numbers of its own."""

    def _validate_request(self, body: dict) -> None:
        for name in (body.keys() & self._unused_fields) - HARMLESS:
            if body[name] not in NOTHING and (name, body[name]) not in (("n", 1), ("best_of", 1)):
                raise HTTPException(422, f"`{name}` is {_shown(body[name])}: it is not served")
        super()._validate_request(body)

    def _build_generation_config(self, body: dict, *args, **kwargs) -> GenerationConfig:
        return super()._build_generation_config({**body, "seed": None}, *args, **kwargs)


def check_requests(app: FastAPI) -> FastAPI:
    """Adds the checks to a server. An error of the request that the server finds later is status 400 with one line."""
    app.middleware("http")(check)
    for kind in (HTTPException, ValueError, TypeError, KeyError, TemplateError):
        app.add_exception_handler(kind, _refuse)
    return app


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail)
    logger.warning(f"A request is refused: {error!r}", exc_info=error)
    return _error(400, f"the request lacks {error}" if isinstance(error, KeyError) else message_of(error))


def _error(status: int, line: Any) -> JSONResponse:
    """Returns an error as transformers gives it, and as OpenAI's client shows it."""
    return JSONResponse({"detail": line, "error": {"message": str(line)}}, status_code=status)


async def check(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    """Answers a bad request; sets `REQUEST` for every other, and marks it when its client has gone."""
    if request.method != "POST" or request.url.path not in PATHS:
        return await answer(request)
    try:
        served = ServedRequest.model_validate_json(await request.body())
    except ValidationError as error:
        return _error(422, _line(error))
    served.owner, served.gone = (request.headers.get("authorization"), served.user), False
    REQUEST.set(served)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        served.gone = True

    request.state.watcher = asyncio.create_task(watch())  # ends with the answer, or before
    return await answer(request)


def _line(error: ValidationError) -> str:
    """Returns a line that names the first field that is wrong, its value and what it may be."""
    first = error.errors(include_url=False)[0]
    name, message = ".".join(map(str, first["loc"])), first["msg"]
    if not name:
        return f"the request is not JSON: {message}"
    if first["type"] == "missing":
        return f"`{name}` is missing"
    return f"`{name}` is {_shown(first['input'])}: {message[:1].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:80]
