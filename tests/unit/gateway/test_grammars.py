"""What callers say an answer has to be: what comes of it, what is refused and where."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.grammars import grammar_of, of_choice, of_lark, of_regex, of_schema, schema_text
from gateway.output_format import OutputFormat, one_output
from outrider.wire.errors import InvalidRequest
from tests.unit.gateway.following import follows


def schema(value: Any, strict: bool = False) -> str:
    return of_schema(value, "s", strict=strict)


@pytest.mark.parametrize(
    ("grammar", "allowed", "others"),
    [
        (lambda: schema({"type": "integer"}), ["0", "-7", "12"], ["", "1.5", '"1"', " 1"]),
        (lambda: schema("true"), ["0", "{}", '"a"', "[1, null]"], ["", "a"]),
        (lambda: schema('{"enum": ["a", 1, null]}'), ['"a"', "1", "null"], ["a", "2"]),
        (lambda: grammar_of(OutputFormat("json_object", None, "p")), ["{}", '{"a": [1]}'], ["[]", "1"]),
        (lambda: of_regex(r"^a/b+\n$", "p"), ["a/b\n", "a/bbb\n"], ["a/b", "a/b\nc"]),
        (lambda: of_regex("(?i)é|x{2,3}", "p"), ["É", "xx", "xxx"], ["x"]),
        (lambda: of_choice(["a", "ab", "a.b", "\x01\n\\", "é😀"], "p"), ["a", "ab", "\x01\n\\", "é😀"], ["b", "axb"]),
        (lambda: of_lark('start: "a" B\nB: /[0-9]+/ // a comment: <x>', "p"), ["a1", "a12"], ["a"]),
        (lambda: of_lark('root ::= "a" b*\nb ::= [0-9] | "\\u0041bc"', "p"), ["a", "a1Abc2"], ["aA", "b"]),
        (lambda: of_lark('start: "<" %json {"type": "null"} ">"', "p"), ["<null>"], ["null"]),
        (lambda: of_lark(f"start: %json {schema_text({'const': [1, 2]}, 'p', strict=False)}", "p"), ["[1, 2]"], ["[]"]),
    ],
)
def test_each_form_allows_what_it_says(grammar: Callable[[], str], allowed: list[str], others: list[str]) -> None:
    made = grammar()
    assert json.loads(made)["grammars"], "as llguidance writes it"
    assert [text for text in allowed if not follows(made, text)] == []
    assert [text for text in others if follows(made, text)] == []


@pytest.mark.parametrize(
    ("make", "place", "reason"),
    [
        (lambda: of_regex("(a", "p"), "", "unclosed group"),
        (lambda: of_regex(r"\bx", "p"), "", "lookarounds"),
        (lambda: of_regex("\ud800", "p"), "", "surrogate"),
        (lambda: of_choice([], "p"), "", "empty list"),
        (lambda: of_choice(["a", ""], "p"), "[1]", "is empty"),
        (lambda: of_choice(["\udfff"], "p"), "", "surrogate"),
        (lambda: of_lark("hello", "p"), "", "neither Lark (start: ...) nor GBNF"),
        (lambda: of_lark('root ::= "\\', "p"), "", "neither"),
        (lambda: of_lark('root ::= "\\ud800"', "p"), "", "no character"),
        (lambda: of_lark("start: b", "p"), "", 'unknown name: "b"'),
        (lambda: of_lark('start: "a" <|end|>', "p"), "", "special token"),
        (lambda: of_lark("start: a\na[max_tokens=3]: /b/", "p"), "", "option max_tokens"),
        (lambda: of_lark('start: "a"\n%json {"not": {}}', "p"), ".%json[0].not", "keyword"),
        (lambda: of_lark("start: %json {}  %json {", "p"), ".%json[1]", "no JSON"),
    ],
)
def test_expressions_choices_and_grammars_are_refused(make: Callable[[], str], place: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.param == f"p{place}" and reason in caught.value.message, caught.value.message


def test_exactly_one_kind_is_given() -> None:
    nothing = dict.fromkeys(("json", "regex", "choice", "grammar", "json_object"))
    assert one_output(nothing | {"regex": "a"}) == OutputFormat("regex", "a", "structured_outputs.regex")
    for given, named in (({}, "has nothing"), ({"regex": "a", "json": {}}, "has json and regex")):
        with pytest.raises(InvalidRequest, match=named):
            one_output(nothing | given)
