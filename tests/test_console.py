"""The command `titans-hf`: in a checkout, and installed from a wheel."""

import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tiny_run import TITANS

from titans_hf.cli import console

ROOT = Path(__file__).parents[1]


def call(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/titans-hf", *map(str, arguments)])
    console.main()


def test_help_lists_every_command(monkeypatch, capsys):
    """`titans-hf` alone lists every command: otherwise users would not know which commands exist."""
    for arguments in ([], ["--help"]):
        call(monkeypatch, *arguments)
        text = capsys.readouterr().out
        assert all(f"\n  {name} " in text for name in console.COMMANDS)


def test_an_unknown_command_is_refused(monkeypatch, capsys):
    """An unknown command exits with code 2 and names the known ones: otherwise a typing error would end in a
    traceback.
    """
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "trian")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("titans-hf: error: there is no command trian, only train, merge, ")


@pytest.mark.parametrize("name", console.COMMANDS)
def test_a_command_gets_its_own_arguments(monkeypatch, name):
    """Each command receives the arguments after its name: otherwise it would take its own name for an argument."""
    command, received = console.COMMANDS[name], []
    monkeypatch.setattr(import_module(command.module), "main", lambda: received.append(list(sys.argv)))
    call(monkeypatch, name, "x", "--y")
    own = command.module == console.TRANSFORMERS_CLI
    assert received == [["titans-hf", name, "x", "--y"] if own else [f"titans-hf {name}", "x", "--y"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "--train_data", "x", "--output_dir", "out", "--tokenizer", "bytes", "--config", "no.json"],
            "no.json",
        ),
        (
            ["train", "--train_data", "x", "--output_dir", "out", "--per_device_train_batch_size", "0"],
            "--per_device_train_batch_size must be at least 1, but is 0",
        ),
        (["merge", "no-adapter", "merged"], "ADAPTER no-adapter is not an adapter's folder"),
        (["read", "no-model", "no-text", "--memory", "m"], "TEXT no-text does not exist"),
        (
            ["read", "no-model", "no-text", "--memory", __file__],
            f"--memory {__file__} cannot be a folder",
        ),
        (["ask", "no-model", "--memory", "m", "--prompt", ""], "--prompt is empty"),
        (["surprise", "no-model", "no-text", "--output", "out"], "TEXT no-text is not a file"),
        (["eval", "no-model", "--suite", "no-suite", "--output", "out"], "no such suite or task"),
        (["serve", "model", "--continuous-batching"], "--continuous-batching"),
        (["chat", "model", "http://127.0.0.1:9/v1"], "the server does not answer: "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_errors_are_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    """Bad input to a command ends in one line that names the command: otherwise users would read a traceback."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, *arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith("titans-hf") and f"{arguments[0]}: error: " in line.replace("titans-hf:", f"{arguments[0]}:")
    assert message in line


def test_a_missing_package_names_the_extra(monkeypatch, capsys):
    """A command without its packages names the extra to install: otherwise users would see an ImportError's
    traceback.
    """
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in [name for name in sys.modules if name.startswith("titans_hf.cli.eval")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit):
        call(monkeypatch, "eval")
    text = capsys.readouterr().err
    assert text == "titans-hf eval: error: the package lm_eval is missing: pip install 'titans-hf[eval]'\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the wheel of this checkout installed, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):  # without build/, whose stale files a wheel would take in
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "source"], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True)
    return folder / "site"


@pytest.mark.long
@pytest.mark.timeout(900)  # about twenty processes, each of which imports torch
def test_the_wheel_brings_the_commands(installed, tmp_path):
    """Commands of the installed wheel run in any folder: otherwise users would need a checkout."""
    assert (installed / "titans_hf" / "py.typed").exists()

    def run(*arguments, **options):
        own = {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(
            command, env=os.environ | own, cwd=tmp_path, capture_output=True, text=True, timeout=250, **options
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    command = installed / "bin" / "titans-hf"
    assert "0.1.0" in run(command, "--version")
    for name in console.COMMANDS:
        assert "--help" in run(command, name, "--help")
    assert run("-m", "titans_hf", "--help") == run(command, "--help")
    where = run("-c", "import titans_hf.cli.train as t; print(t.__file__)")
    assert where.startswith(str(installed))

    (tmp_path / "text.txt").write_text("The key is 4711, said the captain. " * 100)
    (tmp_path / "config.json").write_text(json.dumps(TITANS))
    options = "--tokenizer bytes --train_data text.txt --output_dir run --block_length 32 --tokens_per_step 64 "
    options += "--per_device_train_batch_size 2 --max_steps 2 --eval_steps 2 --save_steps 2 --use_cpu true --bf16 false"
    run(command, "train", "--config", "config.json", *options.split())
    run(command, "read", "run", "text.txt", "--memory", "memory", "--device", "cpu")
    answer = run(command, "ask", "run", "--memory", "memory", "--prompt", "The key", "--device", "cpu")
    assert answer.startswith("The key")
    run(command, "surprise", "run", "text.txt", "--output", "page", "--device", "cpu")
    assert (tmp_path / "page" / "surprise.html").stat().st_size > 1000
    run(command, "demo", "--steps", "2", "--questions", "2", "--output_dir", "demo")


@pytest.mark.long
def test_the_wheel_brings_the_data_of_eval(installed, tmp_path):
    """The wheel has the tasks' YAML files, the paper's figures and the configurations: otherwise an installed `eval`
    would fail.
    """
    source, shipped = (
        ROOT / "src",
        {path.relative_to(installed) for path in (installed / "titans_hf" / "cli").rglob("*")},
    )
    for pattern in ("configs/*.json", "configs/accelerate/*.yaml", "evaluation/*.json", "evaluation/tasks/*.yaml"):
        assert {path.relative_to(source) for path in (source / "titans_hf" / "cli").glob(pattern)} <= shipped
