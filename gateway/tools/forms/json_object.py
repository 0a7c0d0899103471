"""Calls that are one JSON object with a name and arguments: Hermes, Granite, Llama 3, Mistral's first and others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.tools.cursor import NotACall, Parsing
from gateway.tools.forms.form import INDEX, CallText, LarkGrammar
from gateway.tools.forms.json_text import parse_object, read_object, scan_object
from gateway.tools.forms.values import as_json
from gateway.tools.json_scan import JsonScan

_TOOL_NAME = "[a-zA-Z0-9_.:-]{1,128}"
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({*_NAMES, *_ARGUMENTS, "type", "function", "tool_call_id"})
"""Keys that a call may begin with."""
_HEAD = re.compile(
    rf'\{{\s*(?:"(?:tool_call_id|id)"\s*:\s*"[^"]*"\s*,\s*)?"(?:{"|".join(_NAMES)})"\s*:\s*"({_TOOL_NAME})"\s*,\s*'
    rf'"(?:{"|".join(_ARGUMENTS)})"\s*:\s*(?=\{{)'
)
"""The start of a call up to its arguments."""
_FIRST = re.compile(r'\{\s*(?:"((?:[^"\\]|\\.)*)"(?:\s*:\s*"((?:[^"\\]|\\.)*)")?|[^\s"])', re.DOTALL)
"""The first key of an object, and its value if that is a string; neither if no key begins."""
_PIECES = re.compile(r'"[^"]*"|[{}]|[:,] ')
MAX_HEAD = 512
"""Maximum number of characters of a call in front of its arguments. A call with more of them is parsed only once it is
complete, so its arguments are not streamed."""


@dataclass(frozen=True)
class JsonObject:
    """A call is a JSON object such as `{"name": "f", "arguments": {"x": 1}}`, whose keys depend on the model."""

    arguments_key: str = "arguments"
    name_key: str = "name"
    first: str = ""
    """Text of the keys in front of the name, in which INDEX stands for the call's number: `"tool_call_id": "INDEX", `.
    Empty = there are none."""
    last: str = ""
    """Text of the keys that may follow the arguments, in which INDEX stands for nine letters and digits:
    `, "id": "INDEX"`. Empty = there are none."""
    is_exact: bool = field(default=True)
    """Whether an answer under the grammar must become a call if it begins with the text in front of the arguments.
    False = it may also go on as other JSON: the grammar has one lexeme for each piece of JSON, not one for that text.
    """

    @property
    def texts(self) -> tuple[str, ...]:
        return ()

    def _head(self, name: str) -> str:
        return f'{{{self.first}"{self.name_key}": "{name}", "{self.arguments_key}": '

    def read(self, call: CallText) -> Parsing[None]:
        cursor = call.cursor
        yield from cursor.skip_space()
        if not (yield from cursor.matches("{")):
            raise NotACall
        cursor.at -= 1
        begin = cursor.at
        scan = JsonScan(begin)
        while True:
            head = _HEAD.match(cursor.text, begin, begin + MAX_HEAD)
            if head is not None and head[1] in call.schemas:
                yield from self._read_in_order(call, head)
                return
            first = _FIRST.match(cursor.text, begin, begin + MAX_HEAD)
            if first is not None and not _may_begin_call(first, call):
                raise NotACall
            scan.scan(cursor.text)
            if scan.end is not None:
                yield from self._read_whole(call, scan.end)
                return
            if not (yield from cursor.more()):
                raise NotACall

    def _read_in_order(self, call: CallText, head: re.Match[str]) -> Parsing[None]:
        # {"name": "f", "arguments": {"x": 1}}: the arguments are passed on while they are written
        cursor = call.cursor
        begin = cursor.at
        cursor.at = head.end()
        yield call.start(head[1])
        yield from read_object(call)
        yield from scan_object(call, begin, is_arguments=False)

    def _read_whole(self, call: CallText, end: int) -> Parsing[None]:
        # {"arguments": {"x": 1}, "name": "f"}, or arguments in a string
        cursor = call.cursor
        value = parse_object(cursor.text[cursor.at : end])
        if value is None:
            raise NotACall
        if isinstance(value.get("function"), dict):
            value = value["function"]
        name = value.get("name", value.get("tool_name"))
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = orjson.dumps(arguments).decode()
        if not isinstance(name, str) or name not in call.schemas or parse_object(arguments) is None:
            raise NotACall
        cursor.at = end
        yield call.start(name)
        yield call.arguments(arguments)

    def head(self, name: str) -> str:
        if not self.is_exact:
            return ""
        return self._head(name).partition(INDEX)[0]

    def rest(self, name: str, schema: Mapping[str, Any], label: str, grammar: LarkGrammar) -> str:
        _, found, after = self._head(name).partition(INDEX)
        start = ""
        if not self.is_exact:
            # In pieces of JSON: the lexer does not go back behind a lexeme's start.
            start = " ".join(json.dumps(piece) for piece in _PIECES.findall(self._head(name)))
        elif found:
            start = f"/[0-9]+/ {grammar.spell(after)}"
        end = '"}"'
        if self.last:
            before, _, behind = self.last.partition(INDEX)
            end = f'("}}" | {grammar.spell(before)} /[a-zA-Z0-9]{{9}}/ {grammar.spell(behind + "}")})'
        return f"{start} {grammar.schema(label, schema)} {end}"

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        head = self._head(name).replace(INDEX, str(index))
        return head + as_json(arguments) + "}"


def _may_begin_call(first: re.Match[str], call: CallText) -> bool:
    # {"name": "f" may begin a call of f, {"x" no call
    key, value = first.groups()
    if key in _NAMES and value is not None:
        return value in call.schemas
    return key in _KEYS
