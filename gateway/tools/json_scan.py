"""Finds the end of a JSON object in a text that is still being written. `reader.py` uses it for calls. No I/O."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
"""Characters that matter outside a string."""
_INSIDE = re.compile(r'["\\]')
"""Characters that matter inside a string."""


class JsonScan:
    """Finds the end of a JSON object by its brackets and strings alone: whether the rest is JSON is not checked."""

    def __init__(self, begin: int) -> None:
        """`begin`: index in the text of the object's first bracket."""
        self.at = begin
        """Index in the text up to which it has been scanned."""
        self.end: int | None = None
        """Index in the text behind the object's last bracket; None until that bracket has come."""
        self._depth = 0
        self._in_string = False

    def scan(self, text: str) -> None:
        """Scan on from where the last call of `scan` stopped, and set `end` if it is found.

        `text`: the text of the last call and what has come since.
        """
        # '{"x": {"y": "}"}}': end 17
        while self.end is None:
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, self.at)
            if found is None:
                break
            char = found[0]
            self.at = found.end()
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                if self.at == len(text):  # the character that it escapes has not come
                    self.at -= 1
                    return
                self.at += 1
            elif char in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    self.end = self.at
        if self.end is None:
            self.at = len(text)
