"""Pages of the documentation, their fenced blocks, and how tests run the commands in them."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

from served import free_port

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "eval" / "README.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its page, the line that it starts in, its language and its text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Returns the fenced blocks of all pages in one of the languages; all blocks if none is given."""
    return [
        Block(page, text[: match.start()].count("\n") + 1, match[1], match[2])
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for match in FENCE.finditer(text)
        if not languages or match[1] in languages
    ]


def notebooks() -> list[Block]:
    """Returns the code of each notebook in examples/, all cells in one block."""
    found = []
    for page in sorted((ROOT / "examples").glob("*.ipynb")):
        cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
        code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        found.append(Block(page, 1, "python", code))
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


class Treatment(NamedTuple):
    """How a test treats commands that match `pattern`: run with `options` added, or not, for the reason `not_run`."""

    pattern: str
    options: str = ""
    not_run: str = ""


NETWORK = "it needs the network"
SHORT_FIT = "--tokens 600 --length 300 --recalls 2"
# The first that matches counts. Options are tiny, and argparse takes the last of those given twice.
TREATMENTS = [
    Treatment(r"git clone .*", not_run=NETWORK),
    Treatment(r"pip install .*", not_run=NETWORK),
    Treatment(r"hf upload .*", not_run=NETWORK),
    Treatment(r"make (demo|test|test-gpu|conformance.*)", not_run="it makes an environment from the package index"),
    Treatment(r"python -m pytest .*", not_run="it is a test itself"),
    Treatment(r"titans-hf serve .*", "--device cpu"),
    Treatment(r"titans-hf chat .*"),
    Treatment(r"curl .*", "--fail --silent --show-error"),
    Treatment(r"python -m scripts.prepare_novels .*", not_run="it needs the clones: tests/eval/test_prepare_novels.py"),
    Treatment(r"python -m scripts.bench titans-pytorch .*", not_run="it needs an environment with titans-pytorch"),
    Treatment(
        r"python -m scripts.bench \w+ .*--compile.*", not_run="compiling takes minutes: tests/model/test_compile.py"
    ),
    Treatment(r"python -m scripts.bench gpu", not_run="it needs a GPU: tests/eval/test_bench.py"),
    Treatment(r"python -m scripts.bench memory .*", "--lengths 32 --chunks 16 --repeats 1"),
    Treatment(r"python -m scripts.bench models .*", "--lengths 32 --depths 1 --size tiny --repeats 1"),
    Treatment(r"python -m scripts.bench decode .*", "--contexts 32 --steps 2 --size tiny"),
    Treatment(r"python -m scripts.bench prompt .*", "--tokens 256 --piece 64 --every 128"),
    Treatment(r"titans-hf train .*|torchrun .* -m titans_hf train .*", "--max_steps 2 --use_cpu true"),
    Treatment(r"trl sft .*", "--max_steps 2 --report_to none"),
    Treatment(r"titans-hf merge .*"),
    Treatment(r"titans-hf convert .* --fit .*", f"--no-speed {SHORT_FIT}"),
    Treatment(r"titans-hf convert .* --memory_layers .*", "--no-speed --memory_layers 1"),
    Treatment(r"titans-hf fit-memory .*", SHORT_FIT),
    Treatment(r"accelerate launch .*", not_run="it needs the machines: tests/model/test_accelerate_configs.py"),
    Treatment(r"titans-hf (read|surprise) .*"),
    Treatment(r"titans-hf ask .*", "--max_new_tokens 4"),
    Treatment(r"titans-hf forecast (?!.*--model ).*", "--max_steps 2 --eval_steps 1"),
    Treatment(r"titans-hf forecast .*"),
    Treatment(
        r"python -m eval.forecasting.run .*",
        "--split 0.6 0.2 0.2 --look_back 48 --horizons 8 --models titans --seeds 0 --max_steps 2 --eval_steps 1",
    ),
    Treatment(
        r"python -m eval.dna.run .*",
        "--models mag-off cnn --parameters 4000 --hidden_size 16 --num_hidden_layers 1 --folds 2 --epochs 1 "
        "--learning_rates 1e-2",
    ),
    Treatment(r"python -m eval.tables runs/dna .*", "--baselines cnn"),
    Treatment(r"python -m eval.tables .*"),
    Treatment(r"titans-hf lm-eval .* --include_path .*", "--limit 1 --device cpu"),
    Treatment(r"titans-hf lm-eval .*", not_run=NETWORK),
    Treatment(r"python -m eval.needles.passkey .*", "--number 64 --length 600"),
    Treatment(r"python -m eval.needles.run .*", "--limit 1 --lengths 1024"),
    Treatment(r"python -m eval.studies.loss_by_position .*", "--length 512 --stretches 1"),
    Treatment(r"python -m eval.studies.merged_memories .*", "--numbers 2 --fillers 16"),
    Treatment(r"python -m eval.streaming .* --text .*", "--tokens 300 --choice_tokens 80 --window 32 --lengths 80"),
    Treatment(r"python -m eval.streaming .*"),
    Treatment(
        r"python -m eval.studies.(in_context_regression|recalled_facts|state_tracking) .*", "--steps 2 --batch_size 1"
    ),
    Treatment(r"python -m eval.language.train_and_score .* --graph .*", not_run="a CUDA graph needs a GPU"),
    Treatment(
        r"python -m eval.language.counted .*",
        "--vocab_size 300 --block_length 32 --blocks 20 --score_length 64 --stretches 1",
    ),
    Treatment(r"python -m eval.language.compare_runs .*"),
]
PROGRAMS = ("python", "titans-hf", "torchrun", "pip", "git", "make", "hf", "curl", "lm_eval", "trl", "accelerate")


def treatment(command: str) -> Treatment | None:
    """Returns the first treatment whose pattern matches the whole command."""
    return next((known for known in TREATMENTS if re.fullmatch(known.pattern, command)), None)


def run_bash(block: Block, folder: Path, programs: Path, environment: dict[str, str], timeout: float):
    """Runs the block by bash in `folder` with only the stand-ins of `programs` and /usr/bin on PATH; returns the
    finished process and the commands it called. A server that the block starts ends with it.
    """
    log, server = folder / "called.txt", folder / "server.pid"
    log.write_text("")
    own = {"PATH": f"{programs}:/usr/bin:/bin", "CALLED": str(log), "SERVER": str(server), "PORT": str(free_port())}
    try:
        ran = subprocess.run(
            ["bash", "-euc", block.text],
            cwd=folder,
            env=environment | own,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    finally:
        if server.exists():
            os.kill(int(server.read_text()), signal.SIGTERM)
    return ran, log.read_text().splitlines()
