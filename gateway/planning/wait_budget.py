"""How long the target waits for a proposal, and when a draft that was late is left alone for a while. Pure.

The estimator is TCP's (RFC 6298): smoothed mean plus four mean deviations of what proposals took.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GAIN = 1 / 8
DEVIATION_GAIN = 1 / 4
MAX_SKIPPED_ROUNDS = 64
LEAST_WAIT_S = 0.005
"""Twice as much: a round whose draft is late for once costs twice as much."""
MOST_WAIT_S = 1.0
"""Also while nothing is known. Twice as much: the first round of a draft that hangs takes twice as long."""


@dataclass
class WaitBudget:
    """One per draft, shared by all requests. Seconds."""

    min_s: float
    max_s: float
    _mean_s: float | None = None
    _deviation_s: float = 0.0

    def observe(self, propose_s: float) -> None:
        """A proposal took this long from the gateway's send to the draft's reply, in time or not."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = propose_s, propose_s / 2
            return
        self._deviation_s += DEVIATION_GAIN * (abs(propose_s - self._mean_s) - self._deviation_s)
        self._mean_s += GAIN * (propose_s - self._mean_s)

    @property
    def seconds(self) -> float:
        """The largest allowed while nothing is known."""
        if self._mean_s is None:
            return self.max_s
        return min(self.max_s, max(self.min_s, self._mean_s + 4 * self._deviation_s))


@dataclass
class Backoff:
    """One per request: after n proposals in a row that were late, the next 2^n rounds are plain, at most 64."""

    num_late: int = 0
    """In a row."""
    _skip: int = field(default=0)

    def late(self) -> None:
        self.num_late += 1
        self._skip = min(2**self.num_late, MAX_SKIPPED_ROUNDS)

    def in_time(self) -> None:
        self.num_late = 0

    def may_draft(self) -> bool:
        """Ask once a round."""
        if self._skip:
            self._skip -= 1
            return False
        return True
