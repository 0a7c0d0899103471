"""Calls whose parameters stand between tags, with values as plain text: Qwen3-Coder, GLM, MiniMax, Seed, DSML, Step.

The text of a value says nothing of its type: the tool's schema does. A string is passed on while it is written, another
value when it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.tools.cursor import NotACall, Parsing, overlap, words_of
from gateway.tools.forms.form import KEY, NAME, CallText, LarkGrammar
from gateway.tools.forms.lark_values import PYTHON_WORDS, text_rule
from gateway.tools.forms.values import (
    STRING,
    as_json,
    choices_of,
    is_text,
    parameter_schema,
    string_inside,
    types_of,
    value_of,
)

_SPACE = r"xml_space: /[ \t\r\n]*/"


@dataclass(frozen=True)
class XmlParameters:
    """A call is `first`, with the placeholder NAME, a parameter for each argument, and `tail`.

    A parameter is `parameter_head`, with the placeholder KEY, the value, and `parameter_tail`.

    # <function=f><parameter=x>1</parameter></function> has the first "<function=NAME>", the parameter_head
    # "<parameter=KEY>", the parameter_tail "</parameter>" and the tail "</function>"
    """

    first: str
    parameter_head: str
    parameter_tail: str
    tail: str
    has_lines: bool = False
    """Whether a value stands on lines of its own. The line breaks around it are then not part of the value."""
    has_kinds: bool = False
    """Whether `true">` or `false">` follows `parameter_head`: true for a value that is a string, false for another."""

    @property
    def texts(self) -> tuple[str, ...]:
        return self.first, self.parameter_head, self.parameter_tail, self.tail

    # reading

    def read(self, call: CallText) -> Parsing[None]:
        cursor = call.cursor
        before, _, after = self.first.partition(NAME)
        yield from cursor.expect(before)
        name = yield from self._read_name(call, after)
        if name not in call.schemas:
            raise NotACall
        yield call.start(name)
        yield call.arguments("{")
        separator = ""
        while not (yield from cursor.follows(self.tail)):
            yield from self._read_parameter(call, separator)
            separator = ", "
        yield call.arguments("}")

    def _read_name(self, call: CallText, after: str) -> Parsing[str]:
        # "f" in '<function=f>' and, where a parameter or the tail ends it, in 'f\n<arg_key>'
        cursor = call.cursor
        end = after.strip()
        if end:
            name, _ = yield from cursor.until([end])
            return name.strip()
        ends = [words_of(text)[0] for text in (self.parameter_head.partition(KEY)[0], self.tail) if text]
        name, found = yield from cursor.until(ends)
        cursor.at -= len(found)
        return name.strip()

    def _read_parameter(self, call: CallText, separator: str) -> Parsing[None]:
        cursor = call.cursor
        before, _, after = self.parameter_head.partition(KEY)
        yield from cursor.expect(before)
        words = words_of(after)
        key, _ = yield from cursor.until([words[0]])
        key = key.strip()
        yield from cursor.expect(" ".join(words[1:]))
        schema: Any = parameter_schema(call.schemas[call.name or ""], key)
        if self.has_kinds:
            kind, _ = yield from cursor.until(['">'])
            if kind.endswith("true"):
                schema = {"type": STRING}
            elif is_text(schema):
                schema = {"type": ["object", "array", "number", "boolean", "null"]}
        yield call.arguments(f"{separator}{as_json(key)}: ")
        if is_text(schema):
            yield call.arguments('"')
            yield from self._read_value(call, is_streamed=True)
            yield call.arguments('"')
            return
        text = yield from self._read_value(call, is_streamed=False)
        yield call.arguments(value_of(text, schema))

    def _read_value(self, call: CallText, *, is_streamed: bool) -> Parsing[str]:
        """Return the text of a value, or pass it on while it comes, and return nothing."""
        cursor = call.cursor
        if self.has_lines and not (yield from cursor.matches("\r\n")):
            yield from cursor.matches("\n")
        value = ""
        end = self.parameter_tail.strip()
        while True:
            index = cursor.text.find(end, cursor.at)
            if index < 0:
                is_end = False
                index = len(cursor.text) - self._num_held(cursor.text[cursor.at :])
            else:
                is_end = yield from self._is_end(call, index + len(end))
            text = cursor.text[cursor.at : index]
            if is_end:
                text = self._without_line_end(text)
                cursor.at = index + len(end)
            else:
                cursor.at = index
            if is_streamed and text:
                yield call.arguments(string_inside(text))
            elif text:
                value += text
            if is_end:
                return value
            if cursor.text.startswith(end, cursor.at):
                # the tag is none that ends the value, but a part of it
                if is_streamed:
                    yield call.arguments(string_inside(end))
                else:
                    value += end
                cursor.at += len(end)
            elif not (yield from cursor.more()):
                raise NotACall

    def _is_end(self, call: CallText, at: int) -> Parsing[bool]:
        """Return whether the tag that ends at index `at` ends the value: another parameter or the call's tail follows.

        Where the output ends behind the tag, it does.
        """
        cursor = call.cursor
        begin = cursor.at
        cursor.at = at
        yield from cursor.skip_space()
        if cursor.is_final and not cursor.has(1):
            cursor.at = begin
            return True
        is_end = False
        for form in (self.tail, self.parameter_head.partition(KEY)[0]):
            is_end = is_end or (yield from cursor.follows(form))
        is_cut = cursor.is_final and self._may_follow(cursor.text[cursor.at :])
        cursor.at = begin
        return is_end or is_cut

    def _may_follow(self, text: str) -> bool:
        return self.tail.strip().startswith(text.strip()) or self.parameter_head.startswith(text.strip())

    def _num_held(self, text: str) -> int:
        """Return how many characters at the end of a value's text may belong to the tag that ends it."""
        # "a\n</par" with has_lines: 6
        held = overlap(text, self.parameter_tail.strip())
        if self.has_lines:
            held += _length_of_line_end(text[: len(text) - held])
        return held

    def _without_line_end(self, text: str) -> str:
        if self.has_lines and not text.endswith("\r"):
            return text[: len(text) - _length_of_line_end(text)]
        return text

    # writing

    def head(self, name: str) -> str:
        return self.first.replace(NAME, name).rstrip()

    def rest(self, name: str, schema: Mapping[str, Any], label: str, grammar: LarkGrammar) -> str:
        properties: Mapping[str, Any] = schema.get("properties") or {}
        required = schema.get("required") or ()
        pieces = ["xml_space"]
        grammar.share(_SPACE)
        for number, (key, value) in enumerate(properties.items()):
            rule = f"{label}_{number}"
            grammar.rules.append(f"{rule}: {self._parameter(key, value, rule, grammar)} xml_space")
            optional = "" if key in required else "?"
            pieces.append(rule + optional)
        if schema.get("additionalProperties", True) is not False and not properties:
            rule = f"{label}_any"
            grammar.rules.append(f"{rule}: {self._any_parameter(rule, grammar)} xml_space")
            pieces.append(f"{rule}*")
        pieces.append(grammar.spell(self.tail.lstrip()))
        return " ".join(pieces)

    def _parameter(self, key: str, schema: Any, rule: str, grammar: LarkGrammar) -> str:
        head = self.parameter_head.replace(KEY, key)
        types = types_of(schema)
        if self.has_kinds and STRING in types and len(types) > 1:
            text = grammar.text_up_to(f"{rule}_text", self.parameter_tail.strip())
            value = f"{grammar.schema(f'{rule}_value', schema)} {grammar.spell(self.parameter_tail.strip())}"
            return f'{grammar.spell(head)} ("true\\">" {text} | "false\\">" {value})'
        if self.has_kinds:
            head += f'{"true" if is_text(schema) else "false"}">'
        line = "\n" if self.has_lines else ""
        end = line + self.parameter_tail.strip()
        if is_text(schema):
            return f"{grammar.spell(head + line)} {text_rule(schema, end, rule, grammar)}"
        if STRING in types:
            return f"{grammar.spell(head + line)} {grammar.text_up_to(f'{rule}_text', end)}"
        value = grammar.schema(f"{rule}_value", schema)
        words = PYTHON_WORDS.get(next(iter(types), ""))
        if words is not None and len(types) == 1 and not choices_of(schema):
            value = f"({value} | {words})"
        return f"{grammar.spell(head + line)} {value} {grammar.spell(end)}"

    def _any_parameter(self, rule: str, grammar: LarkGrammar) -> str:
        before, _, after = self.parameter_head.partition(KEY)
        line = "\n" if self.has_lines else ""
        kind = ""
        if self.has_kinds:
            kind = '("true" | "false") "\\">"'
        end = grammar.text_up_to(f"{rule}_text", line + self.parameter_tail.strip())
        return f"{grammar.spell(before)} /[a-zA-Z0-9_.-]+/ {grammar.spell(after + line)} {kind} {end}"

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        text = self.first.replace(NAME, name)
        for key, value in arguments.items():
            text += self.parameter_head.replace(KEY, key)
            if self.has_kinds:
                text += f'{"true" if isinstance(value, str) else "false"}">'
            written = value if isinstance(value, str) else as_json(value)
            text += f"\n{written}\n" if self.has_lines else written
            text += self.parameter_tail
        return text + self.tail


def _length_of_line_end(text: str) -> int:
    """Return the length of the line break at the end of `text`, or of what may become one; 0 without one."""
    if text.endswith("\r\n"):
        return 2
    return int(text.endswith(("\n", "\r")))
