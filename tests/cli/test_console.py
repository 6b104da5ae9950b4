"""The command `titans-hf`: in a checkout, and as pip installs it, editable and from a wheel."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from byte_model import save_llama

import titans_hf_console as console

ROOT = Path(__file__).parents[2]


def call(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/titans-hf", *map(str, arguments)])
    console.main()


@pytest.mark.parametrize("name", [None, *sorted(name for name, (*_, options) in console.COMMANDS.items() if options)])
def test_help_imports_no_model(name):
    """`titans-hf` alone lists every command; the list, and help of options that are ours, import no other package."""
    arguments = [] if name is None else [name, "--help"]
    code = f"import sys; sys.argv = ['titans-hf', *{arguments}]\nfrom titans_hf_console import main\ntry: main()\n"
    code += "finally: assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {x}" in done.stdout for x in (["-h, --help"] if name else console.COMMANDS))


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
        call(monkeypatch, command, "--help")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f': error: the package {package} is missing: pip install "titans_hf[{extra}]"')


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_installation(tmp_path):
    """A wheel has every file of the package, and README's Python runs from it in a folder with nothing but a stand-in
    for SmolLM2. An editable installation is imported from the folder above a clone of its name, and its command runs
    there."""
    source, python = tmp_path / "titans_hf", tmp_path / "env" / "bin" / "python"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in filter(Path.is_file, ROOT.iterdir()):
        shutil.copy(file, source)
    pip, offline = [sys.executable, "-m", "pip", "--quiet"], ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *offline, "-w", tmp_path, source], check=True)
    (wheel,) = map(zipfile.ZipFile, tmp_path.glob("*.whl"))
    files = [file.relative_to(source / "src").as_posix() for file in (source / "src").rglob("*") if file.is_file()]
    assert {x for x in files if "egg-info" not in x} <= {*wheel.namelist()}
    venv.create(tmp_path / "env")
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(str(Path(pytest.__file__).parents[1]))
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    folder = tmp_path / "empty"
    save_llama(folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct", max_position_embeddings=8192, hidden_size=64)
    subprocess.run([*pip, "--python", python, "install", *offline, wheel.filename], env=own, check=True)
    page, shown_any = (ROOT / "README.md").read_text(encoding="utf-8"), False
    for block, shown in re.findall(r"^```python\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", page, re.M | re.S):
        done = subprocess.run([python, "-c", block], env=own, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
        if shown and "SmolLM2" not in block:
            assert done.stdout == shown
            shown_any = True
    assert shown_any
    subprocess.run([*pip, "--python", python, "install", *offline, "-e", source], env=own, check=True)
    code = "import titans_hf, titans_hf.cli; print(titans_hf.__file__)"
    for command, said in (([python, "-c", code], str(source)), ([python.with_name("titans-hf"), "--version"], "0.1.0")):
        assert said in subprocess.run(command, env=own, cwd=tmp_path, check=True, capture_output=True, text=True).stdout


def test_the_path_of_what_the_package_brings(monkeypatch, capsys):
    """`titans-hf --path NAME` prints a path that exists, and an error lists the names."""
    for name in ("fsdp2.yaml", "tiny-mag.json", "recall-lmm"):
        call(monkeypatch, "--path", name)
        assert Path(capsys.readouterr().out.strip()).exists()
    with pytest.raises(SystemExit):
        call(monkeypatch, "--path", "fsdp3.yaml")
    assert "there is no file fsdp3.yaml, only ddp.yaml, " in capsys.readouterr().err
