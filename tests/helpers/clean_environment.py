"""Environments in which everything is installed but titans_hf, and environments in which titans_hf is installed too."""

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("titans_hf", "__editable__")


def clean_site(folder: Path) -> Path:
    """Makes a folder of links to all installed packages except this project."""
    site = folder / "site"
    site.mkdir()
    for entry in Path(importlib.util.find_spec("transformers").origin).parents[1].iterdir():
        if not entry.name.startswith(OURS):
            (site / entry.name).symlink_to(entry)
    return site


def run_clean(site: Path, script: Path, *args, timeout: float = 280) -> str:
    """Returns the script's standard output; its caches for trusted code and repositories are folders of its own. Raises
    AssertionError with the end of its standard error where the script fails.
    """
    caches = {"HF_MODULES_CACHE": str(site.parent / "modules"), "HF_HUB_CACHE": str(site.parent / "hub")}
    own = {"PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1", **caches}
    command = [sys.executable, "-S", str(script), *map(str, args)]  # -S: no .pth file adds a folder to the path
    ran = subprocess.run(
        command, env=os.environ | own, cwd=site.parent, capture_output=True, text=True, timeout=timeout
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def clone(folder: Path) -> Path:
    """Copies the files of this checkout that git tracks, as a clone has them; returns the copy."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def install(folder: Path, editable: bool) -> Path:
    """Makes a virtual environment in `folder`, and installs a clone of this checkout, `folder`/titans_hf, there by pip:
    editable, or from the wheel of it. Returns the environment's folder of commands.
    """
    venv.create(folder / "env", with_pip=False)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    (packages / "everything_else.pth").write_text(f"{clean_site(folder)}\n")
    python, source = folder / "env" / "bin" / "python", clone(folder / "titans_hf")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    what = ["-e", source]
    if not editable:
        subprocess.run([*pip, "wheel", *offline, "-w", folder, source], check=True)
        what = folder.glob("*.whl")
    subprocess.run([*pip, "--python", python, "install", *offline, *what], env=as_installed(), check=True)
    return python.parent


def as_installed(**changes: str) -> dict[str, str]:
    """Returns the variables of the environment without PYTHONPATH, by which tests find this checkout, and offline."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **changes,
    }
