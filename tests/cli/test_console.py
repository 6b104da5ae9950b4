"""The command `titans-hf`: in a checkout, and as pip installs it, editable and from a wheel."""

import json
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
from clean_environment import as_installed, install
from covering import in_one_test
from served import complete, serving
from tiny_run import TITANS

import titans_hf_console as console

SOURCE = Path(__file__).parents[2] / "src" / "titans_hf"


def call(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/titans-hf", *map(str, arguments)])
    console.main()


def test_help_lists_every_command(monkeypatch, capsys):
    """`titans-hf` alone lists every command."""
    for arguments in ([], ["--help"]):
        call(monkeypatch, *arguments)
        text = capsys.readouterr().out
        assert all(f"\n  {name} " in text for name in console.COMMANDS)


@pytest.mark.parametrize("name", [None, *sorted(console.COMMANDS.keys() - console.OTHER_PARSERS)])
def test_help_imports_no_model(name, monkeypatch, capsys):
    """The list of commands, and the help of a command that `argparse` alone parses, need no other package for the same
    text.
    """
    monkeypatch.setenv("COLUMNS", "100")
    arguments = ["--help"] if name is None else [name, "--help"]
    code = (
        f"import sys; sys.argv = ['titans-hf', *{arguments}]\n"
        "from titans_hf_console import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.raises(SystemExit) if name else nullcontext():
        call(monkeypatch, *arguments)
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
        (["surprise", "no-model", "no-text", "--output", "out"], "No such file or directory: 'no-text'"),
        (["serve", "model", "--continuous-batching"], "--continuous-batching"),
        (["chat", "model", "http://127.0.0.1:9/v1"], "refused. titans-hf serve MODEL starts one"),
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


@pytest.mark.parametrize(
    "command,package,module,extra",
    [("lm-eval", "lm_eval", "titans_hf.cli.lm_eval", "eval"), ("serve", "accelerate", "titans_hf.cli.serve", "serve")],
)
def test_a_missing_package_names_the_extra(command, package, module, extra, monkeypatch, capsys):
    """A command without its packages names the extra to install."""
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith((f"{package}.", module))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit):
        call(monkeypatch, command)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f': error: the package {package} is missing: pip install -e ".[{extra}]"')


def run(arguments: list, folder: Path) -> str:
    """Returns the standard output of a command that runs in `folder`, as an installed one does."""
    options = dict(capture_output=True, text=True, timeout=250, stdin=subprocess.DEVNULL)
    own = as_installed(HF_DATASETS_CACHE=str(folder / "cache"))
    done = subprocess.run([*map(str, arguments)], env=own, cwd=folder, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("editable", [True, False])
def test_an_installation(editable, tmp_path):
    """An installation has every file of the package, is imported from the folder above a clone of its name, where
    notebooks and scripts lie, and its commands run in any folder. If one failed, users would need a checkout.
    """
    commands = install(tmp_path, editable)
    assert (tmp_path / "titans_hf" / "src").is_dir()
    code = "import titans_hf, titans_hf.cli; print(titans_hf.__path__[0], titans_hf.__file__)"
    package, file = map(Path, run([commands / "python", "-c", code], tmp_path).split())
    tracked = subprocess.run(["git", "ls-files"], cwd=SOURCE, capture_output=True, text=True, check=True).stdout.split()
    assert file.is_relative_to(tmp_path)
    assert {*tracked} == {name for name in tracked if (package / name).is_file()}
    assert "0.1.0" in run([commands / "titans-hf", "--version"], tmp_path)

    (tmp_path / "text.txt").write_text("The key is 4711, said the captain. " * 100)
    (tmp_path / "config.json").write_text(json.dumps(TITANS))
    options = "--tokenizer bytes --train_data text.txt --output_dir run --block_length 32 --tokens_per_step 64 "
    options += "--per_device_train_batch_size 2 --max_steps 2 --eval_steps 2 --save_steps 2 --use_cpu true --bf16 false"
    run([commands / "titans-hf", "train", "--config", "config.json", *options.split()], tmp_path)
    with serving("run", tmp_path, command=commands / "titans-hf") as url:
        complete(f"{url}/v1/completions", "run", prompt="The key").close()
