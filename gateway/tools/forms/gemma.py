"""Calls as FunctionGemma and Gemma 4 write them: `call:f{city:<escape>Paris<escape>,days:3}`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.tools.cursor import NotACall, Parsing, overlap
from gateway.tools.forms.form import CallText, LarkGrammar
from gateway.tools.forms.lark_values import NUMBER, properties_in_order
from gateway.tools.forms.values import STRING, as_json, choices_of, converted, parameter_schema, string_inside, types_of

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORD = re.compile(r"[^,}\]]*")
_WORDS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "none": "null",
    "True": "true",
    "False": "false",
    "None": "null",
}
_ANY = 'gemma_any: gemma_string | gemma_number | "true" | "false" | "null" | gemma_list | gemma_object'
MAX_DEPTH = 64
"""Maximum depth of nested objects and lists in an argument. Deeper text is not read as a call."""


@dataclass(frozen=True)
class Gemma:
    """A call is `call:NAME{key:value,...}`. The text `quote` stands in front of each string and behind it."""

    quote: str
    is_sorted: bool = False
    """Whether the grammar requires parameters in alphabetical order, ignoring case. False = in the schema's order."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.quote,)

    # reading

    def read(self, call: CallText) -> Parsing[None]:
        cursor = call.cursor
        yield from cursor.expect("call:")
        name, _ = yield from cursor.until(["{"])
        name = name.strip()
        if name not in call.schemas:
            raise NotACall
        yield call.start(name)
        yield from self._read_object(call, 0, call.schemas[name])

    def _read_object(self, call: CallText, depth: int, schema: Any) -> Parsing[None]:
        """Read an object behind its brace."""
        cursor = call.cursor
        yield call.arguments("{")
        separator = ""
        while not (yield from cursor.follows("}")):
            if separator:
                yield from cursor.expect(",")
            yield from cursor.skip_space()
            is_quoted = yield from cursor.matches(self.quote)
            if is_quoted:
                key, _ = yield from cursor.until([self.quote])
                yield from cursor.expect(":")
            else:
                key, _ = yield from cursor.until([":"])
            yield call.arguments(f"{separator}{as_json(key.strip())}: ")
            yield from self._read_value(call, depth + 1, parameter_schema(schema, key.strip()))
            separator = ", "
        yield call.arguments("}")

    def _read_list(self, call: CallText, depth: int) -> Parsing[None]:
        cursor = call.cursor
        yield call.arguments("[")
        separator = ""
        while not (yield from cursor.follows("]")):
            if separator:
                yield from cursor.expect(",")
                yield call.arguments(separator)
            yield from self._read_value(call, depth + 1, {})
            separator = ", "
        yield call.arguments("]")

    def _read_value(self, call: CallText, depth: int, schema: Any) -> Parsing[None]:
        cursor = call.cursor
        if depth > MAX_DEPTH:
            raise NotACall
        yield from cursor.skip_space()
        if (yield from cursor.matches(self.quote)):
            yield from converted(call, self._read_string(call), schema)
        elif (yield from cursor.matches("{")):
            yield from self._read_object(call, depth, schema)
        elif (yield from cursor.matches("[")):
            yield from self._read_list(call, depth)
        else:
            yield from self._read_word(call)

    def _read_string(self, call: CallText) -> Parsing[None]:
        cursor = call.cursor
        yield call.arguments('"')
        while True:
            end = cursor.text.find(self.quote, cursor.at)
            index = end
            if end < 0:
                index = len(cursor.text) - overlap(cursor.text[cursor.at :], self.quote)
            if index > cursor.at:
                yield call.arguments(string_inside(cursor.text[cursor.at : index]))
                cursor.at = index
            if end >= 0:
                cursor.at += len(self.quote)
                yield call.arguments('"')
                return
            if not (yield from cursor.more()):
                raise NotACall

    def _read_word(self, call: CallText) -> Parsing[None]:
        """Read a number, a word of JSON, or text without quotes."""
        cursor = call.cursor
        while True:
            found = _WORD.match(cursor.text, cursor.at)
            assert found is not None
            if found.end() < len(cursor.text):
                break
            if not (yield from cursor.more()):
                raise NotACall
        word = found[0].strip()
        cursor.at = found.end()
        if _NUMBER.fullmatch(word):
            yield call.arguments(json.dumps(json.loads(_plain_number(word))))
        else:
            yield call.arguments(_WORDS.get(word) or as_json(word))

    # writing

    def head(self, name: str) -> str:
        return f"call:{name}"

    def rest(self, name: str, schema: Mapping[str, Any], label: str, grammar: LarkGrammar) -> str:
        self._add_rules(grammar)
        return self._object(schema, label, grammar)

    def _add_rules(self, grammar: LarkGrammar) -> None:
        if not grammar.share(_ANY):
            return
        quote = grammar.spell(self.quote)
        string = grammar.text_up_to("gemma_text", self.quote)
        grammar.rules += [
            f"gemma_string: {quote} {string}",
            f"gemma_number: {NUMBER}",
            r"gemma_integer: /-?(0|[1-9][0-9]*)/",
            r"gemma_key: /[a-zA-Z0-9_.-]+/",
            'gemma_list: "[" (gemma_any ("," gemma_any)*)? "]"',
            'gemma_object: "{" (gemma_key ":" gemma_any ("," gemma_key ":" gemma_any)*)? "}"',
        ]

    def _object(self, schema: Mapping[str, Any], label: str, grammar: LarkGrammar) -> str:
        properties: Mapping[str, Any] = schema.get("properties") or {}
        if not properties:
            if schema.get("additionalProperties", True) is False:
                return '"{" "}"'
            return "gemma_object"
        if self.is_sorted:
            schema = {**schema, "properties": dict(sorted(properties.items(), key=_lower_key))}
        sequence = properties_in_order(schema, label, grammar, ":", '","', self._value)
        return f'"{{" {sequence} "}}"'

    def _value(self, schema: Any, rule: str, grammar: LarkGrammar) -> str:
        quote = grammar.spell(self.quote)
        choices = choices_of(schema)
        if choices:
            ways = [self._choice(choice, quote) for choice in choices]
            return "(" + " | ".join(ways) + ")"
        kinds = {
            STRING: "gemma_string",
            "integer": "gemma_integer",
            "number": "gemma_number",
            "boolean": '"true" | "false"',
            "null": '"null" | "None"',
            "array": "gemma_list",
        }
        ways = list[str]()
        for kind in sorted(types_of(schema)):
            if kind == "object":
                ways.append(self._object(schema, rule, grammar))
            else:
                ways.append(kinds[kind])
        return "(" + " | ".join(ways or ["gemma_any"]) + ")"

    def _choice(self, value: Any, quote: str) -> str:
        if isinstance(value, str):
            return f"{quote} {as_json(value)} {quote}"
        return json.dumps(json.dumps(value))

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        return f"call:{name}{self._written(arguments)}"

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, Mapping):
            items = list(value.items())
            if self.is_sorted:
                items.sort(key=_lower_key)
            pairs = [f"{key}:{self._written(item)}" for key, item in items]
            return "{" + ",".join(pairs) + "}"
        if isinstance(value, list):
            return "[" + ",".join(self._written(item) for item in value) + "]"
        return json.dumps(value)


def _lower_key(item: tuple[str, Any]) -> str:
    # Jinja's dictsort ignores case: user_id comes before userId
    return item[0].lower()


def _plain_number(word: str) -> str:
    # JSON allows no zero in front: "007" is 7
    sign = "-" if word.startswith("-") else ""
    digits = word.removeprefix("-").lstrip("0")
    if not digits or not digits[0].isdigit():
        digits = "0" + digits
    return sign + digits
