"""Buffer for the features of consecutive positions of one slot. A target keeps them to send to drafts; a draft keeps
them for its head.
"""

from __future__ import annotations


class FeatureBuffer:
    """Features of consecutive positions of one slot, as bytes. A feature is [d] bfloat16: the head's projection of the
    target's hidden states of one token.
    """

    __slots__ = ("_data", "feature_bytes", "start")

    def __init__(self, feature_bytes: int) -> None:
        """Create an empty buffer. `feature_bytes`: size of one feature in bytes."""
        self.feature_bytes = feature_bytes
        self.start = 0
        """Position of the first stored feature."""
        self._data = bytearray()

    @property
    def num_bytes(self) -> int:
        """Size of all stored features in bytes."""
        return len(self._data)

    @property
    def end(self) -> int:
        """Position after the last stored feature; `start` if no feature is stored."""
        return self.start + len(self._data) // self.feature_bytes

    def put(self, start: int, data: bytes) -> None:
        """Store `data`, the features [N, d] bfloat16 of N consecutive positions from `start` on. Stored features of
        these and later positions are dropped first; all are, if `start` is before them or leaves a gap after them.
        """
        if not self.start <= start <= self.end:
            self.clear(start)
        self.truncate(start)
        self._data += data

    def clear(self, start: int) -> None:
        """Drop all features. The next feature to be stored is that of position `start`."""
        self._data.clear()
        self.start = start

    def truncate(self, end: int) -> None:
        """Drop the features of position `end` and later ones."""
        del self._data[max(0, end - self.start) * self.feature_bytes :]

    def drop_before(self, start: int) -> None:
        """Drop the features of positions before `start`. The buffer then starts at `start`, if it started earlier."""
        if start > self.start:
            del self._data[: (start - self.start) * self.feature_bytes]
            self.start = start

    def read(self, start: int, end: int) -> bytearray:
        """Return the features of positions `start` to `end` - 1, which must be stored: [end - start, d] bfloat16."""
        assert self.start <= start <= end <= self.end, "not all of them are here"
        return self._data[(start - self.start) * self.feature_bytes : (end - self.start) * self.feature_bytes]
