"""README and docs: links have a target, and commands and Python blocks run unchanged."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import documentation
import pytest
from byte_model import save_byte_model, save_llama
from covering import in_one_test
from dna_files import write_fasta, write_table
from documentation import PAGES, ROOT, anchors, blocks, notebooks, prose, run_bash, short_options
from eval_common import BOOK, make_data
from series_files import write_series
from transformers import AutoConfig, AutoModelForCausalLM

from scripts import api_page
from titans_hf.cli import demo
from titans_hf.cli.training.tokenizer import byte_tokenizer

BASH, PYTHON = blocks("bash"), [*blocks("python"), *notebooks()]
VARIANTS = ("mac", "mag", "mal", "lmm")
# What the commands write or is transformers' own, and so is no file of the project.
WRITTEN = {
    "forecast.png",
    "series.json",
    "run.json",
    "trainer_state.json",
    "memory.json",
    "table.md",
    "build/conformance/table.md",
    "generation/test_utils.py",
    "exporters/test_export.py",
}
# Packages that the development environment does not have: their blocks run where they are installed. Where torchao
# 0.18 is, every import of transformers imports it too, which prints four lines on stderr.
OPTIONAL = {"from torchao": "torchao", "BitsAndBytesConfig": "bitsandbytes"}
# A page about the past may name what is gone.
HISTORY = {ROOT / "docs" / "dev" / "log.md"}


def each(found: list, long_pages: tuple[str, ...] = ()) -> list:
    """Makes a slow test of each block, a long one on a page in `long_pages`."""
    marks = {True: pytest.mark.long, False: pytest.mark.slow}
    return [pytest.param(block, id=block.name, marks=marks[block.page.name in long_pages]) for block in found]


def test_what_the_pages_write_is_ignored():
    """Git ignores the folders that README's and the docs' commands write."""
    folders = ("my-memory", "look", "data", "to_look_at", "runs", "results", "my_dna", "my_texts", "books")
    paths = [f"{folder}/a.txt" for folder in folders]
    git = ["git", "-C", str(ROOT), "check-ignore", "--no-index", *paths]
    assert subprocess.run(git, capture_output=True, text=True, check=False).stdout.split() == paths


@in_one_test("page", PAGES)
def test_links_lead_somewhere(page):
    """Every relative link has a file and a heading as its target."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name} links to {target}: {sorted(anchors(file))}"


@in_one_test("page", sorted({*PAGES} - HISTORY))
def test_named_files_exist(page):
    """Every file that a page names is in the project."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    names = {Path(path).name for path in tracked}
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`([\w/.-]+\.(?:py|json|md|png))`", text):
        if name not in WRITTEN:
            assert (ROOT / name).exists() or (page.parent / name).exists() or name in names, f"{page.name}: {name}"
    for path in re.findall(r"\b(?:scripts|eval|tests|src)/[\w/.$*-]*[\w$*]", text):
        if not re.search(r"[$*]", path):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_the_log_is_short():
    """An entry of the log has a heading of at most 80 characters, at most 60 words, and the commit in which it stands
    whole; the log has at most 12,000 words.
    """
    log = (ROOT / "docs" / "dev" / "log.md").read_text(encoding="utf-8")
    assert len(log.split()) <= 12_000
    for entry in re.split(r"^### ", log, flags=re.MULTILINE)[1:]:
        heading, text = entry.split("\n## ")[0].split("\n", 1)
        *words, commit = text.split()
        assert len(heading) <= 80 and len(words) <= 60 and re.fullmatch(r"`[0-9a-f]{7,}`", commit), heading


def test_the_api_page_is_of_these_docstrings():
    """docs/api.md is what `python -m scripts.api_page` prints."""
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == api_page.page(), "run it again"


def test_blocks_are_of_languages_that_are_run():
    """Every fenced block is of a language that a test runs, and no command is indented."""
    assert {block.language for block in blocks()} <= {"bash", "python", "bibtex", ""}
    for page in PAGES:  # code that is indented instead of fenced is an equation, never a command
        assert not re.findall(r"^    (?:python|titans-hf|pip|make|torchrun|git) .*$", prose(page), re.MULTILINE)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder of stand-ins for all programs that the documentation calls."""
    folder = tmp_path_factory.mktemp("programs")
    worker = Path(documentation.__file__).with_name("documented_program.py")
    for name in documentation.PROGRAMS:
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{worker}" "$0" "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def new_workplace(folder: Path) -> Path:
    """Makes `folder` look like a checkout to a block: the code is linked, and what a block writes stays outside this
    one.
    """
    for name in ("docs", "runs", "titans"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("checkpoints", "src", "scripts", "eval", "tests"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A folder with what the pages presuppose: texts, data, and the models that earlier pages have trained."""
    folder = tmp_path_factory.mktemp("stage")
    data = make_data(folder / "data")
    for split in ("train", "valid"):
        (data / "books" / split).mkdir()
        (data / "books" / split / "a.txt").write_text(BOOK)
    (data / "ett").mkdir()
    for name in ("ETTh1", "ETTh2"):
        write_series(data / "ett" / f"{name}.csv", rows=1000)
    write_series(folder / "my_series.csv", rows=1000)
    for name in ("human_nontata_promoters", "human_enhancers_cohn"):
        (data / "dna" / name).mkdir(parents=True)
        write_table(data / "dna" / name / "test.tsv", length=80)
    (folder / "my_dna").mkdir()
    write_fasta(folder / "my_dna", length=80)
    write_table(folder / "my_dna" / "test.csv", number=10, length=80, seed=1)
    for name in ("my_texts", "books"):
        (folder / name).mkdir()
        (folder / name / "a.txt").write_text(BOOK)
    for name in ("notes.txt", "chapter.txt"):
        (folder / name).write_text(BOOK[:300])
    (folder / "DATA").symlink_to("data")
    (folder / "my_chats").mkdir()
    (folder / "my_chats" / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody."}]}\n' * 32
    )
    for variant in VARIANTS:
        save_byte_model(folder / "runs" / f"tiny-{variant}", variant)
    sizes = dict(max_position_embeddings=8192, hidden_size=64)
    save_llama(folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct", **sizes)
    for name in ("mistral", "llama"):
        config = AutoConfig.from_pretrained(ROOT / "src" / "titans_hf" / "cli" / "configs" / f"tiny-{name}.json")
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "runs" / f"tiny-{name}")
        byte_tokenizer().save_pretrained(folder / "runs" / f"tiny-{name}")
    save_byte_model(folder / "runs" / "passkey-lmm", "lmm")
    demo_model = folder / "runs" / "demo" / "titans-lmm"
    AutoModelForCausalLM.from_config(demo.make_configs("lmm")["Titans LMM"]).save_pretrained(demo_model)
    demo.make_tokenizer().save_pretrained(demo_model)
    for name in ("runs/novels-chat", "you/your-model"):
        save_byte_model(folder / name, "mag")
    template = ROOT / "src" / "titans_hf" / "cli" / "configs" / "chat_template.jinja"
    shutil.copy(template, folder / "runs" / "novels-chat")
    return folder


@pytest.fixture
def workplace(stage, tmp_path):
    """A copy of the stage in a folder like a checkout."""
    return new_workplace(Path(shutil.copytree(stage, tmp_path / "checkout", symlinks=True)))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Offline, with caches of its own."""
    folder = tmp_path_factory.mktemp("caches")
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "HF_MODULES_CACHE": str(folder / "modules"),
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", each(BASH, long_pages=("results.md", "speed.md")))
def test_commands_run(block, workplace, programs, environment):
    """A bash block runs unchanged but for tiny options."""
    # What the block makes is not there yet: it would be a reader's second run otherwise.
    for trained in re.findall(r"(?:--output_dir|titans-hf merge \S+) (\S+)", block.text):
        shutil.rmtree(workplace / trained, ignore_errors=True)
    ran, commands = run_bash(block, workplace, programs, environment, timeout=850)
    assert ran.returncode == 0, f"{commands[-1]}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    assert commands
    if all(short_options(command) is None for command in commands):
        pytest.skip("it needs the network, a GPU, other machines or minutes")


@pytest.mark.parametrize("block", each(PYTHON))
def test_python_runs(block, workplace, environment):
    """A Python block, and the code of a notebook, runs alone and unchanged."""
    for text, package in OPTIONAL.items():
        if text in block.text:
            pytest.importorskip(package)
    command, options = [sys.executable, "-c", block.text], dict(capture_output=True, text=True, timeout=250)
    ran = subprocess.run(command, cwd=workplace, env=environment, stdin=subprocess.DEVNULL, **options)
    assert ran.returncode == 0, ran.stderr[-4000:]
