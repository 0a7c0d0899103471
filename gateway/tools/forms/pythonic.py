"""Calls that are Python: `f(city="Paris", days=3)`. Llama 4, Olmo 3, LFM2, Gemma 3 and others.

Values are Python's literals: `True`, `None`, `'text'`, lists and dictionaries. A string is passed on while it is
written, another value when it is complete.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.tools.cursor import NotACall, Parsing
from gateway.tools.forms.form import CallText, LarkGrammar
from gateway.tools.forms.python_rules import arguments_rule, as_literal
from gateway.tools.forms.values import as_json, converted, parameter_schema, string_inside

_KEY = re.compile(r"[a-zA-Z_]\w*")
_NAME_PART = re.compile(r"[a-zA-Z0-9_.:-]+")
_QUOTES = ('"""', "'''", '"', "'")
_LENGTHS = {"x": 4, "u": 6, "U": 10}
"""Characters of an escape by its letter, with the backslash."""
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": "", "0": "\0", "b": "\b", "f": "\f"}
"""What an escape of one character stands for."""
_JSON_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}
MAX_VALUE = 1 << 20
"""Maximum number of characters of an argument that is not a string. Text with a longer one is not read as a call."""


@dataclass(frozen=True)
class Pythonic:
    """A call is a Python call with keyword arguments: `f(city="Paris", days=3)`."""

    @property
    def texts(self) -> tuple[str, ...]:
        return ()

    # reading

    def read(self, call: CallText) -> Parsing[None]:
        cursor = call.cursor
        yield from cursor.skip_space()
        name = yield from self._read_word(call)
        if name not in call.schemas or not (yield from cursor.follows("(")):
            raise NotACall
        yield call.start(name)
        yield call.arguments("{")
        separator = ""
        while not (yield from cursor.follows(")")):
            if separator:
                yield from cursor.expect(",")
                if (yield from cursor.follows(")")):
                    break
            yield from cursor.skip_space()
            key = yield from self._read_word(call)
            if not _KEY.fullmatch(key):
                raise NotACall
            yield from cursor.expect("=")
            yield from cursor.skip_space()
            yield call.arguments(f"{separator}{as_json(key)}: ")
            yield from self._read_value(call, parameter_schema(call.schemas[name], key))
            separator = ", "
        yield call.arguments("}")

    def _read_word(self, call: CallText) -> Parsing[str]:
        cursor = call.cursor
        while True:
            found = _NAME_PART.match(cursor.text, cursor.at)
            if found is None and cursor.has(1):
                raise NotACall
            if found is not None and found.end() < len(cursor.text):
                cursor.at = found.end()
                return found[0]
            if found is not None and not any(name.startswith(found[0]) for name in call.schemas) and call.name is None:
                raise NotACall
            if not (yield from cursor.more()):
                raise NotACall

    def _read_value(self, call: CallText, schema: Any) -> Parsing[None]:
        cursor = call.cursor
        for quote in _QUOTES:
            if (yield from cursor.matches(quote)):
                yield from converted(call, self._read_string(call, quote), schema)
                return
        begin = cursor.at
        end = yield from self._end_of_value(call)
        try:
            value = _literal(cursor.text[begin:end].strip())
            text = as_json(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise NotACall from None
        cursor.at = end
        yield call.arguments(text)

    def _read_string(self, call: CallText, quote: str) -> Parsing[None]:
        """Pass a string on while it is written; the cursor stands behind its opening quote."""
        cursor = call.cursor
        yield call.arguments('"')
        while True:
            at = cursor.at
            is_complete = False
            while at < len(cursor.text):
                if cursor.text.startswith(quote, at):
                    is_complete = True
                    break
                if quote.startswith(cursor.text[at:]) and len(quote) > 1:
                    break  # a part of the closing quotes
                if cursor.text[at] != "\\":
                    at += 1
                    continue
                length = _length_of_escape(cursor.text, at)
                if length is None:
                    break
                at += length
            if at > cursor.at:
                yield call.arguments(string_inside(_unescaped(cursor.text[cursor.at : at])))
                cursor.at = at
            if is_complete:
                cursor.at += len(quote)
                yield call.arguments('"')
                return
            if not (yield from cursor.more()):
                raise NotACall

    def _end_of_value(self, call: CallText) -> Parsing[int]:
        """Return the index behind a value that is no string: at the comma or the bracket that follows it."""
        cursor = call.cursor
        at = cursor.at
        depth = 0
        quote = ""
        while True:
            while at < len(cursor.text):
                char = cursor.text[at]
                if quote:
                    if char == "\\":
                        at += 1
                    elif char == quote:
                        quote = ""
                elif char in "\"'":
                    quote = char
                elif char in "([{":
                    depth += 1
                elif depth == 0 and char in ",)":
                    return at
                elif char in ")]}":
                    depth -= 1
                at += 1
            if at - cursor.at > MAX_VALUE or not (yield from cursor.more()):
                raise NotACall

    # writing

    def head(self, name: str) -> str:
        return f"{name}("

    def rest(self, name: str, schema: Mapping[str, Any], label: str, grammar: LarkGrammar) -> str:
        return arguments_rule(schema, label, grammar)

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        pairs = [f"{key}={as_literal(value)}" for key, value in arguments.items()]
        return f"{name}({', '.join(pairs)})"


def _length_of_escape(text: str, at: int) -> int | None:
    """Return the length of the escape that begins at index `at`; None where it is not complete."""
    if at + 1 >= len(text):
        return None
    length = _LENGTHS.get(text[at + 1], 2)
    if at + length > len(text):
        return None
    return length


def _unescaped(text: str) -> str:
    """Return what a string's text stands for, which holds whole escapes alone. An unknown escape stands for itself."""
    # "a\\n" -> "a" and a line break
    found = ""
    at = 0
    while at < len(text):
        if text[at] != "\\":
            found += text[at]
            at += 1
            continue
        length = _length_of_escape(text, at) or 2
        found += _escaped(text[at : at + length])
        at += length
    return found


def _escaped(escape: str) -> str:
    # "\\x41" -> "A"
    letter = escape[1:2]
    if letter in _LENGTHS:
        try:
            return chr(int(escape[2:], 16))
        except (ValueError, OverflowError):
            return escape
    return _ESCAPED.get(letter, escape)


class _JsonWords(ast.NodeTransformer):
    """Puts Python's words in the place of JSON's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _JSON_WORDS:
            return ast.Constant(_JSON_WORDS[node.id])
        return node


def _literal(text: str) -> Any:
    """Return the value of a literal, in which templates and models mix JSON's words and Python's. Raises ValueError."""
    # '{"a": true, "b": None}' -> {"a": True, "b": None}
    return ast.literal_eval(_JsonWords().visit(ast.parse(text, mode="eval")))
