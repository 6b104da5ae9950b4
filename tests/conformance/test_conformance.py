"""tests/conformance/run.py: where its tests come from, and the report of those that are missing."""

import sys

import pytest
import transformers
from conformance import run as conformance


@pytest.fixture
def checkout(tmp_path):
    """A folder like a checkout of the installed transformers, with its two files of tests alone."""
    folder = tmp_path / "checkout"
    for name in (*(f"tests/{name}" for name in conformance.LEFT_OUT), "src/transformers/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("own = True\n")
    (folder / "src/transformers/__init__.py").write_text(f'__version__ = "{transformers.__version__}"\n')
    return folder


def test_a_checkout_brings_its_own_tests(checkout, tmp_path):
    """Given a checkout, generation and export tests are its own."""
    conformance.check_checkout(checkout)
    standins = conformance.unpack_tests(tmp_path / "unpacked", checkout)
    for name in conformance.LEFT_OUT:
        assert (tmp_path / "unpacked" / "tests" / name).read_text() == "own = True\n"
    assert not set(standins) & conformance.LEFT_OUT.keys()
    assert "Not run" not in conformance.what_is_missing(standins)


def test_missing_tests_are_named():
    """Without a checkout the table names the tests that did not run."""
    text = conformance.what_is_missing(["exporters/test_export.py", "generation/test_utils.py", "x.py"])
    assert "Not run" in text and "generation tests (generation/test_utils.py)" in text
    assert "export tests (exporters/test_export.py)" in text and text.endswith("Replaced by stand-ins: x.py.")
    assert conformance.what_is_missing([]) == ""


@pytest.mark.parametrize("broken", ["missing", "version"])
def test_another_folder_is_refused(broken, checkout, monkeypatch, capsys):
    """A folder that is no checkout, or of another version, raises an error."""
    if broken == "missing":
        (checkout / "tests/generation/test_utils.py").unlink()
    else:
        (checkout / "src/transformers/__init__.py").write_text('__version__ = "4.0.0"\n')
    monkeypatch.setattr(sys, "argv", ["run.py", "--source", str(checkout)])
    with pytest.raises(SystemExit):
        conformance.main()
    expected = "has no tests/generation/test_utils.py" if broken == "missing" else "is transformers 4.0.0"
    assert expected in capsys.readouterr().err
