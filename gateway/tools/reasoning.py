"""Finds where an answer's reasoning ends: by its text, whatever its tokens. Pure.

The reader of the answer, the stops that wait for the answer, and the answer's grammar all mean this place.
"""

from __future__ import annotations

from gateway.tools.families import Marks

MAX_SPACE_CHARS = 256
"""Characters of an answer within which its reasoning begins."""


def begins_reasoning(text: str, mark: str, *, final: bool = False) -> bool | None:
    """Return whether an answer that begins with `text` begins its reasoning, None where more text may decide it.

    mark: what begins reasoning. White space may stand in front of it. final: no text follows.
    """
    begin = text[:MAX_SPACE_CHARS].lstrip()
    if begin.startswith(mark):
        return True
    is_open = not final and mark.startswith(begin) and len(text) < MAX_SPACE_CHARS
    return None if is_open else False


class AnswerFinder:
    """Follows a growing text. The answer is what stands behind the reasoning, or all of a text without reasoning. White
    space between them is of neither: the reader leaves it out.
    """

    def __init__(self, marks: Marks | None, in_reasoning: bool) -> None:
        """marks: None = there is no reasoning. in_reasoning: the prompt began it."""
        self._marks = marks
        self._is_reasoning = in_reasoning
        """Whether the text has reasoning, ended or not."""
        self.is_behind = marks is None
        """Whether the text's end lies behind the reasoning."""
        self._pending = ""
        """Text that decides, with what follows it, where the reasoning begins or ends."""
        self.is_found = marks is None
        """Whether the answer has begun."""

    @property
    def num_undecided(self) -> int:
        """Characters at the end of the text that are reasoning or answer: nobody can tell yet."""
        return 0 if self.is_found or self._is_reasoning else len(self._pending)

    def push(self, text: str) -> str:
        """Take the text's next characters. Return those of the answer that are known now, a part of the text's end."""
        if self._marks is None or self.is_found:
            return text
        if self.is_behind:
            return self._found(text.lstrip())
        begin, end = self._marks
        self._pending += text
        if not self._is_reasoning:
            begins = begins_reasoning(self._pending, begin)
            if begins is None:
                return ""
            if not begins:
                return self._found(self._pending)
            self._is_reasoning = True
            self._pending = self._pending.lstrip().removeprefix(begin)
        _, mark, answer = self._pending.partition(end)
        if mark:
            return self._found(answer.lstrip())
        self._pending = self._pending[-(len(end) - 1) :]
        return ""

    def finish(self) -> str:
        """Return the text that has become a part of the answer because nothing follows it."""
        return "" if self.is_found or self._is_reasoning else self._found(self._pending)

    def _found(self, answer: str) -> str:
        self.is_behind = True
        self.is_found = answer != ""
        self._pending = ""
        return answer
