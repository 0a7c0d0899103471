"""Reads the text of one output as it is generated, into its reasoning, its content and its calls of tools. No I/O.

The parts depend on the text alone, not on how it was cut into pieces. A call that cannot be read is content.
`Reading.reader` makes a Reader; the forms of `gateway.api` give it the text of each round.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from enum import Enum, auto
from typing import Any

import orjson

from gateway.tools.call_families import TOOL_NAME, CallFamily, Marks
from gateway.tools.json_scan import JsonScan
from gateway.tools.parts import Arguments, CallRetraction, CallStart, Content, Part, Reasoning
from gateway.tools.reasoning import begins_reasoning

MAX_GAP = 256
"""Characters that may stand between a marker and the JSON of a call, between two calls, or before a call's name; also
those of white space at the end of a piece that are held back."""
_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*"({TOOL_NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
"""The start of a call up to its arguments."""
_FIRST = re.compile(r'\{\s*(?:"((?:[^"\\]|\\.)*)"(?:\s*:\s*"((?:[^"\\]|\\.)*)")?|[^\s"])', re.DOTALL)
"""The first key of an object, and its value if that is a string; neither if no key begins."""
_KEYS = frozenset({"name", "type", "function", "arguments", "parameters"})
"""Keys that a call may begin with."""


class _State(Enum):
    START = auto()
    """Before everything: reasoning may begin."""
    REASONING = auto()
    CONTENT = auto()
    GAP = auto()
    """After a marker or after a call: JSON may follow."""
    CALL = auto()
    """Inside the JSON of a call."""


class CallReader:
    """Reads one output. Give it the text with `push`, in any pieces, and call `finish` once."""

    def __init__(
        self, family: CallFamily | None, names: Set[str], marks: Marks | None, in_reasoning: bool, max_calls: int | None
    ) -> None:
        """`family`: None = there are no calls. `names`: of the tools that may be called. `marks`: None = there is no
        reasoning. `in_reasoning`: whether the prompt ends inside the reasoning. `max_calls`: the text behind that many
        calls is dropped; None = no limit.
        """
        self._family = family
        self._names = names
        self._marks = marks
        self._max_calls = max_calls
        self._buffer = ""
        """Text that is not yet a part."""
        self._state = _State.START
        if in_reasoning:
            self._state = _State.REASONING
        elif marks is None:
            self._state = _State.CONTENT
        self._skips_space = in_reasoning
        """Whether white space that comes next belongs to a marker, and is dropped."""
        self._is_at_start = True
        """Whether only white space has come since the reasoning."""
        self._is_after_call = False
        """Whether the last part was a call."""
        self._index = 0
        """Number of the call that is being read or comes next."""
        self._scan = JsonScan(0)
        """Scan of the call that is being read."""
        self._name: str | None = None
        """Name of the call that is being read, once it is known."""
        self._arguments_at = 0
        """Index in the buffer of the arguments of that call."""
        self._sent = 0
        """Index in the buffer up to which the arguments are parts already."""
        self.num_calls = 0
        """Calls that are complete."""
        self.num_chars = 0
        """Characters of text so far."""
        self.reasoning_end: int | None = None
        """Characters of text up to the end of the reasoning; None until it has ended."""
        if self._state is _State.CONTENT:
            self.reasoning_end = 0

    def push(self, text: str) -> list[Part]:
        """Return the parts that have become certain with the next characters of the output."""
        self._buffer += text
        self.num_chars += len(text)
        return list(self._parts(final=False))

    def finish(self, is_cut: bool) -> list[Part]:
        """Return the remaining parts. `is_cut`: whether a limit or a stop ended the output, not the model: a call that
        has begun then stays one, without its end.
        """
        has_begun_call = self._state is _State.CALL and self._name is not None
        if is_cut and (has_begun_call or self._is_closing()):
            self._buffer = ""
            return []
        return list(self._parts(final=True))

    def _is_closing(self) -> bool:
        """Whether the buffer after a call is the start of the text that ends calls, or that leads to the next one."""
        family = self._family
        if self._state is not _State.GAP or not self._is_after_call or family is None:
            return False
        begun = _without_space(self._buffer)
        tail = ""
        if not family.is_object:
            tail = family.tail
        closing = _without_space(tail + family.closing)
        between = _without_space(tail + family.between)
        return closing.startswith(begun) or between.startswith(begun)

    def _parts(self, final: bool) -> Iterator[Part]:
        step = {
            _State.START: self._read_start,
            _State.REASONING: self._read_reasoning,
            _State.CONTENT: self._read_content,
            _State.GAP: self._read_gap,
            _State.CALL: self._read_call,
        }
        while True:
            before = (self._state, len(self._buffer))
            yield from step[self._state](final)
            if before == (self._state, len(self._buffer)):
                return

    def _read_start(self, final: bool) -> Iterator[Part]:
        assert self._marks is not None
        mark = self._marks[0]
        begins = begins_reasoning(self._buffer, mark, final=final)
        if begins:
            self._buffer = self._buffer.lstrip().removeprefix(mark)
            self._state = _State.REASONING
            self._skips_space = True
        elif begins is not None:
            self._state = _State.CONTENT
            self.reasoning_end = 0
        yield from ()

    def _read_reasoning(self, final: bool) -> Iterator[Part]:
        assert self._marks is not None
        mark = self._marks[1]
        before, found, rest = self._buffer.partition(mark)
        if found:
            text = self._release(before, "", final)
        else:
            text = self._release(self._buffer, mark, final)
        if text:
            yield Reasoning(text)
        if found:
            self._buffer = rest
            self._state = _State.CONTENT
            self._skips_space = True
            self.reasoning_end = self.num_chars - len(rest)

    def _release(self, text: str, mark: str, final: bool) -> str:
        """Take `text`, the start of the buffer, from it and return it. White space at its end and a start of `mark`
        there are held back, unless the output is final.
        """
        if self._skips_space:
            text = text.lstrip()
            self._buffer = self._buffer.lstrip()
            self._skips_space = not text
        if not final:
            text = text[: len(text) - _overlap(text, mark)]
            text = text[: max(len(text.rstrip()), len(text) - MAX_GAP)]
        self._buffer = self._buffer[len(text) :]
        return text

    def _read_content(self, final: bool) -> Iterator[Part]:
        family = self._family
        marker = ""
        if family is not None:
            if self.num_calls == self._max_calls:
                self._buffer = ""
                return
            if family.bare and self._is_at_start:
                begin = self._buffer[:MAX_GAP].lstrip()
                if not begin and not final and len(self._buffer) < MAX_GAP:
                    return
                if begin.startswith(("{", "[")):
                    self._enter_gap()
                    return
            marker = family.marker or ""
        at = -1
        if marker:
            at = self._buffer.find(marker)
        if at >= 0:
            text = self._release(self._buffer[:at], "", final)
        elif family is None and not final and not self._skips_space:
            text = self._buffer
            self._buffer = ""
        else:
            text = self._release(self._buffer, marker, final)
        if text:
            self._is_at_start = False
            self._is_after_call = False
            yield self._content(text)
        if at >= 0:
            self._enter_gap()

    def _enter_gap(self) -> None:
        self._state = _State.GAP
        self._is_after_call = False

    def _read_gap(self, final: bool) -> Iterator[Part]:
        family = self._family
        assert family is not None
        if self._is_after_call:
            closing = family.after.match(self._buffer, 0, MAX_GAP)
            if closing is not None:
                self._buffer = self._buffer[closing.end() :]
                self._state = _State.CONTENT
                self._skips_space = True
                return
        at = self._buffer.find("{", 0, MAX_GAP)
        if at < 0 and len(self._buffer) < MAX_GAP and not final and self._may_become_call(family):
            return
        found = self._match_gap(family, at)
        if found is None:
            yield from self._leave_gap()
            return
        name = None
        if not family.is_object:
            name = found["name"]
            if name not in self._names:
                yield from self._leave_gap()
                return
        self._state = _State.CALL
        self._scan = JsonScan(at)
        self._name = None
        if name is not None:
            yield self._begin_call(name, at)

    def _match_gap(self, family: CallFamily, at: int) -> re.Match[str] | None:
        """Return the match of the buffer up to the JSON at `at`, None if no call may begin there."""
        if at < 0:
            return None
        if not self._is_after_call:
            return family.before.fullmatch(self._buffer, 0, at)
        if self.num_calls == self._max_calls:
            return None
        return family.amid.fullmatch(self._buffer, 0, at)

    def _may_become_call(self, family: CallFamily) -> bool:
        """Whether JSON may still follow the buffer. A bare family allows little in front of it."""
        return self._is_after_call or not family.bare or family.before.fullmatch(self._buffer) is not None

    def _leave_gap(self) -> Iterator[Part]:
        """The text that announced a call, or followed one, is content."""
        family = self._family
        assert family is not None
        self._state = _State.CONTENT
        if self._is_after_call:
            self._skips_space = True
            return
        self._is_at_start = False
        before, marker, after = self._buffer.partition(family.marker or "\0")
        if marker:
            self._buffer = after
            yield self._content(before + marker)

    def _content(self, text: str) -> Content:
        """Return a text that was just taken from the buffer."""
        return Content(text, self.num_chars - len(self._buffer))

    def _begin_call(self, name: str, at: int) -> CallStart:
        self._name = name
        self._arguments_at = at
        self._sent = at
        return CallStart(self._index, name)

    def _read_call(self, final: bool) -> Iterator[Part]:
        family = self._family
        assert family is not None
        scan = self._scan
        if self._name is None:
            window = (self._buffer, scan.begin, scan.begin + MAX_GAP)
            head = _HEAD.match(*window)
            if head is not None and head[1] in self._names:
                yield self._begin_call(head[1], head.end())
            else:
                first = _FIRST.match(*window)
                if first is not None and not self._may_begin_call(first):
                    yield from self._give_up_call(scan.begin + 1)
                    return
        if self._name is None:
            scan.scan(self._buffer, None)
        else:
            scan.scan(self._buffer, self._arguments_at)
            end = scan.end_of_part or scan.end or scan.at
            text = self._buffer[self._sent : end]
            if text:
                self._sent = end
                yield Arguments(self._index, text)
        if scan.end is None:
            if final:
                yield from self._give_up_call(len(self._buffer))
            return
        call = self._parse_call(family, self._buffer[scan.begin : scan.end])
        if call is None:
            yield from self._give_up_call(scan.end)
            return
        if self._name is None:
            name, arguments = call
            yield CallStart(self._index, name)
            yield Arguments(self._index, arguments)
        self._buffer = self._buffer[scan.end :]
        self._state = _State.GAP
        self._is_after_call = True
        self._is_at_start = False
        self._index += 1
        self.num_calls += 1

    def _may_begin_call(self, first: re.Match[str]) -> bool:
        # {"name": "f" may begin a call of f, {"x" no call
        key, value = first.groups()
        return key in _KEYS and (key != "name" or value is None or value in self._names)

    def _parse_call(self, family: CallFamily, text: str) -> tuple[str, str] | None:
        """Return the name and the arguments of a whole call, None for text that is none."""
        try:
            value: Any = orjson.loads(text)
        except ValueError:
            return None
        if not family.is_object:
            return self._name or "", text
        name = value.get("name")
        if not isinstance(name, str) or name not in self._names or name != (self._name or name):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = orjson.dumps(arguments).decode()
        if not _is_object(arguments):
            return None
        return name, arguments

    def _give_up_call(self, end: int) -> Iterator[Part]:
        """The buffer up to `end` is no call, but content."""
        if self._name is not None:
            yield CallRetraction(self._index)
            self._index += 1
        text = self._buffer[:end]
        self._buffer = self._buffer[end:]
        self._state = _State.CONTENT
        self._is_after_call = False
        self._is_at_start = False
        yield self._content(text)


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a start of `mark`, but not all of it."""
    # "a<to", "<tool_call>": 3
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def _without_space(text: str) -> str:
    return "".join(text.split())


def _is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except ValueError:
        return False
