"""Checks requests before the server of transformers sees them, and notices when their clients have gone.

What is wrong in a request, or is asked for and not served, is status 422 with one line that names the field.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Annotated, Any, Literal

import torch
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import BaseModel, Field, Json, ValidationError
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor
from transformers.utils import logging

from titans_hf.cli.shared.command_line import message_of

logger = logging.get_logger(__name__)
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")

NumTokens = Annotated[int, Field(ge=1)]
StopString = Annotated[str, Field(min_length=1)]
Zero = Annotated[float, Field(ge=0, le=0)]
TextFormat = dict[Literal["type"], Literal["text"]]


class ChatMessage(BaseModel, extra="allow"):
    role: str
    content: str | list[dict[str, Any]] | None = None


class ServedRequest(BaseModel):
    """The fields of a request. Those that are not served would change the answer, but transformers ignores them: only
    the value that changes nothing is allowed. Fields that are not named may have any value.
    """

    messages: list[ChatMessage] = Field(None, min_length=1)
    input: str | list[Any] | dict[str, Any] = Field(None, min_length=1)
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    max_output_tokens: NumTokens | None = None
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, gt=-1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: StopString | list[StopString] | None = None
    logit_bias: dict[int, float] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    generation_config: Json[dict[str, Any]] | None = None
    user: str | None = None
    # Not served.
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    echo: Literal[False] | None = None
    presence_penalty: Zero | None = None
    response_format: TextFormat | None = None
    text: dict[Literal["format"], TextFormat] | None = None
    tool_choice: Literal["auto"] | None = None
    functions: None = None
    function_call: None = None
    reasoning_effort: None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    web_search_options: None = None
    previous_response_id: None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    max_tool_calls: None = None
    # Set by the server: the header, and whether nobody waits for the answer.
    authorization: str | None = None
    gone: bool = False

    @property
    def owner(self) -> tuple:
        """What the client has sent to tell users apart."""
        return self.authorization, self.user

    @property
    def asks_length(self) -> bool:
        lengths = (self.max_tokens, self.max_completion_tokens, self.max_output_tokens, self.generation_config)
        return any(x is not None for x in lengths)

    def chat(self, before_last_answer: bool = False) -> int | None:
        """Returns a hash of the messages, or of those before the last answer; None without."""
        messages = self.messages or []
        if before_last_answer:
            answers = [i for i, x in enumerate(messages) if x.role == "assistant"]
            messages = messages[: answers[-1]] if answers else []
        return hash(json.dumps([x.model_dump() for x in messages], sort_keys=True)) if messages else None

    def check(self, input_ids: Tensor | None = None, scores: Tensor | None = None, **kwargs) -> Tensor | None:
        """Raises HTTPException (503) if nobody waits for the answer. As a stopping criterion, ends no row otherwise."""
        if self.gone:
            raise HTTPException(503, "the answer was given up: the client has gone")
        return None if input_ids is None else torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


REQUEST: ContextVar[ServedRequest] = ContextVar("REQUEST")


def check_requests(app: FastAPI) -> FastAPI:
    """Adds the checks to a server. An error of the request that the server finds later is status 400 with one line."""
    app.user_middleware.append(Middleware(BaseHTTPMiddleware, dispatch=check))
    for kind in (ValueError, TypeError, KeyError, TemplateError):
        app.add_exception_handler(kind, _refuse)
    return app


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    logger.warning(f"A request is refused: {error!r}", exc_info=error)
    line = f"the request lacks {error}" if isinstance(error, KeyError) else message_of(error)
    return JSONResponse({"detail": line}, status_code=400)


async def check(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    """Answers a bad request; sets `REQUEST` for every other, and marks it when its client has gone."""
    if request.method != "POST" or request.url.path not in PATHS:
        return await answer(request)
    try:
        served = ServedRequest.model_validate_json(await request.body())
    except ValidationError as error:
        return JSONResponse({"detail": _line(error)}, status_code=422)
    served.authorization, served.gone = request.headers.get("authorization"), False
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
    name = ".".join(map(str, first["loc"]))
    if not name:
        return f"the request is not JSON: {first['msg']}"
    if first["type"] == "missing":
        return f"`{name}` is missing"
    value = json.dumps(first["input"], default=str)
    return f"`{name}` is {value[:80]}: {first['msg'][:1].lower()}{first['msg'][1:]}"
