"""A running mean for measured times: single outliers move it little, a lasting change moves it soon. Pure."""

from __future__ import annotations

GAIN = 1 / 32
"""Of a new value, once many are known; the longer values stay on one side, the larger."""
MAX_GAIN = 1 / 4
SPREAD_GAIN = 1 / 16
OUTLIER = 3.0
"""A value counts as at most so many mean deviations away."""


class Typical:
    __slots__ = ("_above", "_run", "_spread", "num_seen", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.num_seen = 0
        self._spread = 0.0
        self._run = 0
        self._above = False

    def observe(self, value: float) -> None:
        self.num_seen += 1
        if self.num_seen == 1:
            self.value, self._spread = value, abs(value) / 4
            return
        off = value - self.value
        above = off > 0.0
        self._run = self._run + 1 if above is self._above else 1
        self._above = above
        gain = max(1.0 / self.num_seen, min(MAX_GAIN, GAIN * self._run))
        limit = OUTLIER * self._spread
        self._spread += SPREAD_GAIN * (min(abs(off), 2.0 * limit + 1e-6) - self._spread)
        self.value += gain * max(-limit, min(limit, off))

    def shift(self, by: float) -> None:
        """What is measured is known to have moved."""
        self.value += by
