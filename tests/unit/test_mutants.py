"""Faults that `make mutants` plants: each finds its place by meaning, and says so where it does not."""

from __future__ import annotations

import ast

import pytest

from tests.mutants import Mutant
from tests.mutants.__main__ import MUTANTS, caught_by, misplaced
from tests.mutants.operators import (
    Operator,
    always,
    argument,
    call,
    comparison,
    comprehension,
    condition,
    constant,
    display,
    drop,
    drop_element,
    never,
    operation,
    read,
    sibling,
    statement,
    subscript,
)

CASES = (
    (drop("close"), "self.open()\nself.close()", "self.open()\npass"),
    (drop("+="), "a = 1\na += b", "a = 1\npass"),
    (drop("continue"), "for a in b:\n    continue", "for a in b:\n    pass"),
    (statement("close", to="if self.x:\n    _"), "self.close()", "if self.x:\n    self.close()"),
    (statement("max", to="b = _0\nreturn b + 1"), "return max(a)", "b = max(a)\nreturn b + 1"),
    (always("first"), "if a.first and b.second:\n    pass", "if True and b.second:\n    pass"),
    (never("first", "second"), "if a.first and b.second:\n    pass", "if False:\n    pass"),
    (never("in"), "return [a for a in b if a in self.x]", "return [a for a in b if False]"),
    (condition(to="not _"), "return a if b else 0", "return a if not b else 0"),
    (comparison("<", "x", to="_0 <= _1"), "return a < 1 and self.x < 2", "return a < 1 and self.x <= 2"),
    (operation("+", to="_1"), "return a - b + 1", "return 1"),
    (call("f", to="_0"), "return f(1, k=2) + g(3)", "return 1 + g(3)"),
    (call("f", to="_f(_1, _0, k=_k)"), "return a.f(1, 2, k=3)", "return a.f(2, 1, k=3)"),
    (call("close", to="_self"), "return a.open().close()", "return a.open()"),
    (call("f", to="-_0"), "return -f(-f(1))", "return -f(--1)"),
    (argument("f", "k", to="_ + 1"), "f(1, k=2)", "f(1, k=2 + 1)"),
    (argument("f", 1, "x", to="0"), "f(1, self.x)\nf(1, 2)", "f(1, 0)\nf(1, 2)"),
    (read("max", to="min"), "return max(a)", "return min(a)"),
    (read("x", to="0", beside=("f",)), "a = self.x\nf(self.x)", "a = self.x\nf(0)"),
    (sibling("first", "second"), "self.first = a.first", "self.first = a.second"),
    (constant(1, to="0", nth=(2, 3)), "return (1, 1, 1)", "return (1, 0, 1)"),
    (subscript("x", to="_0[_1 + 1 : _2]"), "return self.x[a:b] + a[0]", "return self.x[a + 1:b] + a[0]"),
    (display("f", to="[_1, _0]"), "return [f(1), 2], [3]", "return ([2, f(1)], [3])"),
    (drop_element("x"), "return (*a, *self.x)", "return (*a,)"),
    (comprehension("x", to="[*_][1:]"), "return [a for a in self.x]", "return [*[a for a in self.x]][1:]"),
)


def planted(operator: Operator, body: str) -> str:
    """Return the body of a function of `self`, `a` and `b` with a fault in it."""
    lines = "\n    ".join(body.splitlines())
    module = ast.parse(f'def function(self, b):\n    """Of no use."""\n    {lines}')
    operator.apply(module.body[0], {"f", "g"})
    return "\n".join(line[4:] for line in ast.unparse(module).splitlines()[2:])


@pytest.mark.parametrize(("operator", "body", "expected"), CASES, ids=lambda value: str(value).replace("\n", "; "))
def test_an_operator_changes_one_place(operator: Operator, body: str, expected: str) -> None:
    assert planted(operator, body) == expected


def test_names_of_locals_do_not_count() -> None:
    renamed = "best = max(b)\nreturn best + self.x"
    assert planted(operation("+", "x", to="_0"), renamed) == "best = max(b)\nreturn best"
    with pytest.raises(LookupError, match=r"0 places are operation \+ with best, expected 1"):
        planted(operation("+", "best", to="_0"), renamed)


def test_two_places_are_none_and_are_shown() -> None:
    with pytest.raises(LookupError, match=r"2 places are condition, expected 1\n    a\n    b"):
        planted(never(), "if a and b:\n    pass")


def test_a_replacement_names_nothing_that_the_function_lacks() -> None:
    assert planted(call("f", to="[_f(x, b) for x in self.y]"), "return f(1)") == "return [f(x, b) for x in self.y]"
    with pytest.raises(LookupError, match="no parameter or global other"):
        planted(call("f", to="other"), "other = 1\nreturn f(1)")


def test_a_function_is_found_wherever_it_is_below_its_package() -> None:
    mutant = Mutant("tests.mutants:Operator.apply", drop("put"), "nothing is planted", ())
    assert mutant.file().as_posix() == "tests/mutants/operators.py"
    assert "place.put(new)" not in mutant.plant()[0]


def test_what_is_not_found_is_listed_all_at_once() -> None:
    wrong = (
        Mutant("tests.mutants:Operator.apply", never("absent"), "no such place", ()),
        Mutant("tests.mutants:Nothing", never(), "no such function", ()),
        Mutant("tests.mutants.tree:Place.put", drop("setattr"), "no such test", ("tests/unit/test_mutants.py::no",)),
    )
    found = misplaced(wrong)
    assert [line.partition(": ")[2].partition(",")[0] for line in found] == [
        "0 places are condition with absent",
        "tests.mutants has Nothing in 0 files",
        "there is no test tests/unit/test_mutants.py::no",
    ]


def test_a_name_that_the_fault_lacks_catches_nothing() -> None:
    failed = "/product/file.py:3: {}\nFAILED tests/unit/test_file.py::test_it"
    assert caught_by(1, failed.format("AssertionError: 1 == 2")) == "tests/unit/test_file.py::test_it"
    assert caught_by(1, failed.format("UnboundLocalError: left")) is None
    assert caught_by(5, "no tests ran") is None


def test_every_fault_can_be_planted() -> None:
    assert misplaced(MUTANTS) == []
