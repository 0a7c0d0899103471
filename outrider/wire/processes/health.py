"""`Health`: whether a peer may be given work. The gateway has one per worker, and one per way from a draft to a target.

It is Finagle's failure accrual: failures in a row put the peer down, and after a pause one request probes it. No I/O.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from enum import Enum

_DOWN = 15
"""Sum of weights of outcomes in a row that puts a peer down."""


class CallOutcome(Enum):
    """How a request to the peer ended. The value is its weight: weights in a row that sum to 15 put the peer down."""

    OK = 0
    LATE = 3
    """It did its part, but not in time. Five in a row put it down: a busy machine delays some."""
    REFUSED = 5
    """It failed, broke a rule of the protocol, or ended the stream. Three in a row put it down."""
    LOST = _DOWN
    """It made no step for as long as the hang watch allows. One puts it down."""


FIRST_PAUSE_S = 0.5
"""Seconds between the peer's going down and the first probe."""
MAX_PAUSE_S = 15.0
"""Seconds up to which the pause doubles with every probe that fails."""
ALONE_S = 1.0
"""Longest pause in seconds while no other peer can take the request."""


class Health:
    """The health of one peer: `note` takes the outcomes of requests, `usable` is whether to send it another.

    One event loop owns it.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = random.random
    ) -> None:
        """clock: monotonic time in seconds. jitter: a random number in [0, 1), so that a pause lasts from half of its
        length to the whole.
        """
        self.is_down = False
        self._clock = clock
        self._jitter = jitter
        self._weight = 0
        """Sum of the weights of failures in a row."""
        self._probe: object | None = None
        """The request that was sent to a peer that is down, since the last pause began."""
        self._pause_s = FIRST_PAUSE_S
        self._pause_start_s = 0.0
        """Monotonic time at which the last pause began, in seconds."""
        self._pause_end_s = 0.0
        """Monotonic time from which a probe may be sent, in seconds."""

    @property
    def usable(self) -> bool:
        """Whether a request may be sent to the peer now."""
        return not self.is_down or self._clock() >= self._pause_end_s

    @property
    def usable_alone(self) -> bool:
        """Whether a request may be sent to the peer now if no other peer can take it."""
        return self.usable or self._clock() >= self._pause_start_s + ALONE_S

    def allows(self, request: object) -> bool:
        """Return whether a request that runs on the peer may continue there."""
        return not self.is_down or self._probe is request

    def begin(self, request: object) -> None:
        """Record that a request is sent to the peer. While the peer is down it is the probe, and starts a pause before
        the next one, whatever becomes of it.
        """
        if self.is_down:
            self._pause(request)

    def note(self, outcome: CallOutcome) -> None:
        """Record how a request ended. While the peer is down any success puts it up again; and once a probe has been
        sent any failure, be it another request's, ends the probe and doubles the pause.
        """
        if outcome is CallOutcome.OK:
            self.is_down = False
            self._probe = None
            self._weight = 0
            self._pause_s = FIRST_PAUSE_S
        elif not self.is_down:
            self._weight += outcome.value
            if self._weight >= _DOWN:
                self.is_down = True
                self._pause(None)
        elif self._probe is not None:
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
            self._pause(None)

    def restarted(self) -> None:
        """Record that the peer's process started anew: it may be probed at once."""
        self._pause_end_s = self._clock()

    def _pause(self, probe: object | None) -> None:
        self._probe = probe
        self._pause_start_s = self._clock()
        self._pause_end_s = self._pause_start_s + self._pause_s * (0.5 + 0.5 * self._jitter())
