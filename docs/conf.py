"""How Sphinx builds the site (`make docs`) out of the Markdown that also reads on a repository page."""

import re
import tomllib
from pathlib import Path
from textwrap import indent
from urllib.request import urlopen

from titans_hf import TitansConfig

DOCS = Path(__file__).parent
PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
INVENTORIES = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "transformers": "https://huggingface.co/docs/transformers/main/en/",
}
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")  # of Markdown: its file, its anchor

project = "titans_hf"
author = "the titans_hf authors"
version = release = PROJECT["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"titans_hf {version}"
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}
myst_heading_anchors = 4  # links to headings as on a repository page
myst_enable_extensions = ["colon_fence"]
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
GROUPS = re.findall(r"^ *> ([\w ]+)", TitansConfig.__doc__, re.MULTILINE)  # of its fields
napoleon_custom_sections = [(group, "params_style") for group in GROUPS]
SECTIONS = {"Args", "Attributes", "Returns", "Raises", *GROUPS}
suppress_warnings = ["misc.highlighting_failure"]


def reachable(address: str) -> bool:
    """Whether the names of another project's pages can be had: the site builds without a network too."""
    try:
        with urlopen(address + "objects.inv", timeout=5) as answer:
            return answer.read(18) == b"# Sphinx inventory"
    except OSError:
        return False


intersphinx_mapping = {name: (address, None) for name, address in INVENTORIES.items() if reachable(address)}


def link(match: re.Match, folder: Path) -> str:
    """Points a link that leaves docs/ at the repository."""
    file, root = (folder / match[1]).resolve(), DOCS.parent
    if re.match(r"[a-z]+:", match[1]) or not file.is_relative_to(root) or file.is_relative_to(DOCS):
        return match[0]
    return f"]({REPOSITORY}/blob/main/{file.relative_to(root).as_posix()}{match[2] or ''})"


def read_page(app, docname: str, source: list[str]) -> None:
    """Makes a page of the site out of one of the repository.

    The start page is README, the comment `<!-- autofunction: titans_hf.remember -->` becomes the docstring, and links
    to files outside of docs/ lead to the repository.
    """
    folder = (DOCS / docname).parent
    text = re.sub(LINK, lambda match: link(match, folder), source[0])
    text = re.sub(r"<!-- (auto\w+: .*) -->", lambda x: f"```{{eval-rst}}\n.. {x[1].replace(':', '::', 1)}\n```", text)
    if docname == "index":
        readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
        readme = re.sub(LINK, lambda match: link(match, DOCS.parent), readme)
        text = text.replace("<!-- README -->", readme.replace("](docs/", "]("))
    source[0] = text


def as_restructured(app, what, name, obj, options, lines: list[str]) -> None:
    """Writes a docstring as Sphinx reads it: its `code`, its blocks of code, the stars and bars of its prose."""
    text = re.sub(r"^    > ([\w ]+).*$", r"\1:", "\n".join(lines), flags=re.M)
    text = re.sub(r"^```(\w+)\n(.*?)^```$", lambda x: block(x[1], indent(x[2], "    ")), text + "\n", flags=re.M | re.S)
    parts, in_section = [], False
    for part in re.split(r"\n\n+", text.strip("\n")):
        in_section = part.removesuffix(":").split(":\n")[0] in SECTIONS or (in_section and part.startswith("    "))
        if part.startswith("    ") and not in_section:
            code, after = re.match(r"((?: {4}[^\n]*\n?)+)(.*)", part, re.DOTALL).groups()
            part = block("none", code) + after
        elif not part.startswith(".. code-block"):
            words = re.split(r"`([^`]+)`", part)
            prose = [re.sub(r"([*|]|_\b)", r"\\\1", x) for x in words[::2]]
            part = "".join(
                x for pair in zip(prose, [f"``{x}``" for x in words[1::2]] + [""], strict=True) for x in pair
            )
        parts.append(part)
    lines[:] = "\n\n".join(parts).splitlines()


def block(language: str, code: str) -> str:
    """Writes indented lines as a block of code."""
    return f".. code-block:: {language}\n\n{code.rstrip()}\n\n"


def setup(app) -> None:
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", as_restructured, priority=400)  # before napoleon reads it
