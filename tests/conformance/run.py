"""Runs transformers' own common model tests against Titans, and prints what failed or was skipped, with the reasons.

    python tests/conformance/run.py
    python tests/conformance/run.py -k "training or fsdp"
    python tests/conformance/run.py --source transformers/    # with its generation and export tests

The tests come from the source distribution of the installed transformers, fetched from the package index into
build/conformance. It lacks the generation and export tests, and modules that the other tests import: these are filled
in from standins/. From a checkout of transformers (--source), everything is transformers' own.
`cases.py` lists what is tested.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
import transformers

from titans_hf.cli.shared.command_line import run_command

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "build" / "conformance"


def fetch_archive() -> Path:
    """Downloads the source distribution of the installed transformers, unless it is in the cache."""
    requirement = f"transformers=={transformers.__version__}"
    archive = CACHE / f"transformers-{transformers.__version__}.tar.gz"
    if not archive.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
        if subprocess.run([*pip, "--dest", CACHE, requirement], check=False).returncode:
            raise OSError(f"{requirement} could not be downloaded: give a checkout of transformers with --source")
    return archive


def unpack_tests(folder: Path, checkout: Path | None) -> None:
    """Puts transformers' tests into `folder/tests`, and stand-ins for missing modules."""
    if checkout:
        shutil.copytree(checkout / "tests", folder / "tests")
    else:
        with tarfile.open(fetch_archive()) as archive:
            for member in archive:
                if Path(member.name).match("transformers-*/tests/*.py"):
                    member = member.replace(name="/".join(Path(member.name).parts[1:]))
                    archive.extract(member, folder, filter="data")
    for path in sorted((HERE / "standins").rglob("*.py")):
        target = folder / "tests" / path.relative_to(HERE / "standins")
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
            print(f"replaced by a stand-in: {target.relative_to(folder)}")
    # A package, so that no other folder named tests is taken for a part of it.
    (folder / "tests" / "__init__.py").touch()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="run only matching tests, as in pytest")
    parser.add_argument("--source", type=Path, help="a checkout of transformers to take the tests from")
    args = parser.parse_args()
    # Slow tests too; and nothing from the Hub, whatever this machine has in its cache.
    os.environ |= {"RUN_SLOW": "1", "HF_HUB_OFFLINE": "1"}
    options = ["-q", "-rfEs", "--tb=short", "-W", "ignore", "-c", os.devnull, "--rootdir", str(HERE), "-k", args.k]
    # Our own tests' fixtures are not transformers'.
    options += ["-p", "no:cacheprovider", "--confcutdir", str(HERE), "-n", "auto"]
    with tempfile.TemporaryDirectory() as folder:
        unpack_tests(Path(folder), args.source)
        return int(pytest.main([*options, "-o", f"pythonpath={folder}", str(HERE / "cases.py")]))


if __name__ == "__main__":
    run_command(lambda: sys.exit(main()))
