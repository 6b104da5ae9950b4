"""Runs a script where everything is installed but titans_hf."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

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
