"""Features of consecutive positions of one slot, as bytes: what a target keeps for drafts, and a draft for its head."""

from __future__ import annotations


class FeatureBuffer:
    """A feature is [width] bfloat16: what a head's projection makes of the target's hidden states of one token."""

    __slots__ = ("_data", "start", "token_bytes")

    def __init__(self, token_bytes: int) -> None:
        """token_bytes: of one feature."""
        self.token_bytes = token_bytes
        self.start = 0
        """Position of the first."""
        self._data = bytearray()

    @property
    def num_bytes(self) -> int:
        return len(self._data)

    @property
    def end(self) -> int:
        """Position behind the last."""
        return self.start + len(self._data) // self.token_bytes

    def put(self, start: int, data: bytes) -> None:
        """Store features from a position on, in place of those there and behind. Those before a gap are dropped."""
        if not self.start <= start <= self.end:
            self.clear(start)
        self.truncate(start)
        self._data += data

    def clear(self, start: int) -> None:
        """Drop all; what is put next begins at a position."""
        self._data.clear()
        self.start = start

    def truncate(self, end: int) -> None:
        """Drop those from a position on."""
        del self._data[max(0, end - self.start) * self.token_bytes :]

    def drop_before(self, start: int) -> None:
        """Drop those before a position; what is put next begins there or behind."""
        if start > self.start:
            del self._data[: (start - self.start) * self.token_bytes]
            self.start = start

    def read(self, start: int, end: int) -> bytearray:
        """Return those of the positions from `start` to before `end`, all of which must be here."""
        assert self.start <= start <= end <= self.end, "not all of them are here"
        return self._data[(start - self.start) * self.token_bytes : (end - self.start) * self.token_bytes]
