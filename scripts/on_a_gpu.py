"""All that is asked of a GPU in one command: parts by other commands, a process each.

A part that fails, or takes longer than --seconds, says why, and the next part begins. --output has a line of every
part, with the end of what it printed, and the rows of the part itself. Each line is written at once. In this order:

"""

import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator

from transformers.utils.import_utils import is_flash_linear_attention_available

from eval.common.records import append_record, describe_commit

FORMS = {
    "titans": ("torch", "compiled", "cuda-graphs", "triton"),
    "delta": ("torch", "compiled", "cuda-graphs", "triton", "fla", "gated-deltanet"),
}
FULL = {  # the options that differ in the smallest form, by command
    "memory": "--lengths 4096 32768 --heads 16 --batch_size 4 --repeats 3 --dtype bfloat16",
    "models": "--lengths 2048 8192 32768 --repeats 2 --dtype bfloat16 --size 170m",
    "decode": "--contexts 1024 16384 --dtype bfloat16 --size 170m",
    "remember": "--contexts 32768 131072 --dtype bfloat16 --size 1b",
}
SMALLEST = {
    "memory": "--lengths 64 --heads 1 --batch_size 1 --repeats 1",
    "models": "--lengths 32 --repeats 1 --size tiny",
    "decode": "--contexts 32 --steps 1 --size tiny",
    "remember": "--contexts 64 --tokens 32 --pieces 32 --window 16 --steps 1 --size tiny",
}
TESTS = ["-m", "pytest", "-m", "gpu", "-rs", "-s", "tests/model/test_gpu.py"]
LAST_LINES = 12  # of what a part printed, in its line of --output


def parts(options: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yields the name of each part and the arguments of `scripts.bench`; none for the tests."""
    yield "test-gpu", []
    for form, programs in FORMS.items():
        for program in programs:
            command = f"memory {options['memory']} --program {program} --set memory_form={form}"
            yield f"memory-{form}-{program}", command.split()
    others = ["llama"] + ["gated-deltanet"] * is_flash_linear_attention_available()
    for benchmark in ("models", "decode"):
        models = f"{benchmark} {options[benchmark]} --models"
        yield f"{benchmark}-others", [*models.split(), *others[: None if benchmark == "models" else 1]]
        for form in FORMS:
            yield f"{benchmark}-{form}", f"{models} mag lmm --set memory_form={form}".split()
        kernel = "memory_form=titans memory_kernel=triton"
        yield f"{benchmark}-titans-triton", f"{models} mag lmm --set {kernel}".split()
    for name in ("llama", "qwen3"):
        yield f"remember-{name}", f"remember {options['remember']} --models {name}".split()


NAMES = [name for name, _ in parts(FULL)]
__doc__ += "\n".join(NAMES)


def run_parts(args: Namespace) -> None:
    """Runs the parts that --parts names. If one fails, the exit status is 1 at the end."""
    failed, rows = [], ["--device", str(args.device), *(["--output", str(args.output)] if args.output else [])]
    for name, command in parts(SMALLEST if args.smallest else FULL):
        if name not in args.parts:
            continue
        command = ["-m", "scripts.bench", *command, *rows] if command else TESTS
        print(f"\n{name}: python {' '.join(command)}", flush=True)
        start, pipe = time.perf_counter(), {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            ended = subprocess.run([sys.executable, *command], timeout=args.seconds, check=False, **pipe)
            status, printed = ended.returncode, ended.stdout
        except subprocess.TimeoutExpired as error:
            status, printed = f"longer than {args.seconds} seconds", error.stdout or b""
        text = printed.decode(errors="replace").strip()
        print(text, flush=True)
        failed += [name] if status else []
        if args.output:
            last = text.splitlines()[-LAST_LINES:]
            record = {"benchmark": "gpu", "part": name, "status": status, "seconds": time.perf_counter() - start}
            append_record(record | {"printed": last, "commit": describe_commit()}, args.output)
    if failed:
        raise SystemExit(f"These parts failed: {', '.join(failed)}.")
