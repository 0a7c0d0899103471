"""Reads one answer's text as it comes: its reasoning, its content and its calls of tools. Pure.

What it finds depends on the text alone, never on how it was cut into pieces. A call that cannot be read is content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import orjson

from gateway.tools.families import TOOL_NAME, Family, Marks
from gateway.tools.reasoning import begins_reasoning

MAX_GAP = 256
"""Characters around the JSON of calls, and of white space. Doubled, text after a marker that announces nothing is held
back for longer."""
_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*"({TOOL_NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_FIRST = re.compile(r'\{\s*(?:"((?:[^"\\]|\\.)*)"(?:\s*:\s*"((?:[^"\\]|\\.)*)")?|[^\s"])', re.DOTALL)
"""The first key of an object, and its value if that is a string; neither where no key begins."""
_KEYS = frozenset({"name", "type", "function", "arguments", "parameters"})
"""What a call may begin with."""
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class Content:
    text: str
    end: int
    """Characters of the answer's text up to the end of this one."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments, as the model writes them."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallUnread:
    """The call that was begun is none; its whole text follows as content."""

    index: int


Part = Content | Reasoning | CallBegun | Arguments | CallUnread


class _State(Enum):
    START = auto()
    """Before everything: reasoning may begin."""
    REASONING = auto()
    CONTENT = auto()
    GAP = auto()
    """After a marker or after a call: JSON may follow."""
    CALL = auto()
    """Inside the JSON of a call."""


class Reader:
    """Give it the text with `push`, and call `finish` once."""

    def __init__(
        self, family: Family | None, names: Set[str], marks: Marks | None, in_reasoning: bool, max_calls: int | None
    ) -> None:
        """Family: None = there are no calls. names: tools that may be called. marks: None = there is no reasoning.

        in_reasoning: the prompt began it. max_calls: what follows so many calls is dropped; None = no limit.
        """
        self._family = family
        self._names = names
        self._marks = marks
        self._max_calls = max_calls
        self._buffer = ""
        self._state = _State.REASONING if in_reasoning else _State.CONTENT if marks is None else _State.START
        self._skips_space = in_reasoning
        """White space that comes next belongs to a marker."""
        self._is_first = True
        """Nothing but white space has come since the reasoning."""
        self._amid = False
        """A call has been read, and no text since."""
        self._index = 0
        """Of the call that is read, or comes next."""
        self._scan = _Scan(0)
        self._named: str | None = None
        self._arguments_at = self._sent = 0
        """Where in the buffer the arguments begin, and up to where they were handed out."""
        self.num_calls = 0
        """Whole ones."""
        self.num_chars = 0
        """Of text so far."""
        self.reasoning_end: int | None = 0 if self._state is _State.CONTENT else None
        """Characters of text before the reasoning was over; None while it is not."""

    def push(self, text: str) -> list[Part]:
        """Return what has become certain."""
        self._buffer += text
        self.num_chars += len(text)
        return list(self._parts(final=False))

    def finish(self, is_cut: bool) -> list[Part]:
        """Return the rest. is_cut: by a limit or a stop, not by the model: a call that was begun stays one."""
        if is_cut and ((self._state is _State.CALL and self._named is not None) or self._is_closing()):
            self._buffer = ""
            return []
        return list(self._parts(final=True))

    def _is_closing(self) -> bool:
        """Return whether what is held back after a call is the beginning of what ends calls, or of what leads on."""
        if self._state is not _State.GAP or not self._amid or self._family is None:
            return False
        begun, family = _without_space(self._buffer), self._family
        tail = "" if family.is_object else family.tail
        return any(_without_space(tail + text).startswith(begun) for text in (family.closing, family.between))

    def _parts(self, final: bool) -> Iterator[Part]:
        step = {
            _State.START: self._start,
            _State.REASONING: self._reason,
            _State.CONTENT: self._read_content,
            _State.GAP: self._gap,
            _State.CALL: self._call,
        }
        before = None
        while before != (before := (self._state, len(self._buffer))):
            yield from step[self._state](final)

    def _start(self, final: bool) -> Iterator[Part]:
        assert self._marks is not None
        mark = self._marks[0]
        begins = begins_reasoning(self._buffer, mark, final=final)
        if begins:
            self._buffer = self._buffer.lstrip().removeprefix(mark)
            self._state, self._skips_space = _State.REASONING, True
        elif begins is not None:
            self._state, self.reasoning_end = _State.CONTENT, 0
        yield from ()

    def _reason(self, final: bool) -> Iterator[Part]:
        assert self._marks is not None
        before, mark, rest = self._buffer.partition(self._marks[1])
        text = self._released(before if mark else self._buffer, "" if mark else self._marks[1], final)
        if text:
            yield Reasoning(text)
        if mark:
            self._buffer = rest
            self._state, self._skips_space = _State.CONTENT, True
            self.reasoning_end = self.num_chars - len(rest)

    def _released(self, text: str, mark: str, final: bool) -> str:
        """Take the text from the buffer but for some white space at its end and the beginning of a mark. Return it."""
        if self._skips_space:
            text = text.lstrip()
            self._buffer = self._buffer.lstrip()
            self._skips_space = not text
        if not final:
            held = next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
            text = text[: len(text) - held]
            text = text[: max(len(text.rstrip()), len(text) - MAX_GAP)]
        self._buffer = self._buffer[len(text) :]
        return text

    def _read_content(self, final: bool) -> Iterator[Part]:
        family = self._family
        if family is not None and self.num_calls == self._max_calls:
            self._buffer = ""
            return
        marker = "" if family is None or family.marker is None else family.marker
        at = self._buffer.find(marker) if marker else -1
        text = self._buffer if at < 0 else self._buffer[:at]
        if family is not None and family.bare and self._is_first:
            begin = self._buffer[:MAX_GAP].lstrip()
            if not begin and not final and len(self._buffer) < MAX_GAP:
                return
            if begin[:1] in ("{", "["):
                self._state, self._amid = _State.GAP, False
                return
        if family is None and not final and not self._skips_space:
            text, self._buffer = self._buffer, ""
        else:
            text = self._released(text, marker if at < 0 else "", final)
        if text:
            self._is_first = self._amid = False
            yield self._content(text)
        if at >= 0:
            self._state, self._amid = _State.GAP, False

    def _gap(self, final: bool) -> Iterator[Part]:
        """Find the JSON of the next call, or the end of calls."""
        family = self._family
        assert family is not None
        if self._amid:
            closing = family.after.match(self._buffer, 0, MAX_GAP)
            if closing is not None:
                self._buffer = self._buffer[closing.end() :]
                self._state, self._skips_space = _State.CONTENT, True
                return
        at = self._buffer.find("{", 0, MAX_GAP)
        if at < 0 and len(self._buffer) < MAX_GAP and not final and self._may_go_on(family):
            return
        found = None
        if at >= 0 and not (self._amid and self.num_calls == self._max_calls):
            found = (family.amid if self._amid else family.before).fullmatch(self._buffer, 0, at)
        name = None if found is None or family.is_object else found["name"]
        if found is None or (name is not None and name not in self._names):
            yield from self._no_call()
            return
        self._state, self._scan, self._named = _State.CALL, _Scan(at), None
        if name is not None:
            yield self._begin(name, at)

    def _may_go_on(self, family: Family) -> bool:
        """Whether JSON may still follow what has come: known at once where little may stand before it."""
        return self._amid or not family.bare or family.before.fullmatch(self._buffer) is not None

    def _no_call(self) -> Iterator[Part]:
        """What announced a call, or followed one, is text; go on after it."""
        family = self._family
        assert family is not None
        self._state = _State.CONTENT
        if self._amid:
            self._skips_space = True
        else:
            before, marker, after = self._buffer.partition(family.marker or "\0")
            text, self._buffer = (before + marker, after) if marker else ("", before)
            self._is_first = False
            if text:
                yield self._content(text)

    def _content(self, text: str) -> Content:
        """Return what was taken from the buffer last."""
        return Content(text, self.num_chars - len(self._buffer))

    def _begin(self, name: str, at: int) -> CallBegun:
        self._named, self._arguments_at, self._sent = name, at, at
        return CallBegun(self._index, name)

    def _call(self, final: bool) -> Iterator[Part]:
        family = self._family
        assert family is not None
        scan = self._scan
        if self._named is None:
            where = (self._buffer, scan.begin, scan.begin + MAX_GAP)
            if (head := _HEAD.match(*where)) and head[1] in self._names:
                yield self._begin(head[1], head.end())
            elif (first := _FIRST.match(*where)) and not self._may_begin(first):
                yield from self._unread(scan.begin + 1)
                return
        scan.go_on(self._buffer, self._arguments_at if self._named is not None else None)
        if self._named is not None:
            end = scan.end_of_part or scan.end or scan.at
            if text := self._buffer[self._sent : end]:
                self._sent = end
                yield Arguments(self._index, text)
        if scan.end is None:
            if final:
                yield from self._unread(len(self._buffer))
            return
        if (read := self._read(family, self._buffer[scan.begin : scan.end])) is None:
            yield from self._unread(scan.end)
            return
        if self._named is None:
            yield CallBegun(self._index, read[0])
            yield Arguments(self._index, read[1])
        self._buffer = self._buffer[scan.end :]
        self._state, self._amid, self._is_first = _State.GAP, True, False
        self._index += 1
        self.num_calls += 1

    def _may_begin(self, first: re.Match[str]) -> bool:
        """Whether an object may be a call that begins so."""
        key, value = first.groups()
        return key in _KEYS and (key != "name" or value is None or value in self._names)

    def _read(self, family: Family, text: str) -> tuple[str, str] | None:
        """Return name and arguments of a whole call, None when it is none."""
        try:
            value: Any = orjson.loads(text)
        except ValueError:
            return None
        if not family.is_object:
            return self._named or "", text
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
        if not isinstance(name, str) or name not in self._names or name != (self._named or name):
            return None
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        return (name, text) if _is_object(text) else None

    def _unread(self, end: int) -> Iterator[Part]:
        if self._named is not None:
            yield CallUnread(self._index)
            self._index += 1
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        self._state, self._amid, self._is_first = _State.CONTENT, False, False
        yield self._content(text)


def _without_space(text: str) -> str:
    return "".join(text.split())


def _is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except ValueError:
        return False


class _Scan:
    """Finds the end of a JSON object in a growing text, by its brackets and strings alone."""

    def __init__(self, begin: int) -> None:
        self.begin = self.at = begin
        self.end: int | None = None
        """Behind the object's last bracket, once it is there."""
        self.end_of_part: int | None = None
        """The same of the object inside it."""
        self._depth = 0
        self._in_string = False

    def go_on(self, text: str, part_at: int | None) -> None:
        """Read on. part_at: where an object inside begins, of which the end is wanted."""
        while self.end is None and (found := (_INSIDE if self._in_string else _OUTSIDE).search(text, self.at)):
            char, self.at = found[0], found.end()
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                if self.at == len(text):
                    self.at -= 1
                    return
                self.at += 1
            elif char in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    self.end = self.at
                elif self._depth == 1 and part_at is not None and part_at > self.begin and self.end_of_part is None:
                    self.end_of_part = self.at
        if self.end is None:
            self.at = len(text)
