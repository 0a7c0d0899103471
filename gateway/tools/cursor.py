"""A text that grows at its end, and a position in it. The forms of calls and the reader read with it. No I/O.

What reads is a generator: it yields the parts that it has found, and None where more text has to come. So it reads like
a parser of a whole text, and what it finds does not depend on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

from gateway.tools.parts import Part

T = TypeVar("T")
Steps = Generator[Part | None, None, T]
"""Reads on, and returns a T. None is yielded where more text has to come."""

MAX_SPACE = 256
"""Maximum characters of white space between two words of a call's form."""
MAX_NAME = 256
"""Maximum characters of the name of a tool or parameter, including the quotes or tags around it. A longer one is no
call."""
MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""Pattern of a text that may be one token of a vocabulary: `<tool_call>`, `[TOOL_CALLS]`."""
_WORDS = re.compile(rf"{MARKER.pattern}|[^\s<\[]+|\S")
"""What white space may stand between: `[TOOL_CALLS][` has two words."""


def words_of(form: str) -> list[str]:
    """Return the words of a form, between which a model may write any white space."""
    return _WORDS.findall(form)


class NotACall(Exception):
    """The text at the cursor is no tool call of the form that is read."""


class Cursor:
    """The text from `base` on, and where in it the reading is."""

    def __init__(self) -> None:
        self.text = ""
        """Text that has come and was not dropped."""
        self.at = 0
        """Index in `text` of the next character."""
        self.base = 0
        """Characters of the output in front of `text`."""
        self.is_final = False
        """Whether no more text comes."""

    @property
    def position(self) -> int:
        """Characters of the output up to the cursor."""
        return self.base + self.at

    def append(self, text: str) -> None:
        """Add text at the end."""
        self.text += text

    def drop(self) -> None:
        """Forget the text in front of the cursor."""
        self.base += self.at
        self.text = self.text[self.at :]
        self.at = 0

    def has(self, num_chars: int) -> bool:
        """Return whether so many characters follow the cursor."""
        return len(self.text) - self.at >= num_chars

    def more(self) -> Steps[bool]:
        """Wait for more text. Returns whether there may be some: False at the end of the output."""
        if self.is_final:
            return False
        yield None
        return True

    def skip_space(self) -> Steps[None]:
        """Move behind white space, at most MAX_SPACE characters, up to a character that is none."""
        begin = self.at
        while True:
            while self.at < len(self.text) and self.text[self.at].isspace() and self.at - begin < MAX_SPACE:
                self.at += 1
            if self.at < len(self.text) or self.at - begin >= MAX_SPACE:
                return
            if not (yield from self.more()):
                return

    def matches(self, word: str) -> Steps[bool]:
        """Return whether `word` follows, and move behind it if it does."""
        while True:
            found = self.text[self.at : self.at + len(word)]
            if found == word:
                self.at += len(word)
                return True
            if not word.startswith(found) or not (yield from self.more()):
                return False

    def follows(self, form: str) -> Steps[bool]:
        """Return whether the words of `form` follow, with any white space before each; move behind them if they do."""
        # form "\n</a>\n<b>" follows in "</a> <b>"
        begin = self.at
        for word in words_of(form):
            yield from self.skip_space()
            if not (yield from self.matches(word)):
                self.at = begin
                return False
        return True

    def expect(self, form: str) -> Steps[None]:
        """Move behind the words of `form`. Raises NotACall if they do not follow."""
        if not (yield from self.follows(form)):
            raise NotACall

    def until(self, ends: Sequence[str], max_chars: int = MAX_NAME) -> Steps[tuple[str, str]]:
        """Return the text up to the first of `ends`, and that end; move behind it.

        Raises NotACall if none comes within `max_chars` characters.
        """
        while True:
            first: tuple[int, str] | None = None
            for end in ends:
                index = self.text.find(end, self.at, self.at + max_chars)
                if index >= 0 and (first is None or index < first[0]):
                    first = (index, end)
            if first is not None:
                index, end = first
                found = self.text[self.at : index]
                self.at = index + len(end)
                return found, end
            if self.has(max_chars) or not (yield from self.more()):
                raise NotACall


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a start of `mark`, but not all of it."""
    # "a<to", "<tool_call>": 3
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
