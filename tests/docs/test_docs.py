"""README and docs: links have a target, and commands and Python blocks run unchanged."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from byte_model import save_byte_model, save_llama
from covering import in_one_test
from eval_common import BOOK, make_data
from series_files import write_series

import titans_hf

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "eval" / "README.md"]
PAGES += sorted((ROOT / "src" / "titans_hf" / "checkpoints").glob("*/README.md"))
LOG = ROOT / "docs" / "dev" / "log.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What the commands write or is transformers' own, and so is no file of the project.
WRITTEN = {"run.json", "trainer_state.json", "losses.png", "config.json", "my_text.txt"}
WRITTEN |= {"generation/test_utils.py", "exporters/test_export.py"}
# Packages that the development environment does not have: their blocks run where they are installed.
OPTIONAL = {"from torchao": "torchao", "BitsAndBytesConfig": "bitsandbytes"}
# What makes a command short, by how it begins; the first entry that fits counts. None: the command is not run, since it
# needs the network, a GPU, other machines or minutes, or is a server, which tests/cli/test_serve.py asks.
OPTIONS = {
    **dict.fromkeys(("git", "pip", "hf", "make", "curl", "accelerate", "python -m pytest", "python -m build")),
    "titans-hf train .*fineweb": None,
    **dict.fromkeys(("titans-hf serve", "transformers chat", "titans-hf lm-eval run .*--metadata")),
    ".*--tasks lambada": None,
    **dict.fromkeys(("python -m scripts.bench gpu --output", "python -m scripts.bench decode --compile")),
    "python -m eval.pages": None,  # writes the pages of the checkout; tests/eval/test_pages.py compares them
    "python -m scripts.bench (memory|gpu)": "",
    "python -m scripts.bench models": "--lengths 32 --size tiny --repeats 1",
    "python -m scripts.bench decode": "--contexts 32 --steps 2 --size tiny",
    "titans-hf train": "--max_steps 2 --use_cpu true",
    "trl sft": "--max_steps 2 --report_to none",
    "titans-hf ask": "--max_new_tokens 4",
    "titans-hf lm-eval": "--limit 1 --device cpu",
    "titans-hf": "",
    "python -m eval.forecasting.run": "--split 0.8 0.3 0.2 --look_back 48 --horizons 8 --models titans --seeds 0 "
    "--max_steps 2 --eval_steps 1",
    "python -m eval.dna.run": "--models mag-off cnn --parameters 4000 --hidden_size 16 --num_hidden_layers 1 --folds 2 "
    "--epochs 1 --learning_rates 1e-2",
    "python -m eval.needles": "--models lmm --steps 1 --questions 1",
    "python -m eval.tables runs/dna": "--baselines cnn",
    "python -m eval.tables": "",
    "python -m eval.streaming .*--task ruler": "--number 1 --window 100",
    "python -m eval.streaming .*--text": "--number 1 --lengths 80 --window 100",
    "python -m eval.streaming": "",
}
STARTS = {"python": "", "titans-hf": "-m titans_hf", "trl": "-m trl.cli.main"}
PROGRAMS = {x.split()[0] for x in OPTIONS if not x.startswith(".")}


class Block(NamedTuple):
    """A fenced block, or the code of a notebook: its page, the line that it starts in, its language, its text, and the
    block without a language that follows at once, which is what it prints.
    """

    page: Path
    line: int
    language: str
    text: str
    printed: str = ""


BLOCKS = [
    Block(page, text[: match.start()].count("\n") + 1, match[1], match[2], printed[1] if printed else "")
    for page in PAGES
    for text in [page.read_text(encoding="utf-8")]
    for match in FENCE.finditer(text)
    for printed in [re.match(r"\n\n```\n(.*?)^```$", text[match.end() :], re.MULTILINE | re.DOTALL)]
]
for page in sorted((ROOT / "examples").glob("*.ipynb")):
    cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    BLOCKS.append(Block(page, 1, "python", code))


def program_of(text: str) -> str:
    """Returns the commands of a bash block that are run, each with what makes it short, and all other lines."""
    lines = []
    for line in re.sub(r" *\\\n *", " ", text).splitlines():
        name, *_ = [*line.split(), ""]
        if name in PROGRAMS:
            more, rest = next(OPTIONS[x] for x in OPTIONS if re.match(x, line)), line.partition(" #")[0]
            line = "" if more is None else f"{sys.executable} {STARTS.get(name)}{rest.removeprefix(name)} {more}"
        lines.append(line)
    return "\n".join(lines)


def each(language: str) -> list:
    """Makes a slow test of each block of which something is run, a long one of those with a table's commands."""
    found = {f"{x.page.relative_to(ROOT)}:{x.line}": x for x in BLOCKS if x.language == language}
    found = {name: x for name, x in found.items() if language != "bash" or sys.executable in program_of(x.text)}
    found = {name: x for name, x in found.items() if "OpenAI(" not in x.text}  # tests/cli/test_serve.py asks a server
    mark = lambda x: pytest.mark.long if x.page.name in ("results.md", "speed.md") else pytest.mark.slow  # noqa: E731
    return [pytest.param(x, id=name, marks=mark(x)) for name, x in found.items()]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@in_one_test("page", PAGES)
def test_links_lead_somewhere(page):
    """Every relative link has a file and a heading as its target."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}: {sorted(anchors(file))}"


@in_one_test("page", sorted({*PAGES} - {LOG, ROOT / "CHANGELOG.md"}))  # which tell the past, and may name what is gone
def test_named_files_exist(page):
    """Every file that a page names is in the project."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    names, text = {Path(path).name for path in tracked}, page.read_text(encoding="utf-8")
    for name in {*re.findall(r"`([\w/.-]+\.(?:py|json|md|png))`", text)} - WRITTEN:
        assert (ROOT / name).exists() or (page.parent / name).exists() or name in names, f"{page.name}: {name}"
    for path in re.findall(r"\b(?:scripts|eval|tests|src)/[\w/.$*-]*[\w$*]", text):
        assert re.search(r"[$*]", path) or (ROOT / path).exists(), f"{page.name}: {path}"


def test_an_entry_of_the_log_is_short():
    """An entry has a heading of at most 80 characters, at most 60 words, and the commit in which it stands whole."""
    log = LOG.read_text(encoding="utf-8")
    for entry in re.split(r"^### ", log, flags=re.MULTILINE)[1:]:
        heading, text = entry.split("\n## ")[0].split("\n", 1)
        *words, commit = text.split()
        assert len(heading) <= 80 and len(words) <= 60 and re.fullmatch(r"`[0-9a-f]{7,}`", commit), heading


def test_the_api_page_has_every_public_name():
    """docs/api.md renders the docstring of every public name, and of no other name."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"<!-- auto\w+: titans_hf\.(\w+) -->", page)) == sorted(titans_hf.__all__)


def test_blocks_are_of_languages_that_are_run():
    """Every fenced block is of a language that a test runs, and no command is indented."""
    assert {block.language for block in BLOCKS} <= {"bash", "python", "bibtex", ""}
    for page in PAGES:  # code that is indented instead of fenced is an equation, never a command
        assert not re.findall(r"^    (?:python|titans-hf|pip|make|torchrun|git) .*$", prose(page), re.MULTILINE)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A folder like a checkout, with what the pages presuppose: texts, data, and the models of earlier pages."""
    folder = tmp_path_factory.mktemp("stage")
    for name in ("checkpoints", "src", "scripts", "eval", "tests"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("titans", "examples"):
        (folder / name).mkdir()
    data = make_data(folder / "data")
    for name in ("data/books/train", "data/books/valid", "my_texts", "books", "data/ett", "my_chats"):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(BOOK) if "chats" not in name else None
    for name in ("notes.txt", "my_text.txt"):
        (folder / name).write_text(BOOK[:300] if name == "notes.txt" else BOOK)
    for name in ("data/ett/ETTh1.csv", "my_series.csv"):
        write_series(folder / name, rows=1000)
    (data / "dna" / "human_nontata_promoters").mkdir(parents=True)
    rows = [f"{''.join(random.choices('ACGT', k=80))}\t{i % 2}" for i in range(60)]
    (data / "dna" / "human_nontata_promoters" / "test.tsv").write_text("\n".join(["seq\tlabel", *rows, ""]))
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody."}]
    (folder / "my_chats" / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 32)
    smol = folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    save_llama(smol, max_position_embeddings=8192, hidden_size=64)
    for name in ("runs/first", "runs/tuned", "runs/chat", "you/your-model"):
        save_byte_model(folder / name, "mag")
    for model in (smol, folder / "runs" / "chat"):
        shutil.copy(ROOT / "src" / "titans_hf" / "cli" / "configs" / "chat_template.jinja", model)
    return folder


@pytest.fixture
def workplace(stage, tmp_path):
    """A copy of the stage, so that what a block writes stays outside this checkout."""
    return Path(shutil.copytree(stage, tmp_path / "checkout", symlinks=True))


def run(command: list[str], folder: Path, timeout: float) -> str:
    """Runs a block in `folder`, offline, with caches of its own; returns what it printed."""
    own = {"HF_HOME": str(folder.parent / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    own["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # titans-hf within a line or a program
    options = dict(cwd=folder, env=os.environ | own, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    done = subprocess.run(command, timeout=timeout, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", each("bash"))
def test_commands_run(block, workplace):
    """A bash block runs unchanged but for tiny options."""
    # What the block makes is not there yet: it would be a reader's second run otherwise.
    for trained in re.findall(r"(?:--output_dir|titans-hf merge \S+) (\S+)", block.text):
        shutil.rmtree(workplace / trained, ignore_errors=True)
    run(["bash", "-euc", program_of(block.text)], workplace, 850)


@pytest.mark.parametrize("block", each("python"))
def test_python_runs(block, workplace):
    """A Python block runs alone and unchanged, and prints what the page says unless a model of the stage stands for
    another one; so does the code of a notebook, in the notebook's folder.
    """
    for text, package in OPTIONAL.items():
        if text in block.text:
            pytest.importorskip(package)
    if "torch.cuda" in block.text and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    folder = workplace / "examples" if block.page.suffix == ".ipynb" else workplace
    printed = run([sys.executable, "-c", block.text], folder, 250)
    if not re.search(r"HuggingFaceTB/|runs/", block.text):
        assert block.printed in printed


def test_the_address_stands_in_one_place():
    """Every page and form that has the repository's address has the one of pyproject.toml."""
    (address,) = re.findall(r'^Repository = "(.*)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    host = address.rpartition("/")[0].rpartition("/")[0]
    for page in [*PAGES, ROOT / "pyproject.toml", *(ROOT / ".github").rglob("*.*")]:
        found = re.findall(rf"{host}/[\w.-]+/titans-hf\b", page.read_text(encoding="utf-8"))
        assert {*found} <= {address}, page


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    """Sphinx makes the site out of the pages without a warning: no link is broken, and every name has a docstring."""
    pytest.importorskip("sphinx")
    run([sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(ROOT / "docs"), str(tmp_path)], ROOT, 250)
