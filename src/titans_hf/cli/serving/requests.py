"""Checks requests before the server of transformers sees them, and notices when their clients have gone.

What is wrong in a request, or is asked for and not served, is status 422 with one line that names the field. A part of
a message that the prompt does not show is status 400.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Annotated, Any, Literal

import torch
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    FiniteFloat,
    Json,
    Strict,
    StrictBool,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.cli.serving.utils import BaseHandler, Modality
from transformers.utils import logging

from titans_hf.cli.serving.parts import first_unprinted, parts
from titans_hf.cli.shared.command_line import message_of

logger = logging.get_logger(__name__)
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# Fields that transformers ignores and that change no answer, and values that ask for nothing.
HARMLESS = set("include metadata parallel_tool_calls prediction service_tier store stream_options user".split())
NOTHING = (None, False, 0, "auto", "disabled", ["text"], {"type": "text"}, {"format": {"type": "text"}})

NumTokens = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
StopString = Annotated[str, Field(min_length=1)]


def _check_token(token: int, info: ValidationInfo) -> int:
    if info.context is not None and token >= info.context["vocabulary"]:
        raise ValueError(f"the model has {info.context['vocabulary']} tokens")
    return token


TokenId = Annotated[int, Field(ge=0), AfterValidator(_check_token)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
AsList = BeforeValidator(lambda x: x if isinstance(x, list) else [x])
AsTuple = Strict(False)  # JSON has lists alone


class ChatMessage(BaseModel, extra="allow"):
    role: str
    content: str | list[dict[str, Any]] | None = None


class GenerationSettings(BaseModel, extra="forbid", strict=True):
    """The fields of `generation_config` that are served, without those that ask for nothing."""

    max_length: NumTokens | None = None
    max_new_tokens: NumTokens | None = None
    min_length: int | None = Field(None, ge=0)
    min_new_tokens: int | None = Field(None, ge=0)
    max_time: FiniteFloat | None = Field(None, gt=0)
    stop_strings: Annotated[list[StopString], AsList] | None = None
    do_sample: bool | None = None
    use_cache: bool | None = None
    num_beams: int | None = None
    early_stopping: Literal[True, "never"] | None = None
    length_penalty: FiniteFloat | None = None
    num_return_sequences: Literal[1] | None = None
    temperature: FiniteFloat | None = Field(None, ge=0)
    top_k: int | None = Field(None, ge=0)
    top_p: Share | None = None
    min_p: Share | None = None
    top_h: Share | None = None
    typical_p: Share | None = None
    epsilon_cutoff: Share | None = None
    eta_cutoff: Share | None = None
    repetition_penalty: FiniteFloat | None = Field(None, gt=0)
    encoder_repetition_penalty: FiniteFloat | None = Field(None, gt=0)
    no_repeat_ngram_size: int | None = Field(None, ge=0)
    encoder_no_repeat_ngram_size: int | None = Field(None, ge=0)
    bad_words_ids: list[TokenIds] | None = None
    sequence_bias: list[Annotated[tuple[TokenIds, FiniteFloat], AsTuple]] | None = None
    suppress_tokens: list[TokenId] | None = None
    begin_suppress_tokens: list[TokenId] | None = None
    forced_bos_token_id: TokenId | None = None
    forced_eos_token_id: Annotated[TokenIds, AsList] | None = None
    exponential_decay_length_penalty: Annotated[tuple[int, FiniteFloat], AsTuple] | None = None
    renormalize_logits: bool | None = None
    remove_invalid_values: bool | None = None
    pad_token_id: TokenId | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: Annotated[TokenIds, AsList] | None = None
    transformers_version: str | None = None

    @model_validator(mode="before")
    @classmethod
    def drop_nothing(cls, fields: Any) -> Any:
        return {name: x for name, x in fields.items() if x not in NOTHING} if isinstance(fields, dict) else fields


class ServedRequest(BaseModel):
    """The fields of a request that are served. The server sets `owner`, what the client has sent to tell users apart,
    and `gone`, whether nobody waits for the answer.
    """

    messages: list[ChatMessage] | None = Field(None, min_length=1)
    input: str | list[dict[str, Any]] | None = Field(None, min_length=1)
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    max_output_tokens: NumTokens | None = None
    temperature: FiniteFloat | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: FiniteFloat | None = Field(None, gt=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[StopString], AsList] | None = None
    logit_bias: dict[TokenId, FiniteFloat] | None = None
    stream: StrictBool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    generation_config: Json[GenerationSettings] | None = None
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
        for name in [name for name, x in body.items() if x is None]:
            del body[name]
        for name in (body.keys() & (self._unused_fields | {"suffix"})) - HARMLESS:
            if body[name] not in NOTHING and (name, body[name]) not in (("n", 1), ("best_of", 1)):
                raise HTTPException(422, f"`{name}` is {_shown(body[name])}: it is not served")
        super()._validate_request(body)

    def _resolve_model(self, body: dict) -> tuple[str, PreTrainedModel, ProcessorMixin | PreTrainedTokenizerBase]:
        """Loads the model, and checks what depends on it: ids of tokens, and which parts of messages the chat template
        prints.
        """
        model_id, model, processor = super()._resolve_model(body)
        try:
            ServedRequest.model_validate(body, context={"vocabulary": model.get_input_embeddings().num_embeddings})
        except ValidationError as error:
            raise HTTPException(422, _line(error)) from error
        asked = {name: body[name] for name in ("messages", "instructions", "input") if name in body}
        for name, x in asked.items():
            for i, message in enumerate(x if isinstance(x, list) else ()):
                if "role" in message and message.get("content") in (None, []) and not [*parts(message)]:
                    raise HTTPException(400, f"`{name}.{i}.content` is missing")

        def prompt_of(asked: dict, with_tools: bool = True) -> str:
            is_chat, tools = "messages" in asked, body.get("tools") if with_tools else None
            messages = asked["messages"] if is_chat else self._normalize_input(asked)
            return processor.apply_chat_template(
                self.get_processor_inputs_from_messages(messages, modality),
                add_generation_prompt=True,
                tools=tools if is_chat else self._normalize_tools(tools),
                tokenize=False,
                **(self.chat_template_kwargs | body.get("chat_template_kwargs", {})),
            )

        if "messages" in asked or "input" in asked:
            modality = self.model_manager.get_model_modality(model, processor)
            unprinted = first_unprinted(asked, prompt_of)
            if unprinted is None and body.get("tools") and prompt_of(asked) == prompt_of(asked, with_tools=False):
                unprinted = ("tools",)
            if unprinted is not None:
                raise HTTPException(400, f"`{_name(unprinted)}` is not printed by the chat template of the model")
        return model_id, model, processor

    @staticmethod
    def get_processor_inputs_from_messages(messages: list[dict], modality: Modality) -> list[dict]:
        """Returns what a chat template is given: messages with all that they hold, which transformers leaves out, and
        with texts and arguments as transformers makes them.
        """
        convert = BaseHandler.get_processor_inputs_from_messages
        for_template = []
        for message in messages:
            [calls], [text] = convert([message], modality), convert([{**message, "tool_calls": None}], modality)
            rest = {name: x for name, x in message.items() if x not in (None, "", [], {})}
            for_template.append(rest | calls | {"content": text["content"]})
        return for_template

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
    name, message = _name(first["loc"]), first["msg"].removeprefix("Value error, ")
    if not name:
        return f"the request is not JSON: {message}"
    if first["type"] == "missing":
        return f"`{name}` is missing"
    if first["type"] == "extra_forbidden":
        message = "it is not served"
    return f"`{name}` is {_shown(first['input'])}: {message[:1].lower()}{message[1:]}"


def _name(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:80]
