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
Parsing = Generator[Part | None, None, T]
"""Type of a generator that parses an output while the output grows, and whose result has the type T.

It yields each part of the output that it has found, and None where it has to wait for more text. The code that runs it
is such a generator, too, and yields the same by `yield from`: `is_call = yield from cursor.matches("{")`."""

MAX_SPACE = 256
"""Maximum number of white space characters between two words of a call's fixed texts, such as `<calls>` and `[`."""
MAX_NAME = 256
"""Maximum number of characters of the name of a tool or parameter, with the text that ends the name. Text with a longer
name is not read as a call."""
MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""Pattern of a text that looks like a control token: `<tool_call>` or `[TOOL_CALLS]`. Whether a model's vocabulary has
it as one token is looked up elsewhere."""
_WORDS = re.compile(rf"{MARKER.pattern}|[^\s<\[]+|\S")
"""What white space may stand between: `[TOOL_CALLS][` has two words."""


def words_of(fixed: str) -> list[str]:
    """Return the words of a fixed text. Between two words a model may write any white space.

    `fixed`: the fixed text: `<a>\\n[{` has the words `<a>`, `[` and `{`.
    """
    return _WORDS.findall(fixed)


class NotACall(Exception):
    """The text at the cursor is not a tool call in the expected form."""


class Cursor:
    """The text of a growing output, and the position up to which it has been read."""

    def __init__(self) -> None:
        self.text = ""
        """The output's text so far, without the part at its start that was dropped."""
        self.at = 0
        """Index in `text` of the next character to read. Methods that move the cursor change it."""
        self.base = 0
        """Number of characters that were dropped: those of the output in front of `text`."""
        self.is_final = False
        """Whether the output has ended: no more text comes."""

    @property
    def position(self) -> int:
        """Number of characters of the output in front of the cursor, including those that `drop` removed."""
        return self.base + self.at

    def append(self, text: str) -> None:
        """Append the output's next piece of text to `text`."""
        self.text += text

    def drop(self) -> None:
        """Forget the text in front of the cursor."""
        self.base += self.at
        self.text = self.text[self.at :]
        self.at = 0

    def has(self, num_chars: int) -> bool:
        """Return whether the text so far has at least `num_chars` characters behind the cursor."""
        return len(self.text) - self.at >= num_chars

    def more(self) -> Parsing[bool]:
        """Generator, for `yield from`: wait for more text. Its result is False if the output has ended, else True."""
        if self.is_final:
            return False
        yield None
        return True

    def skip_space(self) -> Parsing[None]:
        """Generator, for `yield from`: move the cursor behind white space. After MAX_SPACE characters it stops in it.

        It waits for more text until a character that is not white space has come, or the output has ended.
        """
        begin = self.at
        while True:
            while self.at < len(self.text) and self.text[self.at].isspace() and self.at - begin < MAX_SPACE:
                self.at += 1
            if self.at < len(self.text) or self.at - begin >= MAX_SPACE:
                return
            if not (yield from self.more()):
                return

    def matches(self, word: str) -> Parsing[bool]:
        """Generator, for `yield from`: its result is whether `word` follows the cursor. If so, move behind it.

        It waits for more text as long as that may complete the word.
        """
        while True:
            found = self.text[self.at : self.at + len(word)]
            if found == word:
                self.at += len(word)
                return True
            if not word.startswith(found) or not (yield from self.more()):
                return False

    def follows(self, fixed: str) -> Parsing[bool]:
        """Generator, for `yield from`: its result is whether a fixed text follows the cursor. If so, move behind it.

        `fixed`: the fixed text, of which only the words count: "</a>\\n<b>" also matches "</a> <b>" in the output.
        """
        begin = self.at
        for word in words_of(fixed):
            yield from self.skip_space()
            if not (yield from self.matches(word)):
                self.at = begin
                return False
        return True

    def expect(self, fixed: str) -> Parsing[None]:
        """Generator, for `yield from`: move behind the fixed text `fixed`, with any white space between its words.

        Raises NotACall if it does not follow the cursor.
        """
        if not (yield from self.follows(fixed)):
            raise NotACall

    def until(self, ends: Sequence[str], max_chars: int = MAX_NAME) -> Parsing[tuple[str, str]]:
        """Generator, for `yield from`: its result is (text in front of the end, end), and it moves behind the end.

        The end is the one of `ends` that comes first. Raises NotACall if the next `max_chars` characters have none.
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
    """Return the length of the longest suffix of `text` that is a prefix of `mark`, and not all of `mark`."""
    # "a<to", "<tool_call>": 3
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
