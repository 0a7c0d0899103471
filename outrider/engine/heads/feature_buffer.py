"""Features of consecutive positions of one slot, as bytes: kept by a target for drafts, and by a draft for its head."""

from __future__ import annotations


class FeatureBuffer:
    """Buffer of features, each [width] bfloat16: a head's projection of the target's hidden states of one token."""

    __slots__ = ("_data", "start", "token_bytes")

    def __init__(self, token_bytes: int) -> None:
        """Create an empty buffer. `token_bytes`: bytes of one feature."""
        self.token_bytes = token_bytes
        self.start = 0
        """Position of the first feature."""
        self._data = bytearray()

    @property
    def num_bytes(self) -> int:
        """Size of all features in bytes."""
        return len(self._data)

    @property
    def end(self) -> int:
        """Position after the last feature."""
        return self.start + len(self._data) // self.token_bytes

    def put(self, start: int, data: bytes) -> None:
        """Store features from `start` on, replacing those there and after. Features before a gap are dropped."""
        if not self.start <= start <= self.end:
            self.clear(start)
        self.truncate(start)
        self._data += data

    def clear(self, start: int) -> None:
        """Drop all features; the next ones are stored from `start` on."""
        self._data.clear()
        self.start = start

    def truncate(self, end: int) -> None:
        """Drop the features from position `end` on."""
        del self._data[max(0, end - self.start) * self.token_bytes :]

    def drop_before(self, start: int) -> None:
        """Drop the features before `start`; later ones are stored there or after."""
        if start > self.start:
            del self._data[: (start - self.start) * self.token_bytes]
            self.start = start

    def read(self, start: int, end: int) -> bytearray:
        """Return the features of positions `start` to `end`, exclusive, all of which must be stored."""
        assert self.start <= start <= end <= self.end, "not all of them are here"
        return self._data[(start - self.start) * self.token_bytes : (end - self.start) * self.token_bytes]
