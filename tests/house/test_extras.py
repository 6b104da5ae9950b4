"""What a command imports comes with the extra that its install line names, and every extra is named somewhere."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from covering import in_one_test
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from titans_hf_console import COMMANDS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OWN = {".".join(x.relative_to(top).with_suffix("").parts): x for top in (ROOT / "src", ROOT) for x in top.rglob("*.py")}
OWN = {name.removesuffix(".__init__"): x for name, x in OWN.items() if re.match(r"titans_hf|eval\b", name)}
PROGRAMS = {module: extra for module, _, extra, _ in COMMANDS.values()}
PROGRAMS |= {x: "eval" for x, file in OWN.items() if x.startswith("eval") and "run_command(main)" in file.read_text()}


def distributions(requirement: Requirement, found: set[str]) -> set[str]:
    """Adds to `found` what pip installs for a requirement, whose own requirements of the project are its extras."""
    name = canonicalize_name(requirement.name)
    if name == "titans-hf":
        lines = PROJECT["dependencies"] + [x for extra in requirement.extras for x in EXTRAS[extra]]
    else:
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # for another platform
            lines = []
    new = {name, *(f"{name}[{extra}]" for extra in requirement.extras)} - found
    found |= new
    for child in map(Requirement, lines if new else []):
        if not child.marker or any(child.marker.evaluate({"extra": x}) for x in ("", *requirement.extras)):
            distributions(child, found)
    return found


def imported(node: ast.AST, package: list[str]) -> Iterator[str]:
    """Yields the modules that a file imports anywhere, but not for types alone and not if it can do without them."""
    if isinstance(node, ast.Import):
        yield from (x.name for x in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*above, *filter(None, [node.module])])
        yield from (module, *(f"{module}.{x.name}" for x in node.names if f"{module}.{x.name}" in OWN))
    elif not isinstance(node, ast.Try) and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
        for child in ast.iter_child_nodes(node):
            yield from imported(child, package)


def closure(module: str, found: set[str]) -> set[str]:
    """Adds to `found` a module of the project, its packages, and all that they import, directly or not."""
    if module not in found:
        found.add(module)
        if module in OWN:
            package = module.split(".") if OWN[module].stem == "__init__" else module.split(".")[:-1]
            for x in [*imported(ast.parse(OWN[module].read_text("utf-8")), package), ".".join(module.split(".")[:-1])]:
                closure(x, found) if x else None
    return found


@in_one_test("module", PROGRAMS)
def test_a_command_imports_what_its_extra_installs(module):
    """In an environment with the extra alone, no package that a command imports is missing."""
    extra = PROGRAMS[module]
    installed = distributions(Requirement(f"titans-hf[{extra}]" if extra else "titans-hf"), set())
    packages = {x.partition(".")[0] for x in closure(module, set()) if x not in OWN} - sys.stdlib_module_names
    assert "torch" in packages
    known = packages_distributions()
    missing = {x for x in packages if not installed & {canonicalize_name(y) for y in known.get(x, [])}}
    assert not missing, f"{module}: {missing} do not come with the extra {extra}"


def test_every_extra_is_named():
    """A page, the Makefile or an error of a command names each extra."""
    named = {x[2] for x in COMMANDS.values()} | {*re.findall(r"\.venv/(\w+)\.stamp", (ROOT / "Makefile").read_text())}
    for page in [ROOT / "README.md", ROOT / "eval" / "README.md", *(ROOT / "docs").rglob("*.md")]:
        named |= {
            x
            for names in re.findall(r"(?:\.|titans_hf)\[([\w,]+)\]", page.read_text("utf-8"))
            for x in names.split(",")
        }
    assert EXTRAS.keys() <= named
