"""Serves a causal language model over HTTP: transformers' server (as of 5.24), with our answers, loading and checks."""

import json
import signal
import sys
from collections import defaultdict
from functools import partial
from importlib.util import find_spec

import click
import torch
import uvicorn
from transformers import PreTrainedModel
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState, split_revision
from transformers.cli.transformers import app as transformers_app
from transformers.utils import logging

from titans_hf.cli.serving.generation import ServedModel, TitansGenerateManager
from titans_hf.cli.serving.requests import CheckedHandler, check_requests
from titans_hf.cli.shared.checkpoints import check_checkpoint, load_model
from titans_hf.recalling import remember

for _package in ("accelerate", "openai"):  # transformers would notice late that one is missing
    if find_spec(_package) is None:
        raise ModuleNotFoundError(name=_package)
SECONDS_TO_END = 3  # that running requests have after SIGTERM or Ctrl-C
OPTIONS = (
    ("window", click.IntRange(0), 1024, "Tokens that a model other than a Titans attends to; 0 for no memory."),
    ("memory", str, None, "Folder of a saved memory, from which every request starts."),
    ("max_tokens", click.IntRange(1), None, "Most tokens of an answer (default: 4,096, or a longer context)."),
    ("slots", click.IntRange(1), 16, "Requests that a model with a memory answers at once, as rows of one batch."),
    ("snapshots", click.IntRange(0), 64, "Snapshots of read texts that are kept for each model; 0 for none."),
)


def make_command() -> click.Command:
    """Returns the command with transformers' options and ours, without those of continuous batching, which pages keys
    and values, and samples all requests alike.
    """
    theirs = transformers_app.commands["serve"]
    kept = [x for x in theirs.params if not x.name.startswith(("cb_", "continuous_batching", "non_blocking"))]
    for name, kind, default, text in OPTIONS:
        kept.append(click.Option([f"--{name}"], type=kind, default=default, help=text, show_default=True))
    return click.Command("serve", params=kept, callback=serve, help=theirs.help)


def serve(*, compile: bool, host: str, port: int, enable_cors: bool, log_level: str, reasoning: str, **options) -> None:
    """Runs the server until a signal ends it. Raises ValueError for a bad option, model or memory."""
    if compile:
        options["window"] = 0  # what is compiled has keys and values of a fixed length
    check_options(options["force_model"], options["memory"], compile)
    logging.get_logger("transformers").setLevel(logging.log_levels[log_level])
    seed, template, decisions = (options.pop(x) for x in ("default_seed", "chat_template_kwargs", "decision_config"))
    if seed is not None:
        torch.manual_seed(seed)
    template = json.loads(template or "{}") | ({} if reasoning == "auto" else {"enable_thinking": reasoning == "on"})
    state = State(compile, slots=options.pop("slots"), max_tokens=options.pop("max_tokens"))
    models, _ = parts = Models(**options), state
    chat, text, response = (
        type(x.__name__, (CheckedHandler, x), {}) for x in (ChatCompletionHandler, CompletionHandler, ResponseHandler)
    )
    handlers = chat(*parts, template), text(*parts), response(*parts, template), TranscriptionHandler(*parts)
    app = build_server(models, *handlers, SystemOneHandler(*parts, template, decisions), state, enable_cors)
    config = uvicorn.Config(check_requests(app), host=host, port=port, timeout_graceful_shutdown=SECONDS_TO_END)
    # The server then ends by the signal itself, as after SIGTERM: collecting Python's garbage would take seconds.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    uvicorn.Server(config).run()


def check_options(model: str | None, memory: str | None, compiles: bool) -> None:
    """Raises ValueError for a MODEL with a bad configuration or damaged weights, and for a memory without MODEL."""
    if memory is not None and model is None:
        raise ValueError(f"--memory {memory} needs MODEL: the checkpoint that made it")
    if memory is not None and compiles:
        raise ValueError(f"--memory {memory} cannot be used with --compile")
    if model is not None:
        check_checkpoint(model, "MODEL")


class State(GenerationState):
    def __init__(self, compile: bool, **options):
        super().__init__(compile=compile)
        self.managers: dict[str, TitansGenerateManager] = defaultdict(partial(TitansGenerateManager, **options))

    def get_manager(self, model_id: str, use_cb: bool = False) -> TitansGenerateManager:
        return self.managers[model_id]


class Models(ModelManager):
    """Loads causal language models, which remember, or as Titans have a memory of their own. Each has a `ServedModel`
    as its attribute `served`.
    """

    def __init__(self, memory: str | None, snapshots: int, window: int, **loading):
        self.memory, self.snapshots, self.window = memory, snapshots, window
        super().__init__(**loading)

    def _load_model(self, name: str, tqdm_class=None, progress_callback=None, gguf_file=None) -> PreTrainedModel:
        path, revision = split_revision(name)
        place = {"revision": revision, "trust_remote_code": self.trust_remote_code, "gguf_file": gguf_file}
        place |= {"dtype": self.dtype, "device_map": self.device, "attn_implementation": self.attn_implementation}
        quantization = self.get_quantization_config()
        model = load_model(path, "MODEL", tqdm_class=tqdm_class, quantization_config=quantization, **place).eval()
        if self.window and model.config.model_type != "titans" and not hasattr(model, "memory"):
            remember(model, self.window)
        model.served = ServedModel(model, self.snapshots, self.memory)
        return model


def main() -> None:
    """Runs the command in `sys.argv`. Raises ValueError for bad options."""
    try:
        make_command().main(sys.argv[1:], prog_name="titans-hf serve", standalone_mode=False)
    except click.ClickException as error:
        raise ValueError(error.format_message()) from error
