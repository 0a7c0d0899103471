"""Finds where the reasoning of an output begins and ends, by its text, whatever its tokens. No I/O.

The reader of calls, the stops that wait for the answer, and the grammar of the answer depend on the same place.
"""

from __future__ import annotations

from gateway.tools.call_families import Marks

MAX_SPACE_CHARS = 256
"""Characters at the start of an output within which its reasoning has to begin."""


def begins_reasoning(text: str, mark: str, *, final: bool = False) -> bool | None:
    """Return whether the output that starts with `text` begins with reasoning; None if more text may decide that.

    `mark`: the text that begins reasoning, with any white space in front. `final`: whether `text` is the whole output.
    """
    # mark "<think>": True for " <think>a", None for "<th", False for "a"
    begin = text[:MAX_SPACE_CHARS].lstrip()
    if begin.startswith(mark):
        return True
    if not final and mark.startswith(begin) and len(text) < MAX_SPACE_CHARS:
        return None
    return False


class AnswerFinder:
    """Finds the answer in the growing text of an output: the text behind the reasoning, or all of a text without
    reasoning. White space between the two belongs to neither.
    """

    def __init__(self, marks: Marks | None, in_reasoning: bool) -> None:
        """`marks`: None = there is no reasoning. `in_reasoning`: whether the prompt ends inside the reasoning."""
        self._marks = marks
        self._is_reasoning = in_reasoning
        """Whether the text has reasoning, ended or not."""
        self.is_behind = marks is None
        """Whether the text so far ends behind the reasoning."""
        self._pending = ""
        """End of the text, which may be a part of a mark."""
        self.is_found = marks is None
        """Whether the text so far has a part of the answer."""

    @property
    def num_undecided_chars(self) -> int:
        """Characters at the end of the text of which it is open whether they are reasoning or answer."""
        if self.is_found or self._is_reasoning:
            return 0
        return len(self._pending)

    def push(self, text: str) -> str:
        """Append `text` to the output. Return the characters that are now known to be of the answer."""
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
        """Return the undecided text, which belongs to the answer if nothing follows it. Call it at the output's end."""
        if self.is_found or self._is_reasoning:
            return ""
        return self._found(self._pending)

    def _found(self, answer: str) -> str:
        self.is_behind = True
        self.is_found = answer != ""
        self._pending = ""
        return answer
