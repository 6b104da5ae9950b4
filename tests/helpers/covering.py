"""Few cases for many values: combinations that cover a product, and cheap checks that are one test."""

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import pytest

ParameterSet = type(pytest.param())


def covering(strength: int, parameters: Mapping[str, Iterable]) -> pytest.MarkDecorator:
    """Returns a mark like the product of `pytest.mark.parametrize`, with few of its cases.

    With strength 1 every value of each parameter is in a case. With strength 2 every two values of two parameters meet
    in a case. The cases find every fault that needs a certain value (two values). As in `parametrize`, a name such as
    "a,b" has pairs of values, and `pytest.param` gives an id.
    """
    choices = [[as_param(x, "," in names) for x in values] for names, values in parameters.items()]
    rows = list(itertools.product(*(range(len(x)) for x in choices)))
    covers = {row: set(itertools.combinations(enumerate(row), strength)) for row in rows}
    missing, used, cases = set().union(*covers.values()), Counter(), []
    while missing:
        # Of the rows that cover as many new combinations, the row whose values have occurred least.
        row = max(rows, key=lambda row: (len(covers[row] & missing), -sum(used[x] for x in enumerate(row))))
        missing -= covers[row]
        used.update(enumerate(row))
        cases.append(join(choice[i] for choice, i in zip(choices, row, strict=True)))
    return pytest.mark.parametrize(",".join(parameters), cases)


def in_one_test(names: str, values: Iterable) -> Callable:
    """Returns a decorator like `pytest.mark.parametrize` for cheap checks: one test, in which each of the values is a
    subtest, with shared fixtures such as `tmp_path`. All values are tried, and a failure names its values."""
    params = [as_param(x, "," in names) for x in values]
    assert not any(x.marks for x in params), "a subtest has no mark"

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(subtests, **fixtures):
            for param in params:
                with subtests.test(param.id):
                    test(**fixtures, **dict(zip(names.split(","), param.values, strict=True)))

        own = [x for name, x in inspect.signature(test).parameters.items() if name not in names.split(",")]
        run.__signature__ = inspect.Signature([*own, inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)])
        return run

    return decorate


def as_param(value, several: bool) -> ParameterSet:
    """Returns a value, or the values of several parameters, as a `pytest.param` with an id."""
    param = value if isinstance(value, ParameterSet) else pytest.param(*(value if several else (value,)))
    label = "-".join((getattr(x, "__name__", None) or str(x))[:40] for x in param.values)
    return pytest.param(*param.values, id=param.id or label, marks=param.marks)


def join(params: Iterable[ParameterSet]) -> ParameterSet:
    """Returns one `pytest.param` with the values, ids and marks of several."""
    params = list(params)
    values = [value for param in params for value in param.values]
    return pytest.param(*values, id="-".join(x.id for x in params), marks=[mark for x in params for mark in x.marks])
