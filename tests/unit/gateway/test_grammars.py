"""What callers say an answer has to be: what comes of it, what is refused and where."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.grammars import (
    create_choice_grammar,
    create_regex_grammar,
    create_schema_grammar,
    grammar_of,
    parse_lark_grammar,
    schema_text,
)
from gateway.output_format import OutputFormat, one_output
from outrider.wire.errors import InvalidRequest
from tests.unit.gateway.following import follows


def schema(value: Any, strict: bool = False) -> str:
    return create_schema_grammar(value, "s", strict=strict)


@pytest.mark.parametrize(
    ("grammar", "allowed", "others"),
    [
        (lambda: schema({"type": "integer"}), ["0", "-7", "12"], ["", "1.5", '"1"', " 1"]),
        (lambda: schema("true"), ["0", "{}", '"a"', "[1, null]"], ["", "a"]),
        (lambda: schema('{"enum": ["a", 1, null]}'), ['"a"', "1", "null"], ["a", "2"]),
        (lambda: grammar_of(OutputFormat("json_object", None, "p")), ["{}", '{"a": [1]}'], ["[]", "1"]),
        (lambda: create_regex_grammar(r"^a/b+\n$", "p"), ["a/b\n", "a/bbb\n"], ["a/b", "a/b\nc"]),
        (lambda: create_regex_grammar("(?i)é|x{2,3}", "p"), ["É", "xx", "xxx"], ["x"]),
        (
            lambda: create_choice_grammar(["a", "ab", "a.b", "\x01\n\\", "é😀"], "p"),
            ["a", "ab", "\x01\n\\", "é😀"],
            ["b", "axb"],
        ),
        (lambda: parse_lark_grammar('start: "a" B\nB: /[0-9]+/ // a comment: <x>', "p"), ["a1", "a12"], ["a"]),
        (lambda: parse_lark_grammar('root ::= "a" b*\nb ::= [0-9] | "\\u0041bc"', "p"), ["a", "a1Abc2"], ["aA", "b"]),
        (lambda: parse_lark_grammar('start: "<" %json {"type": "null"} ">"', "p"), ["<null>"], ["null"]),
        (
            lambda: parse_lark_grammar(f"start: %json {schema_text({'const': [1, 2]}, 'p', strict=False)}", "p"),
            ["[1, 2]"],
            ["[]"],
        ),
    ],
)
def test_each_form_allows_its_own_texts(grammar: Callable[[], str], allowed: list[str], others: list[str]) -> None:
    made = grammar()
    assert json.loads(made)["grammars"], "as llguidance writes it"
    assert [text for text in allowed if not follows(made, text)] == []
    assert [text for text in others if follows(made, text)] == []


@pytest.mark.parametrize(
    ("make", "place", "reason"),
    [
        (lambda: create_regex_grammar("(a", "p"), "", "unclosed group"),
        (lambda: create_regex_grammar(r"\bx", "p"), "", "lookarounds"),
        (lambda: create_regex_grammar("\ud800", "p"), "", "surrogate"),
        (lambda: create_choice_grammar([], "p"), "", "empty list"),
        (lambda: create_choice_grammar(["a", ""], "p"), "[1]", "is empty"),
        (lambda: create_choice_grammar(["\udfff"], "p"), "", "surrogate"),
        (lambda: parse_lark_grammar("hello", "p"), "", "neither Lark (start: ...) nor GBNF"),
        (lambda: parse_lark_grammar('root ::= "\\', "p"), "", "neither"),
        (lambda: parse_lark_grammar('root ::= "\\ud800"', "p"), "", "no character"),
        (lambda: parse_lark_grammar("start: b", "p"), "", 'unknown name: "b"'),
        (lambda: parse_lark_grammar('start: "a" <|end|>', "p"), "", "special token"),
        (lambda: parse_lark_grammar("start: a\na[max_tokens=3]: /b/", "p"), "", "option max_tokens"),
        (lambda: parse_lark_grammar('start: "a"\n%json {"not": {}}', "p"), ".%json[0].not", "keyword"),
        (lambda: parse_lark_grammar("start: %json {}  %json {", "p"), ".%json[1]", "no JSON"),
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
