"""Makes docs/api.md from the docstrings of titans_hf.

python -m scripts.api_page > docs/api.md
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import titans_hf
from titans_hf import TitansConfig
from titans_hf.cli.shared.command_line import run_command

ROOT = Path(__file__).parents[1]
HEADING = """# API

The public names of `titans_hf`, made from their docstrings by `scripts/api_page.py`. The source says more: shapes,
arguments, units and errors. How a cache is continued, saved, merged and shared is in [memories](memories.md).
"""
# Transformers calls these by their names; nobody else does.
HOOKS = {
    "validate",
    "validate_architecture",
    "validate_rope",
    "standardize_rope_params",
    "from_dict",
    "base_model_tp_plan",
}


def first_paragraph(documented: object) -> str:
    """Returns the first paragraph of a docstring on one line, without a last sentence that introduces a list."""
    text = " ".join((documented.__doc__ or "").split("\n\n")[0].split())
    return re.sub(r"(?<=[.;]) (?:(?![.;] ).)*:$", "", text).removesuffix(";")


def first_sentence(documented: object) -> str:
    """Returns the first paragraph up to its first full stop."""
    return re.split(r"(?<=[^.]\.) (?=[A-Z`])", first_paragraph(documented))[0]


def parameters_of(called: object) -> str:
    """Formats the names of the parameters, with their defaults and without their types."""
    signature = inspect.signature(called)
    kept = [x.replace(annotation=x.empty) for x in signature.parameters.values() if x.name not in ("self", "cls")]
    return str(signature.replace(parameters=kept, return_annotation=signature.empty))


def fields_of(config: type[TitansConfig]) -> str:
    """Formats the fields that a configuration adds to its parent's fields, with their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    shown = [name for name in vars(config)["__annotations__"] if name in defaults]
    return f"({', '.join(f'{name}={defaults[name]!r}' for name in shown)})"


def members_of(described: type) -> Iterator[tuple[str, object]]:
    """Yields the public methods and properties that a class defines itself, as they are called."""
    for name, member in vars(described).items():
        if name.startswith("_") or name in HOOKS:
            continue
        if isinstance(member, property):
            yield name, member.fget
        elif inspect.isfunction(member) or isinstance(member, classmethod):
            function = getattr(member, "__func__", member)
            if inspect.unwrap(function).__module__.startswith("titans_hf"):  # not a field that Transformers adds
                yield name + parameters_of(function), function


def entry(name: str) -> str:
    """Makes the part of one public name."""
    described = getattr(titans_hf, name)
    described = described.__call__ if inspect.ismodule(described) else described
    is_config = inspect.isclass(described) and issubclass(described, TitansConfig)
    source = Path(inspect.getsourcefile(inspect.unwrap(described))).relative_to(ROOT)
    signature = fields_of(described) if is_config else parameters_of(described)
    text = f"## {name}\n\n`{name}{signature}`\n\n{first_paragraph(described)} [Source](../{source})\n"
    if inspect.isclass(described):
        lines = [f"- `{call}`: {first_sentence(member)}" for call, member in members_of(described) if member.__doc__]
        text += "".join(f"{line}\n" for line in ["", *lines]) if lines else ""
    return text


def page() -> str:
    """Makes the page."""
    return "\n".join([HEADING, *map(entry, titans_hf.__all__)])


if __name__ == "__main__":
    run_command(lambda: print(page(), end=""))
