"""Names the commit of this code for the record of a run."""

import shutil
import subprocess
from pathlib import Path


def describe_commit() -> str:
    """Names the commit of the code, with "+" where files differ from it; empty outside a git checkout."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
