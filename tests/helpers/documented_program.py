"""Stands in for a program that a page calls: runs it with short options, or not at all. It has the program's
name on the PATH of `documentation.run_bash`.

A page's server, which a reader leaves running in a terminal, runs in the background on a free port.
"""

import os
import subprocess
import sys
from pathlib import Path

import documentation

MODULES = {"titans-hf": "titans_hf", "torchrun": "torch.distributed.run", "lm_eval": "lm_eval", "trl": "trl.cli.main"}
PAGES_PORT = "localhost:8000"
TYPED = "Who is there?\n!exit\n!exit\n"  # into a chat; the first !exit may answer whether to continue a long answer


def main(program: str, arguments: list[str]) -> int:
    command = " ".join([program, *arguments])
    with open(os.environ["CALLED"], "a") as log:
        log.write(command.replace("\n", " ") + "\n")
    short = documentation.short_options(command)
    if short is None:
        return 0
    starts = {"python": [sys.executable], "curl": ["/usr/bin/curl"]}
    start = starts[program] if program in starts else [sys.executable, "-m", MODULES[program]]
    environment = os.environ | {"PATH": "/usr/bin:/bin"}  # what the program itself calls is no matter of the page
    arguments = [*arguments, *short.split()]
    if command.startswith("titans-hf serve"):
        return serve([*start, *arguments], environment)
    if PAGES_PORT in command:
        if not Path(os.environ["SERVER"]).exists():  # another block of the page has started it
            serve([sys.executable, "-m", "titans_hf", "serve", "--device", "cpu"], environment)
        environment.pop("HF_HUB_OFFLINE", None)  # with it, huggingface_hub's client, which chats, asks no server at all
        arguments = [argument.replace(PAGES_PORT, f"localhost:{os.environ['PORT']}") for argument in arguments]
    return subprocess.run([*start, *arguments], env=environment, input=TYPED, text=True).returncode


def serve(command: list[str], environment: dict[str, str]) -> int:
    """Starts a server, and returns once it answers. Raises AssertionError with its output if it ends before."""
    from served import wait_for  # it imports torch

    log = Path(os.environ["SERVER"]).with_suffix(".log")
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--port", os.environ["PORT"]], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    Path(os.environ["SERVER"]).write_text(str(server.pid))
    wait_for(f"http://localhost:{os.environ['PORT']}", server, log)
    return 0


if __name__ == "__main__":
    sys.exit(main(os.path.basename(sys.argv[1]), sys.argv[2:]))
