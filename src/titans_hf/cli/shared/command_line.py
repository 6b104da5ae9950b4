"""Runs a command so that bad input ends in one line on standard error."""

import os
import sys
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path

DEBUG = "TITANS_HF_DEBUG"
LINE_SECONDS = 60  # between two lines of a progress bar in a log file


def quieten_progress() -> None:
    """Turns off Transformers' bars of loading and writing weights. If standard error is not a terminal but a log file,
    every other bar of tqdm, of all packages, becomes a line a minute.
    """
    from tqdm import tqdm
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if not sys.stderr.isatty():
        tqdm.__init__ = partialmethod(
            tqdm.__init__, **dict.fromkeys(("mininterval", "maxinterval", "delay"), LINE_SECONDS)
        )
        tqdm.status_printer = staticmethod(lambda file: lambda text: text and print(text, file=file, flush=True))


def run_command(main: Callable[[], object]) -> None:
    """Calls `main`, and turns its error into `<command>: error: <message>` with exit status 2.

    Caught are ValueError, OSError, bad fields of a config, damaged weights and missing packages. With the environment
    variable TITANS_HF_DEBUG=1 the traceback is shown instead. Ctrl-C exits with status 130.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    quieten_progress()
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ValueError, OSError, StrictDataclassError, SafetensorError, ModuleNotFoundError) as error:
        if os.environ.get(DEBUG, "0") not in ("", "0"):
            raise
        print(f"{Path(sys.argv[0]).name}: error: {message_of(error)}", file=sys.stderr)
        raise SystemExit(2) from error


def message_of(error: Exception) -> str:
    """Returns the error's message on one line; the name of its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
