"""Runs a command so that bad input ends in one line on standard error."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

DEBUG = "TITANS_HF_DEBUG"


def run_command(main: Callable[[], object]) -> None:
    """Calls `main`, and turns its error into `<command>: error: <message>` with exit status 2.

    Caught are ValueError, OSError and missing packages. With the environment variable TITANS_HF_DEBUG=1 the traceback
    is shown instead. Ctrl-C exits with status 130.
    """
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if os.environ.get(DEBUG, "0") not in ("", "0"):
            raise
        print(f"{Path(sys.argv[0]).name}: error: {message_of(error)}", file=sys.stderr)
        raise SystemExit(2) from error


def message_of(error: Exception) -> str:
    """Returns the error's message on one line; the name of its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
