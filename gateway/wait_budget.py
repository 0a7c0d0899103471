"""How long the target waits for a proposal, and when a slow draft is left alone for a while. Pure.

The estimator is TCP's (RFC 6298): smoothed mean plus four mean deviations of what proposals took.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GAIN = 1 / 8
DEVIATION_GAIN = 1 / 4
MAX_SKIPPED_ROUNDS = 64
TOO_SLOW = 1.5
"""A draft is left alone for a while when plain steps would be faster by more than this."""
JUDGED_ROUNDS = 4
TIME_GAIN = 1 / 4


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
class Worth:
    """One per request and draft: whether rounds whose proposals come in time are faster than plain steps would be.

    A plain step takes what such a round takes without its wait for the proposal, and makes one token.
    """

    is_lost: bool = False
    """Plain steps would be faster by more than TOO_SLOW."""
    _num_rounds: int = 0
    _total_s: float = 0.0
    _wait_s: float = 0.0
    _num_tokens: float = 1.0

    def observe(self, wait_s: float, total_s: float, num_tokens: int) -> None:
        """A round that was drafted took `total_s`, `wait_s` of it waiting for the proposal."""
        self._num_rounds += 1
        gain = TIME_GAIN if self._num_rounds > 1 else 1.0
        self._num_tokens += gain * (num_tokens - self._num_tokens)
        if self.is_lost:
            gain = 1.0  # it was left alone for a while: what was before says little
        self._total_s += gain * (total_s - self._total_s)
        self._wait_s += gain * (wait_s - self._wait_s)
        plain_s = max(0.0, self._total_s - self._wait_s)
        judged = self._num_rounds >= JUDGED_ROUNDS
        self.is_lost = judged and self._total_s > TOO_SLOW * self._num_tokens * plain_s


@dataclass
class Backoff:
    """One per request: after n proposals in a row that were late or not worth their wait, the next 2^n rounds are
    plain, at most 64.
    """

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
