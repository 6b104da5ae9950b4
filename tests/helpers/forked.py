"""Runs Python programs in forks of a process that has imported what they import, which takes each of them four seconds.

The environment and the caches that packages read while they are imported are those of the process that forks.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

IMPORTED = ("titans_hf.cli.train", "titans_hf.cli.read", "transformers.generation", "eval.common.harness")


@contextmanager
def forking(environment: dict[str, str]) -> Iterator[str]:
    """Runs the process that forks; yields the address that `run_forked` takes. Its programs end with it."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            # As a text, so that the import path begins with the folder of each fork, as Python has it with -m and -c
            text = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
            start = [sys.executable, "-c", text, str(listener.fileno())]
            own = {"pass_fds": [listener.fileno()], "process_group": 0, "env": environment}
            process = subprocess.Popen(start, stdin=subprocess.DEVNULL, **own)
        try:
            yield address
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_forked(
    address: str,
    arguments: list[str],
    folder: Path,
    environment: dict[str, str],
    files: tuple[int, int, int] = (0, 1, 2),
) -> int:
    """Runs `python -m MODULE ...` or `python -c TEXT`, given without `python`, in `folder`; returns its exit status.

    files: descriptors of standard input, output and error.
    """
    program = {"arguments": arguments, "folder": str(folder), "environment": environment}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"."], files)
        connection.sendall(json.dumps(program).encode())
        connection.shutdown(socket.SHUT_WR)
        return int(connection.makefile().read() or 1)  # nothing where the process that forks was killed


def main() -> None:
    for name in IMPORTED:
        import_module(name)
    listener, caller = socket.socket(fileno=int(sys.argv[1])), os.getppid()
    listener.settimeout(5)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while os.getppid() == caller:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        if not os.fork():
            break
        connection.close()
    else:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    program = json.load(connection.makefile())
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(str(status).encode())
        os._exit(0)
    connection.close()
    listener.close()
    for target, source in enumerate(files):
        os.dup2(source, target)
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    option, text, *arguments = program["arguments"]
    sys.argv = [option, *arguments]
    if option == "-m":
        runpy.run_module(text, run_name="__main__", alter_sys=True)
    else:
        exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
