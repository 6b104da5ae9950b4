"""Additions to the command `serve` of transformers (as of 5.24): checks of MODEL and of requests, a saved memory to
start from, snapshots, and a limit of the answers.
"""

import asyncio
import functools
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import uvicorn
from fastapi import HTTPException
from transformers import AutoConfig, PreTrainedModel
from transformers.cli.serving import server, utils
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler

from titans_hf import TitansCache
from titans_hf.cli.serving.checks import check_requests
from titans_hf.cli.serving.generation import ServedRequest, ServerOptions, TitansGenerateManager
from titans_hf.cli.serving.snapshots import bytes_of_snapshot, kind_of_cache, starting
from titans_hf.cli.shared.checkpoints import check_checkpoint

if TYPE_CHECKING:
    from transformers.cli.serving.utils import BaseHandler

NO_TEMPLATE = (
    "The tokenizer of {model} has no chat template, so that it takes no messages: set `tokenizer.chat_template` and "
    "save the tokenizer beside the model, or send text to /v1/completions."
)
SECONDS_TO_END = 3  # that running requests have after SIGTERM or Ctrl-C


def add_options(command: click.Command) -> None:
    """Adds to the command `serve` the options --memory, --max_tokens, --snapshots and --snapshot_folder."""
    serve = command.callback

    def serve_with(
        memory: str | None, max_tokens: int | None, snapshots: int, snapshot_folder: Path | None, **options
    ) -> object:
        model = options["force_model"]
        if memory is not None and model is None:
            raise ValueError(f"--memory {memory} needs MODEL: the checkpoint that made it")
        if memory is not None and options["compile"]:
            raise ValueError(f"--memory {memory} cannot be used with --compile")
        if snapshot_folder is not None:
            snapshot_folder.mkdir(parents=True, exist_ok=True)
        TitansGenerateManager.options = ServerOptions(max_tokens, snapshots, snapshot_folder)
        extend_server(memory)
        return serve(**options)

    counts = {"type": click.IntRange(min=0), "metavar": "N"}
    command.params += [
        click.Option(["--memory"], metavar="DIR", help="Folder of a saved memory, from which every request starts."),
        click.Option(
            ["--max_tokens"],
            type=click.IntRange(min=1),
            metavar="N",
            help="Most tokens of an answer. By default 4,096, or the model's length of context where that is larger.",
        ),
        click.Option(
            ["--snapshots"],
            default=64,
            show_default=True,
            help="Snapshots of read texts that are kept in memory for each model; 0 for none.",
            **counts,
        ),
        click.Option(
            ["--snapshot_folder"],
            type=click.Path(file_okay=False, path_type=Path),
            metavar="DIR",
            help="Folder for snapshots that have no place in memory, 16 times as many. They are removed at the end.",
        ),
    ]
    command.callback = serve_with


def add_checks(command: click.Command) -> None:
    """Makes the command `serve` raise ValueError for a MODEL with a bad configuration or damaged weights."""
    serve = command.callback

    def serve_checked(force_model: str | None, **options) -> object:
        if force_model is not None:
            check_checkpoint(force_model, "MODEL")
        return serve(force_model=force_model, **options)

    command.callback = serve_checked


def extend_server(memory: str | None) -> None:
    """Puts our parts in the places of those of the server. `memory`: a folder, from which every request starts."""
    for handler in (ChatCompletionHandler, ResponseHandler):
        handler._resolve_model = resolve_chat_model
    utils.GenerateManager = TitansGenerateManager
    server.build_server = _with_checks(server.build_server)
    uvicorn.Server.shutdown = _ending_requests(uvicorn.Server.shutdown)
    # The server then ends by the signal itself, as after SIGTERM: collecting Python's garbage would take seconds.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    load_model, load_processor = ModelManager._load_model, ModelManager._load_processor

    def load(*args, **kwargs) -> PreTrainedModel:
        model = load_model(*args, **kwargs)
        if memory is not None:
            start_from(memory, model)
        number = TitansGenerateManager.options.snapshots
        if number and (size := bytes_of_snapshot(model)):
            print(f"Snapshots: up to {number} of {size / 1e6:,.1f} MB, {number * size / 1e9:,.2f} GB", flush=True)
        return model

    def load_tokenizer(manager: ModelManager, name: str, **options) -> object:
        config = AutoConfig.from_pretrained(name) if Path(name).is_dir() else None
        base = getattr(config, "base_model_name_or_path", None)  # of an adapter of `remember`
        return load_processor(manager, base or name, **options)

    ModelManager._load_model, ModelManager._load_processor = load, load_tokenizer


def _with_checks(build):
    return functools.wraps(build)(lambda *args, **kwargs: check_requests(build(*args, **kwargs)))


def _ending_requests(shutdown):
    @functools.wraps(shutdown)
    async def shutdown_in_time(self, sockets=None) -> None:
        def end_requests() -> None:
            for request in ServedRequest.running:
                request.gone = True

        self.config.timeout_graceful_shutdown = 2 * SECONDS_TO_END
        asyncio.get_running_loop().call_later(SECONDS_TO_END, end_requests)
        await shutdown(self, sockets)
        for snapshots in TitansGenerateManager.snapshots.values():
            snapshots.close()

    return shutdown_in_time


def start_from(memory: str, model: PreTrainedModel) -> None:
    """Lets every request of a model start from the memory in the folder `memory`.

    Raises FileNotFoundError for a folder without a memory, ValueError for a model without one, and for the memory of
    another model.
    """
    kind = kind_of_cache(model)
    if kind is None:
        name = model.config.name_or_path
        raise ValueError(f"--memory {memory}: {name} is a {model.config.model_type} model without a memory")
    cache = kind.from_pretrained(memory, model)
    cache.start_prompt()
    starting[model] = cache
    if kind is TitansCache:
        model.start_from(cache)  # also where several rows are generated


def resolve_chat_model(handler: "BaseHandler", body: dict[str, Any]) -> tuple:
    """Calls `BaseHandler._resolve_model`. Raises HTTPException (400) if the tokenizer has no chat template."""
    model_id, model, processor = utils.BaseHandler._resolve_model(handler, body)
    if getattr(processor, "chat_template", None) is None:
        raise HTTPException(status_code=400, detail=NO_TEMPLATE.format(model=body["model"]))
    return model_id, model, processor
