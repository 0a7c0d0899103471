"""JSON schemas: what they allow to the last digit, what is dropped, and what is refused with its place."""

import json
import random
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from gateway.grammars import create_regex_grammar, create_schema_grammar, parse_lark_grammar, schema_text
from outrider.wire.errors import InvalidRequest
from tests.schemas import make_schema
from tests.unit.gateway.following import LIMITS, TOKENIZER, follows


def schema(value: Any, strict: bool = False) -> str:
    return create_schema_grammar(value, "s", strict=strict)


def drawn(grammar: str, seed: int) -> str | None:
    """Return a text of at most 400 bytes drawn at random from what the grammar allows, None where it is longer."""
    draw, matcher, text = random.Random(seed), LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS), bytearray()
    for step in range(400):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if matcher.is_accepting() and (not allowed or step > 200 or draw.random() < 0.3):
            return text.decode()
        short = [byte for byte in allowed if byte in b'"]},:0123456789 ']  # so that most texts end
        text.append(draw.choice(short if short and draw.random() < 0.5 else allowed))
        assert matcher.consume_token(text[-1]), matcher.get_error()
    return None


def test_json_is_on_one_line_with_its_keys_in_order() -> None:
    made = schema({"properties": {"b": {"type": "integer"}, "a": {"items": {"type": "integer"}, "type": "array"}}}
                  | {"type": "object", "required": ["a", "b"], "additionalProperties": False})  # fmt: skip
    assert follows(made, '{"b":1,"a":[1,2]}')
    assert follows(made, '{"b": 1, "a": [1, 2]}')
    for text in ('{ "b":1,"a":[]}', '{"b":  1,"a":[]}', '{"b":1,\n"a":[]}', '{"b":1,"a":[]} ', '{"a":[],"b":1}'):
        assert not follows(made, text), text


@pytest.mark.parametrize("seed", range(0, 160, 40))
def test_what_a_schema_allows_is_valid(seed: int) -> None:
    """All that llguidance would overlook shows here, for the schemas that it is given."""
    num_drawn = 0
    for each in range(seed, seed + 40):
        made = make_schema(each)
        validator = jsonschema.Draft202012Validator(made)
        for text in (drawn(schema(made), each * 3 + draw) for draw in range(3)):
            if text is not None:
                num_drawn += 1
                validator.validate(json.loads(text))
    assert num_drawn > 100


NAMES = ("a", "é", "😀", 'q"', "back\\slash", "a\nb", "x/y", "\x01", "\x7f", "\u2028")


@pytest.mark.parametrize(
    "others", [{}, {"additionalProperties": {"type": "string"}}, {"patternProperties": {"^z": {"type": "string"}}}]
)
def test_no_other_spelling_of_a_name_passes_for_another_name(others: dict[str, Any]) -> None:
    """Readers keep the last value of a name, however it is spelt."""
    known = {"type": "object", "properties": {name: {"type": "integer"} for name in NAMES}} | others
    made = [schema(known), parse_lark_grammar(f"start: %json {json.dumps(known)}", "p")]
    made.append(parse_lark_grammar(f"start: %json {schema_text(known, 'p', strict=False)}", "p"))
    for name in NAMES:
        plain, escaped = json.dumps(name, ensure_ascii=False), escapes(name)
        for grammar in made:
            assert follows(grammar, f'{{{plain}: 1, "zz": "x"}}')
            assert not any(follows(grammar, f'{{{plain}: 1, {each}: "x"}}') for each in (plain, *escaped)), name


def test_no_other_spelling_passes_for_a_pattern_or_a_discriminator() -> None:
    assert not follows(schema({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}), r'{"\u0078": "s"}')
    members = [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"]
    for each in escapes("kind"):
        assert not follows(schema({"oneOf": members}), f'{{"kind": "a", {each}: "c"}}')


def escapes(name: str) -> list[str]:
    """Return other ways to write the name: each character in hexadecimal, all of them, and the solidus escaped."""
    plain = [json.dumps(char, ensure_ascii=False)[1:-1] for char in name]
    hexadecimal = [json.dumps("\0" + char)[7:-1] if ord(char) > 0x7F else f"\\u{ord(char):04x}" for char in name]
    texts = {"".join((*plain[:at], each, *plain[at + 1 :])) for at, each in enumerate(hexadecimal)}
    texts |= {"".join(hexadecimal), "".join(hexadecimal).upper().replace("U", "u"), name.replace("/", r"\/")}
    return [f'"{text}"' for text in texts - {"".join(plain), name}]


def test_a_union_with_a_discriminator_is_enforced() -> None:
    """As pydantic writes it: by reference, with a discriminator."""

    def kind(name: str) -> dict[str, Any]:
        return CLOSED | {"properties": {"kind": {"const": name}, name: {"type": "null"}}, "required": ["kind", name]}

    union = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "discriminator": {"propertyName": "kind"}}
    made = schema(
        {"properties": {"pet": union}, "type": "object", "$defs": {name: kind(name) for name in ("cat", "dog")}}
    )
    assert follows(made, '{"pet": {"kind": "dog", "dog": null}}')
    assert not follows(made, '{"pet": {"kind": "dog", "cat": null}}')
    with pytest.raises(InvalidRequest, match="oneOf"):
        schema(union | {"$defs": {"cat": kind("cat"), "dog": kind("cat")}})


EDGES = (-1000, -2.5, -2, -0.3, 0, 0.1, 0.7, 1, 2, 2.5, 99.99)


@pytest.mark.parametrize("kind", ["number", "integer"])
def test_bounds_hold_to_the_last_digit(kind: str) -> None:
    texts = {f"{edge:g}{rest}" for edge in EDGES for rest in ("", ".0", ".5", "0000001", "99999999999999999999")}
    texts |= {"-0", "-0.0", "0.69999999999999999", "1.9999999999999999", "0.00000000000000000001"}
    texts = {text for text in texts if text.count(".") < 2}
    for low, high in pairwise(EDGES):
        for least, most in (("minimum", "exclusiveMaximum"), ("exclusiveMinimum", "maximum")):
            bounds = {"type": kind, least: low, most: high}
            try:
                made = schema(bounds)
            except InvalidRequest as refused:
                assert kind == "integer" and "nsatisfiable" in refused.message
                continue
            validator = jsonschema.Draft202012Validator(bounds)
            allowed = [text for text in texts if follows(made, text)]
            assert [text for text in allowed if not validator.is_valid(json.loads(text))] == [], bounds


def named(count: int) -> dict[str, Any]:
    return {f"p{index}": {"type": "string"} for index in range(count)}


REFUSED: list[tuple[Any, str, str]] = [
    (
        {"properties": {"a": {"type": "array", "items": {"uniqueItems": True}}}},
        ".properties.a.items.uniqueItems",
        "can",
    ),
    ({"anyOf": [{}, {"not": {}}]}, ".anyOf[1].not", "keyword that cannot be enforced"),
    ({"properties": {"a b": {"if": True}}}, ".properties['a b'].if", "keyword"),
    ({"propertyNames": {"maxLength": 3}}, ".propertyNames", "keyword"),
    ({"nullable": True}, ".nullable", "a list with null"),
    ({"format": 32}, ".format", "must be a string"),
    ({"type": "text"}, ".type", "must be one of null, boolean"),
    ({"type": []}, ".type", "not empty"),
    ({"enum": []}, ".enum", "not empty"),
    ({"required": "a"}, ".required", "must be a list"),
    ({"required": [1]}, ".required", "list of names"),
    ({"properties": []}, ".properties", "object of schemas"),
    ({"items": [{}]}, ".items", "must be a schema"),
    (None, "", "must be a schema"),
    ({"minimum": 1, "exclusiveMinimum": True}, ".exclusiveMinimum", "must be a number"),
    ({"enum": [{"a": [10**20]}]}, ".enum[0].a[0]", "2^53"),
    ({"minimum": 1e999}, "", "JSON"),
    ({"multipleOf": 0}, ".multipleOf", "greater than 0"),
    ({"maxLength": -1}, ".maxLength", "0 to 2^53"),
    ({"minItems": 1.0}, ".minItems", "whole number"),
    ({"pattern": 1}, ".pattern", "must be a string"),
    ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, ".properties.a.pattern", "leave the pattern"),
    ({"properties": {"a": {"pattern": r"(a)\1"}}}, ".properties.a.pattern", "backreferences"),
    ({"const": "\ud800"}, "", "surrogate"),
    ({"$ref": "https://example.com/a"}, ".$ref", "only places in the schema itself"),
    ({"$ref": "#/$defs/a"}, ".$ref", "no schema there"),
    ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, ".$ref", "no schema there"),
    ({"patternProperties": {"^(?!x)": {}}}, ".patternProperties['^(?!x)']", "look-around"),
    ({"oneOf": [{"pattern": "(?!a)"}, {"type": "number"}]}, ".oneOf[0].pattern", "look-around"),
    ({"anyOf": [{"pattern": "(?!a)"}, {"type": "null"}]}, ".anyOf[0].pattern", "look-around"),
    ({"minimum": 2**53 + 1}, ".minimum", "2^53"),
    ({"$ref": "#"}, "", "itself by references alone"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, ".$defs.a", "references alone"),
    ({"properties": {"a": {"$ref": "#", "minProperties": 1}}}, ".properties.a", "circular"),
    ({"$defs": {"a": {"oneOf": [{"type": "object"}, {"type": "object"}]}}, "$ref": "#/$defs/a"}, ".$defs.a", "oneOf"),
    ({"type": "number", "minimum": 3, "maximum": 2}, "", "minimum (3) is greater"),
    (False, "", "Unsatisfiable"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "", "required property 'a'"),
    ({"minProperties": 2}, ".minProperties", "same name may come again"),
    ({"patternProperties": {"a": {}, "ab": {}}}, "", "not disjoint"),
    ('{"a', "", "no JSON"),
    ({"default": json.loads("[" * 34 + "]" * 34)}, ".default", "MAX_DEPTH"),
    ({"$id": {}}, ".$id", "keyword"),
    ({"allOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, ".allOf[1].multipleOf", "another multipleOf"),
    ({"properties": {"a": {"properties": named(600)}}}, ".properties.a", "MAX_ITEMS_IN_ROW"),
]


@pytest.mark.parametrize(("given", "place", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_schema_is_refused_with_the_place(given: Any, place: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        schema(given)
    assert caught.value.param == f"s{place}"
    assert caught.value.message.startswith(f"s{place} ") and reason in caught.value.message, caught.value.message


@pytest.mark.parametrize("depth", [5_000, 30_000])
def test_what_nests_deeper_than_python_reads_is_refused_as_too_deep(depth: int) -> None:
    """Python 3.11 reads 1,000 levels of JSON, 3.13 10,000."""
    with pytest.raises(InvalidRequest, match=r"^s(\.default)? nests .*MAX_DEPTH"):
        schema(f'{{"default":{"[" * depth}{"]" * depth}}}')


@pytest.mark.parametrize(
    "given",
    [
        {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "http://a/b", "title": "a", "default": 7},
        {"type": "array", "items": {"type": "integer", "description": "x"}, "uniqueItems": False},
        {"definitions": {"a b/c": {"type": "null"}}, "$ref": "#/definitions/a%20b~1c"},
        {"oneOf": [{"type": "null"}, {"type": "integer"}], "discriminator": {"propertyName": "a"}},
        {"type": "object", "properties": {"title": {"type": "null"}, "uniqueItems": {"const": {"not": 1}}}},
        {"type": "object", "properties": {"self": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
    ],
)
def test_what_constrains_nothing_is_dropped(given: dict[str, Any]) -> None:
    text = schema_text(given, "s", strict=False)
    for name in ("$schema", "$id", "default", "description", "discriminator"):
        assert f'"{name}":' not in text
    assert "uniqueItems" not in text or "not" in text, "a property's name and a const are none"


ANNOTATED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    *(({"type": "number", "format": name}, [1.5], ["a"]) for name in ("float", "double", "decimal", 'x"')),
    *(({"type": "string", "format": name}, ["a b"], [1]) for name in ("path", "binary", "regex", "uri-reference")),
    ({"type": "integer", "format": "uint64"}, [0, 7], [-1]),
    ({"type": ["integer", "null"], "format": "uint8"}, [255, None], [256, -1]),
    ({"type": "integer", "format": "uint8", "minimum": -5}, [-5], [256]),
    ({"type": "integer", "format": "int32", "enum": [5]}, [5], [6]),
    ({"type": "string", "format": "uuid"}, ["12345678-1234-1234-1234-123456789abc"], ["a"]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [2**53], [2**53 + 1, -1]),
    ({"type": "number", "exclusiveMinimum": -1e300, "maximum": 1e308}, [-1.5], ["a"]),
    ({"type": "null", "x-order": 1, "enumNames": ["a"], "x-guidance": {}, "typo": [1], "$anchor": "a"}, [None], [1]),
    ({"type": "object", "additionalProperties": False, "propertyNames": {"type": "string"}}, [{}], [[]]),
]


@pytest.mark.parametrize(("given", "allowed", "refused"), ANNOTATED, ids=lambda value: str(value)[:60])
def test_formats_and_keywords_that_constrain_nothing_are_annotations(
    given: dict[str, Any], allowed: list[Any], refused: list[Any]
) -> None:
    made = schema(CLOSED | {"properties": {"a": given}, "required": ["a"]}, strict=True)
    assert [value for value in allowed if not follows(made, json.dumps({"a": value}))] == []
    assert [value for value in refused if follows(made, json.dumps({"a": value}))] == []


def test_digits_are_of_all_scripts_in_expressions_and_ascii_in_schemas() -> None:
    """As docs/openai.md says."""
    expression, pattern = create_regex_grammar(r"\d\w", "r"), schema({"type": "string", "pattern": r"^\d\w$"})
    assert follows(expression, "٣é") and follows(expression, "3e")
    assert follows(pattern, '"3e"') and not follows(pattern, '"٣e"') and not follows(pattern, '"3é"')
    assert not follows(create_regex_grammar("[0-9]", "r"), "٣")


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"


def test_other_members_are_used_where_a_pattern_cannot_be_enforced() -> None:
    price = {"anyOf": [{"type": "string", "pattern": DECIMAL}, {"type": "number"}, {"type": "null"}]}
    made = schema({"type": "object", "properties": {"a": price, "b": {"$ref": "#/properties/a/anyOf/1"}}})
    assert follows(made, '{"a": 1.5, "b": 2}') and follows(made, '{"a": null}') and not follows(made, '{"a": "1.5"}')
    harmless = {"type": "string", "pattern": r"^[(?=]\((?:a)\)\\$"}
    assert follows(schema(harmless), json.dumps("?(a)\\"))


CLOSED = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "place", "reason"),
    [
        ({"type": "object"}, "", "additionalProperties: false"),
        (CLOSED | {"properties": {"a": {}}}, "", "'a' in required"),
        (
            CLOSED | {"required": ["a"], "properties": {"a": {"items": {"properties": {}}}}},
            ".properties.a.items",
            "addi",
        ),
    ],
)
def test_strict_schemas_follow_openais_rules(given: dict[str, Any], place: str, reason: str) -> None:
    schema(given)
    with pytest.raises(InvalidRequest, match=reason) as caught:
        schema(given, strict=True)
    assert caught.value.param == f"s{place}"
    schema(CLOSED | {"required": ["a"], "properties": {"a": {"type": ["null", "string"]}}}, strict=True)


@pytest.mark.parametrize("properties", [9, True, "ab", ["a"]])
def test_what_is_no_schema_is_refused_where_it_is_to_be_strict_too(properties: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be") as caught:
        schema(CLOSED | {"properties": properties}, strict=True)
    assert caught.value.param == "s.properties"
