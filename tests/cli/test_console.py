"""The command `titans-hf`: in a checkout, and as pip installs it, editable and from a wheel."""

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from byte_model import save_byte_model
from clean_environment import as_installed, install
from covering import in_one_test
from served import NUM_TOKENS, complete, serving
from tiny_run import TITANS

import titans_hf_console as console

ROOT = Path(__file__).parents[2]


def call(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/titans-hf", *map(str, arguments)])
    console.main()


def test_help_lists_every_command(monkeypatch, capsys):
    """`titans-hf` alone lists every command."""
    for arguments in ([], ["--help"]):
        call(monkeypatch, *arguments)
        text = capsys.readouterr().out
        assert all(f"\n  {name} " in text for name in console.COMMANDS)


def test_help_imports_no_model():
    """The list of commands is printed without torch, Transformers or the package."""
    code = (
        "import sys; sys.argv = ['titans-hf', '--help']\n"
        "from titans_hf_console import main; main()\n"
        "assert not {'torch', 'transformers', 'titans_hf'} & sys.modules.keys()"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).returncode == 0


@pytest.mark.parametrize("name", sorted(console.COMMANDS.keys() - console.OTHER_PARSERS))
def test_help_of_a_command_imports_no_model(name, monkeypatch, capsys):
    """The help of a command that `argparse` alone parses is printed without another package, and is the same text."""
    monkeypatch.setenv("COLUMNS", "100")
    code = (
        f"import sys; sys.argv = ['titans-hf', '{name}', '--help']\n"
        "from titans_hf_console import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(SystemExit):
        call(monkeypatch, name, "--help")
    assert capsys.readouterr().out == done.stdout


def test_an_unknown_command_is_refused(monkeypatch, capsys):
    """An unknown command exits with code 2 and names the known ones."""
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "trian")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("titans-hf: error: there is no command trian, only train, ")


@in_one_test("name", console.COMMANDS)
def test_a_command_gets_its_own_arguments(monkeypatch, name):
    """Each command receives the arguments after its name."""
    command, received = console.COMMANDS[name], []
    monkeypatch.setattr(import_module(command.module), "main", lambda: received.append(list(sys.argv)))
    call(monkeypatch, name, "x", "--y")
    own = command.module == console.TRANSFORMERS_CLI
    assert received == [["titans-hf", name, "x", "--y"] if own else [f"titans-hf {name}", "x", "--y"]]


@in_one_test(
    "arguments,message",
    [
        (
            ["train", "--train_data", "x", "--output_dir", "out", "--tokenizer", "bytes", "--config", "tiny-mga"],
            "--config tiny-mga is not a checkpoint: no such folder, nor to be had from the Hub; configurations by ",
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
        (["surprise", "no-model", "no-text", "--output", "out"], "No such file or directory: 'no-text'"),
        (["serve", "model", "--continuous-batching"], "--continuous-batching"),
        (["chat", "model", "http://127.0.0.1:9/v1"], "refused. titans-hf serve MODEL starts one"),
        (["chat", "model", "http://127.0.0.1:9"], "refused. titans-hf serve MODEL starts one"),
    ],
)
def test_errors_are_one_line(monkeypatch, capsys, tmp_path, arguments, message):
    """Bad input to a command ends in one line that names the command."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, *arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith("titans-hf") and f"{arguments[0]}: error: " in line.replace("titans-hf:", f"{arguments[0]}:")
    assert message in line


def test_a_missing_package_names_the_extra(monkeypatch, capsys):
    """A command without its packages names the extra to install."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in [name for name in sys.modules if name.startswith(("lm_eval.", "titans_hf.cli.lm_eval"))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit):
        call(monkeypatch, "lm-eval")
    text = capsys.readouterr().err
    assert text == 'titans-hf lm-eval: error: the package lm_eval is missing: pip install -e ".[eval]"\n'


@pytest.fixture(scope="module", params=["editable", "wheel"])
def installed(request, tmp_path_factory):
    """The folder of commands of an environment in which pip has installed a clone named titans_hf."""
    return install(tmp_path_factory.mktemp(request.param), editable=request.param == "editable")


def run(arguments: list, folder: Path, **changes: str) -> str:
    """Returns the standard output of a command that runs in `folder`, as an installed one does."""
    own = as_installed(HF_DATASETS_CACHE=str(folder / "cache"), **changes)
    done = subprocess.run(
        [*map(str, arguments)],
        env=own,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_package_is_imported_beside_a_clone_of_its_name(installed):
    """The package is imported from the folder above a clone named titans_hf, where notebooks and scripts lie."""
    above = installed.parents[1]
    assert (above / "titans_hf" / "src").is_dir()
    code = "import titans_hf, titans_hf.cli; print(titans_hf.TitansConfig.model_type)"
    assert run([installed / "python", "-c", code], above) == "titans\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_installed_command_serves(installed, tmp_path):
    """`titans-hf serve`, as installed and from another folder, answers from a memory that `titans-hf read` saved."""
    save_byte_model(tmp_path / "model", "mag")
    (tmp_path / "text.txt").write_text("The key is 4711, said the captain. " * 30)
    run([installed / "titans-hf", "read", "model", "text.txt", "--memory", "memory", "--device", "cpu"], tmp_path)
    with (
        serving("model", tmp_path, "--memory", "memory", command=installed / "titans-hf") as url,
        complete(f"{url}/v1/completions", "model", prompt="The key") as response,
    ):
        served = json.load(response)["choices"][0]["text"]
    options = ["--memory", "memory", "--prompt", "The key", "--max_new_tokens", NUM_TOKENS, "--device", "cpu"]
    expected = re.sub("\r\n?", "\n", f"The key{served}")  # as `run` reads what a command prints
    assert run([installed / "titans-hf", "ask", "model", *options], tmp_path).startswith(expected)


@pytest.mark.long
@pytest.mark.timeout(900)  # about twenty processes, each of which imports torch
def test_the_installed_commands_run(installed, tmp_path):
    """Every command that pip has installed runs in any folder. If one failed, users would need a checkout."""
    command = installed / "titans-hf"
    assert "0.1.0" in run([command, "--version"], tmp_path)
    for name in console.COMMANDS:
        assert "--help" in run([command, name, "--help"], tmp_path)
    assert run([installed / "python", "-m", "titans_hf", "--help"], tmp_path) == run([command, "--help"], tmp_path)
    where = run([installed / "python", "-c", "import titans_hf as t; print(t.__path__[0], t.__file__)"], tmp_path)
    package, file = map(Path, where.split())
    assert file.is_relative_to(installed.parents[1]) and (package / "py.typed").exists()

    (tmp_path / "text.txt").write_text("The key is 4711, said the captain. " * 100)
    (tmp_path / "config.json").write_text(json.dumps(TITANS))
    options = "--tokenizer bytes --train_data text.txt --output_dir run --block_length 32 --tokens_per_step 64 "
    options += "--per_device_train_batch_size 2 --max_steps 2 --eval_steps 2 --save_steps 2 --use_cpu true --bf16 false"
    run([command, "train", "--config", "config.json", *options.split()], tmp_path)
    run([command, "read", "run", "text.txt", "--memory", "memory", "--device", "cpu"], tmp_path)
    ask = ["ask", "run", "--memory", "memory", "--prompt", "The key", "--device", "cpu"]
    assert run([command, *ask], tmp_path).startswith("The key")
    run([command, "surprise", "run", "text.txt", "--output", "page", "--device", "cpu"], tmp_path)
    assert (tmp_path / "page" / "surprise.html").stat().st_size > 1000
    run([command, "demo", "--steps", "2", "--questions", "2", "--output_dir", "demo"], tmp_path)


@pytest.mark.slow
def test_an_installation_has_its_data(installed):
    """An installation has the cards and the configurations."""
    code = "import titans_hf; print(titans_hf.__path__[0])"
    package = Path(run([installed / "python", "-c", code], installed).strip())
    source, shipped = ROOT / "src" / "titans_hf", {path.relative_to(package) for path in package.rglob("*")}
    for pattern in (
        "cards/*.md",
        "configs/*.json",
        "configs/accelerate/*.yaml",
    ):
        names = {path.relative_to(source) for path in (source / "cli").glob(pattern)}
        assert names and names <= shipped
