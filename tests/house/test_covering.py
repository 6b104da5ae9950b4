"""The combinations that stand for a product in other tests."""

import contextlib
import inspect
import itertools

from covering import covering, in_one_test


def test_every_two_values_meet():
    """Strength 1 has every value, strength 2 every two values of two parameters, and both have fewer cases than the
    product.
    """
    parameters = {"a": [1, 2, 3, 4], "b,c": [(5, 6), (7, 8), (9, 10)], "d": [11, 12]}
    names = ("a", "b", "c", "d")
    for strength, size in ((1, 4), (2, 12)):
        mark = covering(strength, parameters).mark
        assert mark.args[0] == "a,b,c,d"
        cases = [dict(zip(names, case.values, strict=True)) for case in mark.args[1]]
        assert len(cases) == size
        for chosen in itertools.combinations(parameters, strength):
            for values in itertools.product(*(parameters[name] for name in chosen)):
                wanted = {}
                for name, value in zip(chosen, values, strict=True):
                    wanted |= dict(zip(name.split(","), value if "," in name else (value,), strict=True))
                assert any(wanted.items() <= case.items() for case in cases), wanted
    assert len({case.id for case in mark.args[1]}) == 12


def test_checks_in_one_test_are_all_tried():
    """Every value is tried with the test's fixtures, also after one that fails, and a failure is in its own subtest."""
    tried, names = [], []

    class Subtests:
        def test(self, name):
            names.append(name)
            return contextlib.suppress(AssertionError)

    @in_one_test("a,b", [(1, 2), (3, 4), (5, 6)])
    def check(folder, a, b):
        tried.append((folder, a, b))
        assert a != 3

    check(subtests=Subtests(), folder="here")
    assert tried == [("here", 1, 2), ("here", 3, 4), ("here", 5, 6)] and names == ["1-2", "3-4", "5-6"]
    assert list(inspect.signature(check).parameters) == ["folder", "subtests"]
