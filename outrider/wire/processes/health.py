"""`Health`: whether requests may be sent to a peer. The gateway has one per worker, and one per route from a draft to
a target.

The method is Finagle's failure accrual: a hang, or several failures in a row, mark the peer as down. After a pause one
request, the trial request, is sent to it. This module does no I/O.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from enum import Enum

_DOWN = 15
"""Sum of the weights of failures in a row at which a peer is marked as down."""


class CallOutcome(Enum):
    """How a request to a peer (such as a worker) ended. The value of a failure is its weight. The peer is marked as
    down once the weights of consecutive failures sum to 15.
    """

    OK = 0
    LATE = 3
    """The peer did what the request asked, but too late. Five in a row mark the peer as down. A single one does not,
    since a busy machine delays some requests."""
    REFUSED = 5
    """The peer failed, broke a rule of the protocol, or ended the stream. Three in a row mark the peer as down."""
    LOST = _DOWN
    """The request was given up because the peer, a worker, hung: it had work and made no step for too long. A single
    one marks the peer as down."""


FIRST_PAUSE_S = 0.5
"""Seconds from marking a peer as down until it may get the first trial request. The actual pause is random, from half
of this to all of it."""
MAX_PAUSE_S = 15.0
"""Maximum pause in seconds before the next trial request to a peer that is down. The pause doubles after every trial
request that fails, up to this value."""
ALONE_S = 1.0
"""Seconds after which a pause between trial requests ends early for a request that no other peer can take. A pause
begins when the peer is marked as down, and when a trial request begins or fails."""


class Health:
    """Health of one peer. `note` records how requests to it ended, and `is_usable` says whether another request may be
    sent to it. While the peer is down, single trial requests are sent to it, after pauses that grow until one succeeds.

    Only one event loop may use it.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = random.random
    ) -> None:
        """clock: returns the monotonic time in seconds. jitter: returns a random number in [0, 1); the actual pause
        lasts from half of the nominal pause (0) to all of it (1).
        """
        self.is_down = False
        self._clock = clock
        self._jitter = jitter
        self._weight = 0
        """Sum of the weights of failures in a row."""
        self._probe: object | None = None
        """The trial request that runs; None = none does."""
        self._pause_s = FIRST_PAUSE_S
        self._pause_start_s = 0.0
        """Monotonic time at which the last pause began, in seconds."""
        self._pause_end_s = 0.0
        """Monotonic time, in seconds, from which a trial request may be sent."""

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent to the peer now. That is so if the peer is up, or if it is down and the pause
        before the next trial request is over.
        """
        return not self.is_down or self._clock() >= self._pause_end_s

    @property
    def is_usable_alone(self) -> bool:
        """Whether a request that no other peer can take may be sent to the peer now. That is so if `is_usable`, or if
        the pause before the next trial request began at least ALONE_S seconds ago.
        """
        return self.is_usable or self._clock() >= self._pause_start_s + ALONE_S

    def allows(self, request: object) -> bool:
        """Return whether a request that already runs on the peer may continue there. It may if the peer is up, or if
        this request is the trial request that shows whether the peer works again.
        """
        return not self.is_down or self._probe is request

    def begin(self, request: object) -> None:
        """Record that a request is sent to the peer. If the peer is down, this is the trial request that shows whether
        it works again, and the pause before the next one begins at once.
        """
        if self.is_down:
            self._pause(request)

    def note(self, outcome: CallOutcome) -> None:
        """Record how a request to the peer ended. A success marks the peer as up, enough failures in a row as down. If
        it is down and a trial request runs, any failure ends that trial and doubles the pause before the next one.
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
        """Record that the peer's process was restarted. If the peer is down, a trial request may then be sent to it at
        once.
        """
        self._pause_end_s = self._clock()

    def _pause(self, probe: object | None) -> None:
        self._probe = probe
        self._pause_start_s = self._clock()
        self._pause_end_s = self._pause_start_s + self._pause_s * (0.5 + 0.5 * self._jitter())
