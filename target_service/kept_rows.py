"""The last rows of features of a slot, as bytes that are ready to leave. No tensors."""

from __future__ import annotations

from collections import deque

MAX_KEPT_ROWS = 512
"""Rows of a slot for a draft that asks late. Doubling it lets one begin at earlier positions, for twice the memory."""
_PIECE_ROWS = 32
"""Rows that are let go together. Doubling it keeps up to so many fewer, in half as many pieces."""


class KeptRows:
    """Rows of consecutive positions."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self._pieces: deque[bytes] = deque()
        self.start = 0
        """Position of the first."""
        self.end = 0
        """Position behind the last."""

    @property
    def num_bytes(self) -> int:
        return (self.end - self.start) * self.row_bytes

    def put(self, start: int, data: bytes) -> None:
        """Take in rows from a position on, in place of those from there on; those before a gap are let go."""
        if not self.start <= start <= self.end:
            self._pieces.clear()
            self.start = self.end = start
        self.cut(start)
        size = _PIECE_ROWS * self.row_bytes
        self._pieces.extend(data[at : at + size] for at in range(0, len(data), size))
        self.end += len(data) // self.row_bytes
        while self.end - self.start > MAX_KEPT_ROWS:
            self.start += len(self._pieces.popleft()) // self.row_bytes

    def cut(self, end: int) -> None:
        """Let those from a position on go."""
        while self.end > max(end, self.start):
            last = self._pieces.pop()
            self.end -= len(last) // self.row_bytes
            if self.end < end:
                self._pieces.append(last[: (end - self.end) * self.row_bytes])
                self.end = end

    def since(self, start: int) -> tuple[int, bytes]:
        """Return the rows from a position on, and the position of the first of them."""
        first, at, found = max(start, self.start), self.end, deque[bytes]()
        for piece in reversed(self._pieces):
            if at <= first:
                break
            at -= len(piece) // self.row_bytes
            found.appendleft(piece)
        return first, b"".join(found)[max(0, first - at) * self.row_bytes :]
