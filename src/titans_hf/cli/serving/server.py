"""The command `serve` of transformers (as of 5.24) with our parts: checks of MODEL and of requests, a saved memory to
start from, snapshots, answers side by side, and a limit of the answers.
"""

import functools
import shutil
import signal
import tempfile
from pathlib import Path

import click
import uvicorn
from transformers import AutoConfig, PreTrainedModel
from transformers.cli.serving import model_manager, server, utils
from transformers.utils import logging

from titans_hf.cli.serving.generation import ServedModel, ServerOptions, TitansGenerateManager
from titans_hf.cli.serving.requests import check_requests
from titans_hf.cli.shared.checkpoints import check_checkpoint

logger = logging.get_logger(__name__)
SECONDS_TO_END = 3  # that running requests have after SIGTERM or Ctrl-C


OPTIONS = {
    "memory": {"metavar": "DIR", "help": "Folder of a saved memory, from which every request starts."},
    "max_tokens": {
        "type": click.IntRange(min=1),
        "metavar": "N",
        "help": "Most tokens of an answer. By default 4,096, or the model's length of context where that is larger.",
    },
    "slots": {
        "type": click.IntRange(min=1),
        "metavar": "N",
        "default": 16,
        "help": "Requests that are answered at once by a model with a memory, as rows of one batch; others wait.",
    },
    "snapshots": {
        "type": click.IntRange(min=0),
        "metavar": "N",
        "default": 64,
        "help": "Snapshots of read texts that are kept in memory for each model; 0 for none.",
    },
    "snapshot_folder": {
        "type": click.Path(file_okay=False, path_type=Path),
        "metavar": "DIR",
        "help": "Folder for snapshots that have no place in memory, 16 times as many. They are removed at the end.",
    },
}


def extend(command: click.Command) -> None:
    """Adds the options and the checks to the command `serve`."""
    serve = command.callback

    def serve_with(memory: str | None, snapshot_folder: Path | None, **options) -> object:
        check_options(options["force_model"], memory, options["compile"])
        own = {name: options.pop(name) for name in ("max_tokens", "slots", "snapshots")}
        if snapshot_folder is not None:
            snapshot_folder.mkdir(parents=True, exist_ok=True)
            snapshot_folder = tempfile.mkdtemp(prefix="server-", dir=snapshot_folder)
        replace_parts(ServerOptions(**own, memory=memory, snapshot_folder=snapshot_folder))
        return serve(**options)

    command.params += [click.Option([f"--{name}"], show_default=True, **facts) for name, facts in OPTIONS.items()]
    command.callback = serve_with


def check_options(model: str | None, memory: str | None, compiles: bool) -> None:
    """Raises ValueError for a MODEL with a bad configuration or damaged weights, and for a memory without MODEL."""
    if memory is not None and model is None:
        raise ValueError(f"--memory {memory} needs MODEL: the checkpoint that made it")
    if memory is not None and compiles:
        raise ValueError(f"--memory {memory} cannot be used with --compile")
    if model is not None:
        check_checkpoint(model, "MODEL")


def replace_parts(options: ServerOptions) -> None:
    """Puts our parts in the places of those of the server."""

    class Models(model_manager.ModelManager):
        def _load_model(self, *args, **kwargs) -> PreTrainedModel:
            model = super()._load_model(*args, **kwargs)
            model.served = ServedModel(model, options)
            if options.snapshots and (size := model.served.bytes_of_snapshot()):
                total = options.snapshots * size / 1e9
                print(f"Snapshots: up to {options.snapshots} of {size / 1e6:,.1f} MB, {total:,.2f} GB", flush=True)
            return model

        def _load_processor(self, name: str, **kwargs) -> object:
            config = AutoConfig.from_pretrained(name) if Path(name).is_dir() else None
            base = getattr(config, "base_model_name_or_path", None)  # of an adapter of `remember`
            is_own = not base or (Path(name) / "tokenizer_config.json").is_file()
            return super()._load_processor(name if is_own else base, **kwargs)

        def shutdown(self) -> None:
            super().shutdown()
            if options.snapshot_folder is not None:
                shutil.rmtree(options.snapshot_folder, ignore_errors=True)

    model_manager.ModelManager = Models
    TitansGenerateManager.options = options
    utils.GenerateManager = TitansGenerateManager
    utils.set_torch_seed = lambda seed: None  # each request has random numbers of its own
    build = server.build_server
    server.build_server = lambda *args, **kwargs: check_requests(build(*args, **kwargs))
    uvicorn.Config = functools.partial(uvicorn.Config, timeout_graceful_shutdown=SECONDS_TO_END)
    # The server then ends by the signal itself, as after SIGTERM: collecting Python's garbage would take seconds.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
