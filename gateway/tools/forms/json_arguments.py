"""Calls whose name stands in front of their arguments, a JSON object: DeepSeek, Kimi, Mistral, harmony and others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.tools.cursor import NotACall, Parsing, words_of
from gateway.tools.forms.form import INDEX, NAME, CallText, LarkGrammar
from gateway.tools.forms.json_text import read_object
from gateway.tools.forms.values import as_json


@dataclass(frozen=True)
class JsonArguments:
    """A call is `first`, which has the placeholder NAME, the arguments as a JSON object, and `tail`.

    # f[ARGS]{"x": 1} has the first "NAME[ARGS]" and an empty tail
    """

    first: str
    tail: str = ""
    others: tuple[str, ...] = field(default=())
    """Other texts that models write in front of the arguments, in place of `first`. They are read; grammars and `write`
    use `first` alone."""
    index: str = "[0-9]+"
    """Regular expression of the number or id for which INDEX stands in `first`, the text in front of the arguments."""

    @property
    def texts(self) -> tuple[str, ...]:
        return self.first, self.tail, *self.others

    def read(self, call: CallText) -> Parsing[None]:
        cursor = call.cursor
        begin = cursor.at
        for first in (self.first, *self.others):
            try:
                name = yield from self._read_name(call, first)
                break
            except NotACall:
                cursor.at = begin
        else:
            raise NotACall
        yield from cursor.skip_space()
        yield call.start(name)
        yield from read_object(call)
        yield from cursor.follows(self.tail)  # a model may end its output in place of it

    def _read_name(self, call: CallText, first: str) -> Parsing[str]:
        cursor = call.cursor
        before, _, after = first.partition(NAME)
        yield from cursor.expect(before)
        yield from cursor.skip_space()
        sign, index, rest = after.rpartition(INDEX)
        end = words_of(rest)
        if end:
            name, _ = yield from cursor.until([end[0]])
            yield from cursor.expect(" ".join(end[1:]))
        else:
            name, brace = yield from cursor.until(["{"])
            cursor.at -= len(brace)
        # "f code<|message|>" is a call of f: harmony may write a type of the arguments behind the name
        name = name.strip().partition(" ")[0]
        if index:
            name = re.sub(f"{re.escape(sign)}{self.index}$", "", name)
        if name not in call.schemas:
            raise NotACall
        return name

    def head(self, name: str) -> str:
        return self.first.replace(NAME, name).partition(INDEX)[0]

    def rest(self, name: str, schema: Mapping[str, Any], label: str, grammar: LarkGrammar) -> str:
        number = ""
        _, found, after = self.first.partition(INDEX)
        if found:
            number = f"/{self.index}/ {grammar.spell(after)}"
        return f"{number} {grammar.schema(label, schema)} {grammar.spell(self.tail)}"

    def write(self, name: str, arguments: Mapping[str, Any], index: int) -> str:
        head = self.first.replace(NAME, name).replace(INDEX, str(index))
        return head + as_json(arguments) + self.tail
