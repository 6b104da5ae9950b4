"""Imports go down only: scripts, benchmarks (eval), commands (titans_hf.cli), the console, `remember`, the model."""

import ast
import inspect
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import titans_hf

ROOT = Path(__file__).parents[2]
LAYERS = {
    "titans_hf": "src/titans_hf/*.py",
    "titans_hf.recalling": "src/titans_hf/recalling",
    "titans_hf_console": "src/*.py",
    "titans_hf.cli": "src/titans_hf/cli",
    "eval": "eval",
    "scripts": "scripts",
}
FRONT = [ROOT / "src/titans_hf" / name for name in ("__init__.py", "__main__.py")]


def files_of(pattern: str) -> list[Path]:
    """Returns the Python files of a pattern or folder, without those that stand above all layers."""
    found = ROOT.glob(pattern if "*" in pattern else f"{pattern}/**/*.py")
    return [file for file in found if file not in FRONT]


def layer_of(module: str) -> int:
    """Returns the number of a module's layer; 0 for what is none of ours, as for the model."""
    return max((i for i, name in enumerate(LAYERS) if f"{module}.".startswith(f"{name}.")), default=0)


def imports_of(file: Path) -> Iterator[str]:
    """Yields the full names of all modules, and of all names in modules, that a file imports anywhere."""
    package = file.relative_to(ROOT / "src" if (ROOT / "src") in file.parents else ROOT).parts[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (x.name for x in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{module}.{x.name}" for x in node.names)


@pytest.mark.parametrize("name", LAYERS)
def test_imports_go_down_only(name):
    """A file imports nothing of a layer above its own."""
    assert files_of(LAYERS[name])
    for file in files_of(LAYERS[name]):
        above = [x for x in imports_of(file) if layer_of(x) > list(LAYERS).index(name)]
        assert not above, f"{file.relative_to(ROOT)} imports {', '.join(above)}"


def test_the_files_of_recalling_import_each_other_without_a_circle():
    """Neither inside of a function nor for types alone does a file import one that needs it."""
    files = {
        ".".join(x.relative_to(ROOT / "src").with_suffix("").parts): x for x in files_of("src/titans_hf/recalling")
    }
    graph = {
        name: {x for x in files for y in imports_of(file) if f"{y}.".startswith(f"{x}.")}
        for name, file in files.items()
    }
    assert graph["titans_hf.recalling.attach"]
    TopologicalSorter(graph).prepare()


def test_remember_is_a_function():
    """`titans_hf.remember` is the function, whose help names its arguments, and no module can be called."""
    assert inspect.isfunction(titans_hf.remember) and "window:" in inspect.getdoc(titans_hf.remember)
    assert not any(callable(x) for x in vars(titans_hf).values() if inspect.ismodule(x))
