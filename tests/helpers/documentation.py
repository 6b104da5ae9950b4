"""Pages of the documentation, their fenced blocks, and how tests run the commands in them."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

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


# Options that make a command short, by words that it has; the last entry that fits counts. None: the command is not
# run, since it needs the network, a GPU, other machines or minutes.
OPTIONS = {
    "git clone": None,
    "pip install": None,
    "hf upload": None,
    "make": None,
    "python -m pytest": None,
    "accelerate launch": None,
    "curl": "--fail --silent --show-error",
    "python -m scripts.prepare_novels": None,
    "python -m scripts.bench gpu": None,
    "python -m scripts.bench memory": "--lengths 32 --chunks 16 --repeats 1",
    "python -m scripts.bench models": "--lengths 32 --depths 1 --size tiny --repeats 1",
    "python -m scripts.bench decode": "--contexts 32 --steps 2 --size tiny",
    "python -m scripts.bench prompt": "--tokens 256 --piece 64 --every 128",
    "python -m scripts.bench --compile": None,
    "titans-hf serve": "--device cpu",
    "python -m scripts.served_turns": None,
    "titans-hf chat": "",
    "titans-hf train": "--max_steps 2 --use_cpu true",
    "torchrun titans_hf train": "--max_steps 2 --use_cpu true",
    "trl sft": "--max_steps 2 --report_to none",
    "titans-hf merge": "",
    "titans-hf fit": "--tokens 600 --length 300 --recalls 2 --window 64",
    "titans-hf read": "",
    "titans-hf surprise": "",
    "titans-hf ask": "--max_new_tokens 4",
    "titans-hf forecast": "--max_steps 2 --eval_steps 1",
    "titans-hf forecast --model": "",
    "titans-hf lm-eval": None,
    "titans-hf lm-eval --include_path": "--limit 1 --device cpu",
    "python -m eval.forecasting.run": "--split 0.6 0.2 0.2 --look_back 48 --horizons 8 --models titans --seeds 0 "
    "--max_steps 2 --eval_steps 1",
    "python -m eval.dna.run": "--models mag-off cnn --parameters 4000 --hidden_size 16 --num_hidden_layers 1 --folds 2 "
    "--epochs 1 --learning_rates 1e-2",
    "python -m eval.tables": "",
    "python -m eval.tables runs/dna": "--baselines cnn",
    "python -m eval.streaming": "",
    "python -m eval.streaming --text": "--tokens 300 --choice_tokens 80 --window 32 --lengths 80",
    "python -m eval.needles.passkey": "--number 64 --length 600",
    "python -m eval.needles.run": "--limit 1 --lengths 1024",
    "python -m eval.studies.loss_by_position": "--length 512 --stretches 1",
    "python -m eval.studies.in_context_regression": "--steps 2 --batch_size 1",
    "python -m eval.studies.recalled_facts": "--steps 2 --batch_size 1",
    "python -m eval.studies.state_tracking": "--steps 2 --batch_size 1",
    "python -m eval.language.train_and_score --graph": None,
    "python -m eval.language.counted": "--vocab_size 300 --block_length 32 --blocks 20 --score_length 64 --stretches 1",
    "python -m eval.language.compare_runs": "",
}
PROGRAMS = ("python", "titans-hf", "torchrun", "pip", "git", "make", "hf", "curl", "lm_eval", "trl", "accelerate")


def short_options(command: str) -> str | None:
    """Returns the options that make a command short; None if it is not run. Raises KeyError for an unknown command."""
    words = set(command.split())
    for known in reversed(OPTIONS):
        if words.issuperset(known.split()):
            return OPTIONS[known]
    raise KeyError(command)


def run_bash(block: Block, folder: Path, programs: Path, environment: dict[str, str], timeout: float):
    """Runs the block by bash in `folder` with only the stand-ins of `programs` and /usr/bin on PATH; returns the
    finished process and the commands it called. A server that the block starts ends with it.
    """
    from served import free_port  # it imports torch, and each command of a page starts a process that imports this file

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
