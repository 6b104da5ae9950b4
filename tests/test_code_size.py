"""Files and functions stay short enough to be read at a glance: one idea each."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "scripts", "eval", "tests")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 323, 49


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    """No file has over 323 lines and no function over 49: a longer one does more than one thing."""
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"
