"""Finds the part of a chat request that the prompt does not show: an image, say, or a text that a chat template drops.

Every text and number of the request is replaced by a mark of its own, and the prompt is made of these. A part whose
mark is not in the prompt is marked once more, alone: if the prompt stays as it was, nobody reads the part.
"""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

# These name parts, or link them to each other. A template may leave them out.
REFERENCES = {"role", "type", "id", "call_id", "tool_call_id", "index", "status"}
Path = tuple[str | int, ...]


def first_unprinted(asked: dict[str, Any], prompt_of: Callable[[dict[str, Any]], str]) -> Path | None:
    """Returns the path to the first part of `asked` that does not change the prompt, None if there is none.

    asked: fields of a request. prompt_of: makes the prompt of these. Raises its error for `asked` itself.
    """
    asked = with_parsed_arguments(asked)
    marks = {path: uuid4().hex for path in parts(asked)}
    found, plain = _prompt_or_error(asked, marks, prompt_of), None
    for path, mark in marks.items():
        if mark not in found:
            plain = prompt_of(asked) if plain is None else plain
            if _prompt_or_error(asked, {path: mark}, prompt_of) == plain:
                return path
    return None


def parts(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yields the paths to all texts and numbers of a JSON value that are not empty, but for `REFERENCES`."""
    if isinstance(value, dict | list):
        for key, x in value.items() if isinstance(value, dict) else enumerate(value):
            if key not in REFERENCES or "arguments" in path:
                yield from parts(x, (*path, key))
    elif value is not None and value != "":
        yield path


def with_parsed_arguments(value: Any) -> Any:
    """Returns a copy of a JSON value in which the arguments of calls are no texts of JSON, but what these say."""
    if isinstance(value, list):
        return [with_parsed_arguments(x) for x in value]
    if not isinstance(value, dict):
        return value
    return {
        key: json.loads(x) if key == "arguments" and isinstance(x, str) and x else with_parsed_arguments(x)
        for key, x in value.items()
    }


def _prompt_or_error(asked: dict[str, Any], marks: dict[Path, str], prompt_of: Callable[[dict[str, Any]], str]) -> str:
    """Returns the prompt with marks at some paths, or as text the error of a template that refuses a mark."""
    marked = copy.deepcopy(asked)
    for path, mark in marks.items():
        place: Any = marked
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = mark
    try:
        return prompt_of(marked)
    except Exception as error:
        return repr(error)
