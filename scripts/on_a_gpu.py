"""All that is asked of a GPU in one command: parts by other commands, a process each.

First every part runs with short texts, all at once: kernels are compiled and kept on disk, and faults show early. Then
each part runs alone. A part that fails, or takes longer than --seconds, says why. --output has a line of every part,
with the end of what it printed, and the rows of the part itself. Each line is written at once. In this order:

"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from eval.common.records import append_record, describe_commit

TESTS = "-m gpu -rs -s --noconftest -p no:cacheprovider tests/model/test_gpu.py"
MEMORY = "memory --heads 16 --batch_size 4 --repeats 3 --dtype bfloat16 --lengths 4096 32768"
MODELS = "models --repeats 3 --dtype bfloat16 --size 170m --lengths 2048"
TITANS = f"{MODELS} --models mag"
DECODE = "decode --dtype bfloat16 --size 170m --contexts 1024 4096 16384"
REMEMBER = "remember --dtype bfloat16 --contexts 4096 32768 131072 --tokens 2048 --pieces 64 1024 --models"
DELTA, PLAIN = "--set memory_form=delta", "--set memory_kernel=torch"
LONG = "--lengths 32768"
PARTS = {
    "test-gpu": "",
    "memory-plain": f"{MEMORY} --program torch",
    "memory-dplr": f"{MEMORY} --program auto",
    "memory-delta-plain": f"{MEMORY} --program torch {DELTA}",
    "memory-gated-delta": f"{MEMORY} --program auto {DELTA}",
    "memory-gated-deltanet": f"{MEMORY} --program gated-deltanet",
    "models-llama": f"{MODELS} --models llama --batch_size 8",
    "models-plain": f"{TITANS} {PLAIN} --batch_size 8",
    "models-dplr": f"{TITANS} --batch_size 8",
    "models-gated-delta": f"{TITANS} {DELTA} --batch_size 8",
    "models-llama-long": f"{MODELS} --models llama {LONG}",
    "models-plain-long": f"{TITANS} {PLAIN} {LONG}",
    "models-dplr-long": f"{TITANS} {LONG}",
    "models-gated-delta-long": f"{TITANS} {DELTA} {LONG}",
    "models-paper": f"{TITANS} --set memory_form=paper",
    "decode": f"{DECODE} --models llama mag lmm",
    "remember-llama": f"{REMEMBER} llama",
}
__doc__ += "\n".join(PARTS)
# A later option replaces an earlier one: short texts, and the smallest of all for a CPU.
SHORT = {
    "memory": "--lengths 1024 --repeats 1",
    "models": "--lengths 512 --repeats 1",
    "decode": "--contexts 256 --steps 1",
    "remember": "--contexts 256 --tokens 128 --pieces 64 --window 64 --steps 1 --batch_size 1",
}
SMALLEST = {
    "memory": "--lengths 64 --heads 1 --batch_size 1 --repeats 1 --dtype float32",
    "models": "--lengths 32 --repeats 1 --size tiny --dtype float32",
    "decode": "--contexts 32 --steps 1 --size tiny --dtype float32",
    "remember": "--contexts 64 --tokens 32 --pieces 32 --window 16 --steps 1 --size tiny --dtype float32",
}
LAST_LINES = 30  # of what a part printed, in its line of --output


def command_of(part: str, others: dict[str, str]) -> list[str]:
    """Returns the arguments of `scripts.bench` for a part, with other options; none for the tests."""
    command = PARTS[part].split()
    return [*command, *others.get(command[0], "").split()] if command else []


def run_parts(args: Namespace) -> None:
    """Runs the parts that --parts names. If one fails, the exit status is 1 at the end."""
    options, statuses = ["--device", str(args.device)], {}

    def begin(part: str, others: dict[str, str]) -> tuple[str, subprocess.Popen, float]:
        """Starts a part; what it prints is in a file of its name."""
        command = command_of(part, others)
        command = ["scripts.bench", *command, *options] if command else ["pytest", *TESTS.split()]
        with Path(folder, part).open("w") as printed:
            streams = {"stdout": printed, "stderr": subprocess.STDOUT, "process_group": 0}
            return part, subprocess.Popen([sys.executable, "-m", *command], **streams), time.perf_counter()

    def end(part: str, process: subprocess.Popen, start: float, texts: str, seconds: float) -> None:
        """Waits until a part ends, at most some seconds from its start; prints its end, and keeps its status."""
        try:
            status = process.wait(max(0, start + seconds - time.perf_counter()))
        except subprocess.TimeoutExpired:
            status = f"longer than {seconds:g} seconds"
            os.killpg(process.pid, signal.SIGKILL)  # with all that the part has started
            process.wait()
        statuses[part] = status
        about = {"texts": texts, "part": part, "status": status, "seconds": round(time.perf_counter() - start, 1)}
        print(*about.values(), flush=True)
        last = Path(folder, part).read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        print(*(last if status or texts == "full" else ()), "", sep="\n", flush=True)
        if args.output:
            append_record({"benchmark": "gpu"} | about | {"printed": last, "commit": describe_commit()}, args.output)

    with tempfile.TemporaryDirectory() as folder:
        if not args.smallest:
            for running in [begin(part, SHORT) for part in args.parts]:
                end(*running, "short", args.seconds_of_short_texts)
        options += ["--output", str(args.output)] if args.output else []
        for part in args.parts:
            has_failed = isinstance(statuses.get(part), int) and statuses[part] != 0
            if (PARTS[part] or args.smallest) and not has_failed:
                end(*begin(part, SMALLEST if args.smallest else {}), "full", args.seconds)
    if failed := [part for part, status in statuses.items() if status]:
        raise SystemExit(f"These parts failed: {', '.join(failed)}.")
