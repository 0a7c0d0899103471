"""Reads the text of one output as it is generated, into its reasoning, its content and its calls of tools. No I/O.

The parts depend on the text alone, not on how it was cut into pieces. A call that cannot be read is content.
`Reading.reader` makes a CallReader; the forms of `gateway.api` give it the text of each round.

    # family Hermes, the text 'Well.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    # Content "Well.", CallStart "f", Arguments '{"x": 1}'
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.tools.call_families import CallFamily
from gateway.tools.cursor import MAX_SPACE, Cursor, NotACall, Parsing, overlap
from gateway.tools.forms.form import CallText, Schemas
from gateway.tools.parts import CallRetraction, Content, Part, Reasoning
from gateway.tools.reasoning import ReasoningFamily, begins_reasoning


class CallReader:
    """Splits the text of one output into reasoning, content and tool calls while it is generated.

    Give it the text with `push`, in pieces of any length, and call `finish` once at the end.
    """

    def __init__(
        self,
        family: CallFamily | None,
        schemas: Schemas,
        reasoning: ReasoningFamily | None,
        in_reasoning: bool,
        max_calls: int | None,
        silent: Sequence[str] = (),
    ) -> None:
        """`family`: how the model writes calls; None = calls are not looked for. `reasoning`: how it writes reasoning;
        None = reasoning is not looked for. `in_reasoning`: whether the prompt ends inside the reasoning. `max_calls`:
        the text behind so many calls is dropped; None = no limit. `silent`: texts outside the reasoning that are
        dropped.
        """
        self._family = family
        self._schemas = schemas
        self._reasoning = reasoning
        self._max_calls = max_calls
        self._silent = tuple(silent)
        self._cursor = Cursor()
        self._skips_space = in_reasoning
        """Whether white space that comes next is dropped, because it belongs to the text in front of it, a tag."""
        self._is_at_start = True
        """Whether only white space has come since the reasoning."""
        self._gap_at: int | None = None
        """Index in the cursor's text behind a call, as long as what follows may belong to calls; else None."""
        self._index = 0
        """Number of the call that is being read or comes next."""
        self._call: CallText | None = None
        """Call that is being read."""
        self.num_calls = 0
        """Number of calls that are complete."""
        self.num_chars = 0
        """Number of characters that `push` has been given."""
        self.reasoning_end: int | None = None
        """Number of characters of the output up to and with the text that ends the reasoning. 0 if the output has no
        reasoning; None while it may still have some or is inside it."""
        if not in_reasoning and reasoning is None:
            self.reasoning_end = 0
        self._steps = self._read(in_reasoning)

    def push(self, text: str) -> list[Part]:
        """Add `text` to the output, and return the parts that are certain now and were not before."""
        self._cursor.append(text)
        self.num_chars += len(text)
        return self._read_on()

    def finish(self, is_cut: bool) -> list[Part]:
        """End the output, and return the remaining parts.

        `is_cut`: whether a limit or a stop of the request ended the output. A call that has begun then stays a call,
        without an end. If the model ended the output inside a call, the text of that call becomes content. Text behind
        a call that is only the beginning of the text that ends calls is dropped.
        """
        has_begun_call = self._call is not None and self._call.name is not None
        if (is_cut and has_begun_call) or self._is_closing():
            self._steps.close()
            return []
        self._cursor.is_final = True
        return self._read_on()

    def _read_on(self) -> list[Part]:
        parts = list[Part]()
        for part in self._steps:
            if part is None:
                break
            parts.append(part)
        return parts

    def _is_closing(self) -> bool:
        """Whether the text after a call is the start of the text that ends calls, or that leads to the next one."""
        if self._gap_at is None or self._family is None:
            return False
        begun = _without_space(self._cursor.text[self._gap_at :])
        ends = (self._family.closing, self._family.between)
        return any(_without_space(text).startswith(begun) for text in ends)

    # the output

    def _read(self, in_reasoning: bool) -> Parsing[None]:
        if in_reasoning:
            yield from self._read_reasoning()
        elif self._reasoning is not None:
            if (yield from self._begins_reasoning(self._reasoning.marks[0])):
                yield from self._read_reasoning()
            else:
                self.reasoning_end = 0
        yield from self._read_answer()

    def _begins_reasoning(self, mark: str) -> Parsing[bool]:
        cursor = self._cursor
        while True:
            begins = begins_reasoning(cursor.text, mark, final=cursor.is_final)
            if begins is None:
                yield None
                continue
            if begins:
                cursor.at = cursor.text.index(mark) + len(mark)
                cursor.drop()
                self._skips_space = True
            return begins

    def _read_reasoning(self) -> Parsing[None]:
        assert self._reasoning is not None
        cursor = self._cursor
        mark = self._reasoning.marks[1]
        self.reasoning_end = None
        while True:
            at = cursor.text.find(mark, cursor.at)
            is_found = at >= 0
            if is_found:
                text = self._released(at, "")
            else:
                text = self._released(len(cursor.text), mark)
            if text:
                yield Reasoning(text)
            cursor.drop()
            if is_found:
                cursor.at = cursor.text.index(mark, cursor.at) + len(mark)
                cursor.drop()
                self._skips_space = True
                self.reasoning_end = cursor.position
                return
            if not (yield from cursor.more()):
                return

    def _released(self, end: int, *marks: str) -> str:
        """Move the cursor to index `end`, and return the text up to there. White space at its end and a start of one of
        `marks` there are held back, unless no more text comes.
        """
        # "Well.\n<to" with the mark <tool_call>: "Well."
        cursor = self._cursor
        if self._skips_space:
            while cursor.at < end and cursor.text[cursor.at].isspace():
                cursor.at += 1
            self._skips_space = cursor.at == end
        text = cursor.text[cursor.at : end]
        if not cursor.is_final or end < len(cursor.text):
            text = text[: len(text) - max(overlap(text, mark) for mark in marks or ("",))]
            text = text[: max(len(text.rstrip()), len(text) - MAX_SPACE)]
        cursor.at += len(text)
        return text

    # the answer

    def _read_answer(self) -> Parsing[None]:
        cursor = self._cursor
        while True:
            if self.num_calls == self._max_calls:
                self._gap_at = None
                cursor.at = len(cursor.text)
                cursor.drop()
            elif self._is_at_start and self._family is not None and self._family.is_bare:
                if not (yield from self._read_bare_start(self._family)):
                    self._is_at_start = False
                continue
            found = self._next_marker()
            if found is None:
                yield from self._read_content(len(cursor.text))
                if not (yield from cursor.more()):
                    return
                continue
            at, marker = found
            if not cursor.is_final and self._may_be_longer(at, marker):
                yield from self._read_content(at)
                yield from cursor.more()
                continue
            yield from self._read_content(at)
            yield from self._read_marker(marker)

    def _next_marker(self) -> tuple[int, str] | None:
        """Return the index of the first marker behind the cursor, and the longest marker there."""
        text = self._cursor.text
        first: tuple[int, str] | None = None
        for marker in self._markers():
            at = text.find(marker, self._cursor.at)
            if at >= 0 and (first is None or (at, -len(marker)) < (first[0], -len(first[1]))):
                first = (at, marker)
        return first

    def _may_be_longer(self, at: int, marker: str) -> bool:
        """Return whether more text may make a longer marker of the one that begins at index `at`."""
        rest = self._cursor.text[at:]
        return any(len(other) > len(marker) and other.startswith(rest) for other in self._markers())

    def _markers(self) -> tuple[str, ...]:
        markers = self._silent
        if self._family is not None:
            markers = (*self._family.markers, *markers)
        if self._reasoning is not None and self._reasoning.may_return:
            markers = (self._reasoning.marks[0], *markers)
        return markers

    def _read_content(self, end: int) -> Parsing[None]:
        """Pass on the text up to index `end`, except what may belong to a marker."""
        cursor = self._cursor
        markers = self._markers()
        if not markers and self._family is None and not self._skips_space:
            text = cursor.text[cursor.at : end]
            cursor.at = end
        else:
            text = self._released(end, *markers)
        if text:
            self._is_at_start = False
            self._gap_at = None
            yield Content(text, cursor.position)
        if self._gap_at is None:
            cursor.drop()

    def _read_marker(self, marker: str) -> Parsing[None]:
        """Read what the next marker begins: calls, reasoning, or nothing that is a part of the answer."""
        cursor = self._cursor
        begin = cursor.at
        at = cursor.text.index(marker, begin)
        if self._reasoning is not None and self._reasoning.may_return and marker == self._reasoning.marks[0]:
            cursor.at = at + len(marker)
            cursor.drop()
            self._skips_space = True
            yield from self._read_reasoning()
            return
        if marker in self._silent:
            cursor.at = at + len(marker)
            self._skips_space = self._is_at_start or self._gap_at is not None or self._skips_space
            cursor.drop()
            self._gap_at = None
            return
        assert self._family is not None
        is_opening = self._family.opening.startswith(marker)
        cursor.at = at
        self._gap_at = None
        if (yield from self._read_calls(self._family, is_opening=is_opening)):
            return
        cursor.at = at + len(marker)
        self._is_at_start = False
        yield Content(cursor.text[begin : cursor.at], cursor.position)
        cursor.drop()

    def _read_bare_start(self, family: CallFamily) -> Parsing[bool]:
        """Read calls without a marker at the start of an answer. Returns whether there were some."""
        cursor = self._cursor
        begin = cursor.at
        yield from cursor.skip_space()
        for text in self._silent:
            yield from cursor.follows(text)
        yield from cursor.skip_space()
        if not cursor.text.startswith(family.bare_starts, cursor.at):
            cursor.at = begin
            return False
        if (yield from self._read_calls(family, is_opening=False, is_bare=True)):
            return True
        cursor.at = begin
        return False

    # calls

    def _read_calls(self, family: CallFamily, *, is_opening: bool, is_bare: bool = False) -> Parsing[bool]:
        """Read calls from the cursor on. Returns whether there was one; else the cursor is where it was.

        `is_opening`: whether the family's `opening` comes first. `is_bare`: whether they stand without a marker.
        """
        cursor = self._cursor
        begin = cursor.at
        is_list = False
        try:
            if is_opening:
                yield from cursor.expect(family.opening)
            elif family.is_bare:
                if not is_bare and family.marker is not None:
                    yield from cursor.follows(family.marker)
                is_list = yield from cursor.follows("[")
            yield from self._read_call(family)
        except NotACall:
            yield from self._retract()
            cursor.at = begin
            return False
        while self.num_calls != self._max_calls:
            begin = cursor.at
            if (yield from self._ends_calls(family, is_list)):
                break
            try:
                yield from self._read_between(family)
                yield from self._read_call(family)
            except NotACall:
                yield from self._retract()
                cursor.at = begin
                break
        self._skips_space = True
        return True

    def _ends_calls(self, family: CallFamily, is_list: bool) -> Parsing[bool]:
        cursor = self._cursor
        if is_list:
            return (yield from cursor.follows("]"))
        if not family.closing:
            return False
        return (yield from cursor.follows(family.closing))

    def _read_between(self, family: CallFamily) -> Parsing[None]:
        cursor = self._cursor
        if family.is_bare:
            if not (yield from cursor.follows(",")):
                yield from cursor.follows(";")
            return
        if family.closing and family.between.startswith(family.closing):
            return  # the closing is not there, so this is not either
        yield from cursor.expect(family.between)

    def _read_call(self, family: CallFamily) -> Parsing[None]:
        cursor = self._cursor
        self._call = CallText(cursor, self._schemas, self._index)
        yield from family.form.read(self._call)
        self._call = None
        self._index += 1
        self.num_calls += 1
        self._is_at_start = False
        cursor.drop()
        self._gap_at = 0

    def _retract(self) -> Parsing[None]:
        """Take back a call that has begun and is none."""
        call = self._call
        self._call = None
        if call is not None and call.name is not None:
            yield CallRetraction(self._index)
            self._index += 1


def _without_space(text: str) -> str:
    return "".join(text.split())
