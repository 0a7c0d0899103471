"""What a target sends of an answer's tokens to a draft that needs more than their ids: rows of features by position."""

from __future__ import annotations

import numpy as np

from draft_service.jobs import Rows

MAX_ROWS_BYTES = 64 << 20
"""Bytes of a slot's rows that wait to be used. Doubling it lets a draft be behind a prompt by twice as many tokens
before it begins anew with the newest, for twice the memory."""


class FeatureRows:
    """Rows of consecutive positions, those that are no longer needed left out."""

    __slots__ = ("_rows", "start")

    def __init__(self, width: int) -> None:
        self.start = 0
        """Position of the first row."""
        self._rows: Rows = np.empty((0, width), dtype=np.uint16)

    @property
    def end(self) -> int:
        """Position behind the last row."""
        return self.start + len(self._rows)

    def take(self, start: int, rows: Rows) -> bool:
        """Take in rows from a position on; those that are here already change nothing. Return False where rows between
        these and what is here are missing, or more than MAX_ROWS_BYTES would wait: nothing is taken then.
        """
        new = rows[max(0, self.end - start) :]
        if start > self.end or (len(new) and self._rows.nbytes + new.nbytes > MAX_ROWS_BYTES):
            return False
        self._rows = np.concatenate([self._rows, new])
        return True

    def begin(self, start: int, rows: Rows) -> None:
        """Begin anew with these."""
        self.start, self._rows = start, rows

    def drop(self, before: int) -> None:
        """Forget the rows before a position."""
        num_dropped = min(max(0, before - self.start), len(self._rows))
        self.start, self._rows = max(self.start, before), self._rows[num_dropped:]

    def of(self, start: int, num_rows: int) -> Rows:
        """Return the rows from a position on."""
        assert self.start <= start <= start + num_rows <= self.end, f"rows {self.start} to {self.end} are here"
        return self._rows[start - self.start : start - self.start + num_rows]
