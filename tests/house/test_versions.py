"""The oldest Transformers that the package takes is one version, wherever it is named."""

import re
import tomllib

import pytest
from clean_environment import ROOT

NAMED_IN = {
    "README.md": "transformers {}, or newer",
    "src/titans_hf/cli/cards/train.md": "transformers {} or newer",
}


@pytest.mark.parametrize("page", NAMED_IN)
def test_the_oldest_transformers_is_that_of_the_package(page):
    """The page names the oldest Transformers of pyproject.toml, which `make test-oldest` installs."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    (oldest,) = (name.removeprefix("transformers>=") for name in dependencies if name.startswith("transformers"))
    named = re.findall(NAMED_IN[page].format(r"([\d.]*\d)"), (ROOT / page).read_text())
    assert named == [oldest]


def test_every_change_runs_with_the_oldest_transformers():
    """The checks of a change run the tests of `make test-oldest`."""
    assert "make test-oldest" in (ROOT / ".ci" / "run").read_text().splitlines()
