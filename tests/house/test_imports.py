"""Imports go down only: scripts, benchmarks (eval), the console, commands (titans_hf.cli), the model (titans_hf)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = {
    "titans_hf": "src/titans_hf/*.py",
    "titans_hf.cli": "src/titans_hf/cli",
    "titans_hf_console": "src/*.py",
    "eval": "eval",
    "scripts": "scripts",
}


def files_of(pattern: str) -> list[Path]:
    """Returns the Python files that match a pattern, or lie in a folder; __main__.py is the commands' own."""
    found = ROOT.glob(pattern if "*" in pattern else f"{pattern}/**/*.py")
    return [file for file in found if file.name != "__main__.py"]


def layer_of(module: str) -> int:
    """Returns the number of a module's layer; 0 for what is none of ours, as for the model."""
    return max((i for i, name in enumerate(LAYERS) if f"{module}.".startswith(f"{name}.")), default=0)


@pytest.mark.parametrize("name", LAYERS)
def test_imports_go_down_only(name):
    """A file imports nothing of a layer above its own."""
    assert files_of(LAYERS[name])
    for file in files_of(LAYERS[name]):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            above = [x for x in names if layer_of(x) > list(LAYERS).index(name)]
            assert not above, f"{file.relative_to(ROOT)} imports {', '.join(above)}"
