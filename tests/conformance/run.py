"""Runs transformers' own common model tests against Titans.

    python tests/conformance/run.py --markdown conformance.md
    python tests/conformance/run.py -k "training or fsdp"
    python tests/conformance/run.py --source transformers/    # with its generation and export tests

The tests come from the source distribution of the installed transformers, fetched from the package index into
build/conformance. It lacks the generation and export tests, and modules that the other tests import: these are filled
in from standins/. From a checkout of transformers (--source), everything is transformers' own.
`cases.py` lists what is tested.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import transformers

from titans_hf.cli.shared.command_line import run_command
from titans_hf.cli.shared.markdown_tables import markdown_table

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "build" / "conformance"
STANDINS = HERE / "standins"
# Test files that a stand-in leaves empty, by what they test.
LEFT_OUT = {"generation/test_utils.py": "generation", "exporters/test_export.py": "export"}
TITANS = ("TitansMacTest", "TitansMagTest", "TitansMalTest", "TitansLmmTest")


def fetch_archive() -> Path:
    """Downloads the source distribution of the installed transformers, unless it is in the cache."""
    requirement = f"transformers=={transformers.__version__}"
    archive = CACHE / f"transformers-{transformers.__version__}.tar.gz"
    if not archive.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
        if subprocess.run([*pip, "--dest", CACHE, requirement], check=False).returncode:
            raise OSError(f"{requirement} could not be downloaded: give a checkout of transformers with --source")
    return archive


def unpack_tests(folder: Path, checkout: Path | None) -> list[str]:
    """Puts transformers' tests into `folder/tests`, and stand-ins for missing modules; returns the stand-ins' names."""
    if checkout:
        shutil.copytree(checkout / "tests", folder / "tests")
    else:
        with tarfile.open(fetch_archive()) as archive:
            for member in archive:
                if Path(member.name).match("transformers-*/tests/*.py"):
                    member = member.replace(name="/".join(Path(member.name).parts[1:]))
                    archive.extract(member, folder, filter="data")
    used = []
    for path in sorted(STANDINS.rglob("*.py")):
        target = folder / "tests" / path.relative_to(STANDINS)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
            used.append(str(path.relative_to(STANDINS)))
    # A package, so that no other folder named tests is taken for a part of it.
    (folder / "tests" / "__init__.py").touch()
    return used


def what_is_missing(standins: list[str]) -> str:
    """Lists the tests that did not run, and the modules that were stood in for; empty if all are transformers' own."""
    missing = [f"{kind} tests ({name})" for name, kind in LEFT_OUT.items() if name in standins]
    others = [name for name in standins if name not in LEFT_OUT]
    parts = []
    if missing:
        parts.append(f"Not run, because the source distribution lacks them: the {' and the '.join(missing)}. ")
        parts.append("With a checkout of transformers (--source) they are.")
    if others:
        parts.append(f"{' ' if missing else ''}Replaced by stand-ins: {', '.join(others)}.")
    return "".join(parts)


@dataclass
class Outcomes:
    """A pytest plugin that keeps the reasons: by_class[test class]["passed", "failed" or "skipped"][test]."""

    by_class: dict = field(default_factory=lambda: defaultdict(lambda: defaultdict(dict)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        name, test = report.nodeid.split("::")[-2:]
        if report.skipped:
            reason = report.longrepr[2].removeprefix("Skipped: ")
        else:  # pytest marks the message of an exception by an E; a rank's traceback ends with it
            reason = next((line[1:] for line in reversed(report.longreprtext.splitlines()) if line[:1] == "E"), "")
        self.by_class[name][report.outcome][test] = " ".join(reason.split())


def table(outcomes: dict, names: tuple[str, ...]) -> str:
    """Counts of every test class, then failures and skips by their reasons, as Markdown."""
    kinds = ("passed", "failed", "skipped")
    rows = [[_short(name), *(len(outcomes[name][kind]) for kind in kinds)] for name in names]
    parts = [markdown_table(["tests of", *kinds], rows)]
    for outcome in ("failed", "skipped"):
        groups = defaultdict(list)
        for test in sorted({test for name in names for test in outcomes[name][outcome]}):
            for reason in {outcomes[name][outcome].get(test) for name in names} - {None}:
                which = [name for name in names if outcomes[name][outcome].get(test) == reason]
                groups[reason, tuple(which)].append(test)
        rows = []
        for (reason, which), tests in sorted(groups.items()):
            rows.append([reason, "all" if which == names else ", ".join(map(_short, which)), _list_tests(tests)])
        if rows:
            parts.append(markdown_table([f"{outcome} because", "of", "tests"], rows))
    return "\n\n".join(parts)


def _short(test_class: str) -> str:
    return test_class.removesuffix("Test")


def _list_tests(tests: list[str]) -> str:
    """Names without test_; those that differ in their parameters alone (name_0_..., name_1_...) as one."""
    counts = Counter(re.sub(r"_\d+(_\w+)?$", "", test.removeprefix("test_")) for test in tests)
    return ", ".join(name if number == 1 else f"{name} ({number})" for name, number in counts.items())


def run_tests(folder: Path, chosen: str | None) -> tuple[int, dict]:
    """Runs the tests by pytest; returns its exit status, and the outcomes by test class."""
    # Slow tests too; and nothing from the Hub, whatever this machine has in its cache.
    os.environ |= {"RUN_SLOW": "1", "HF_HUB_OFFLINE": "1"}
    options = ["-q", "--no-header", "--tb=short", "-c", os.devnull, "--rootdir", str(HERE), "-p", "no:cacheprovider"]
    options += ["--confcutdir", str(HERE)]  # our own tests' fixtures are not transformers'
    options += ["-o", f"pythonpath={folder}", "-n", "auto"]
    outcomes = Outcomes()
    cases = [f"{HERE / 'cases.py'}::{name}" for name in TITANS]
    status = pytest.main([*options, "-W", "ignore", *(["-k", chosen] if chosen else []), *cases], plugins=[outcomes])
    return int(status), outcomes.by_class


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", metavar="EXPRESSION", help="run only matching tests, as in pytest")
    parser.add_argument("--markdown", type=Path, help="write the table into this file")
    parser.add_argument("--source", type=Path, help="a checkout of transformers to take the tests from")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        standins = unpack_tests(Path(folder), args.source)
        status, outcomes = run_tests(Path(folder), args.k)
    text = table(outcomes, TITANS)
    if standins:
        text += f"\n\n{what_is_missing(standins)}"
    print(f"\n{text}")
    if args.markdown:
        args.markdown.write_text(text + "\n")
    return status


if __name__ == "__main__":
    run_command(lambda: sys.exit(main()))
