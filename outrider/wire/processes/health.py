"""`Health`: whether requests may be sent to a peer. The gateway has one per worker, and one per route from a draft to
a target.

The method is Finagle's failure accrual: several failures in a row mark the peer as down. After a pause one request is
sent to it as a probe. This module does no I/O.
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
    """The peer, a worker, made no step for so long that it counts as hung. A single one marks the peer as down."""


FIRST_PAUSE_S = 0.5
"""Seconds from the moment at which a peer is marked as down until the first probe. A probe is a request that is sent to
find out whether the peer works again."""
MAX_PAUSE_S = 15.0
"""Maximum seconds between two probes of a peer that is down. The pause doubles after every probe that fails, up to this
value."""
ALONE_S = 1.0
"""Seconds after the start of a pause from which a peer that is down may be probed by a request that no other peer can
take, even if the pause lasts longer."""


class Health:
    """Health of one peer. `note` records how requests to it ended, and `is_usable` says whether another request may be
    sent to it. While the peer is down, single requests are sent as probes after growing pauses.

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
        """The request that was sent as a probe since the last pause began; None = none was."""
        self._pause_s = FIRST_PAUSE_S
        self._pause_start_s = 0.0
        """Monotonic time at which the last pause began, in seconds."""
        self._pause_end_s = 0.0
        """Monotonic time from which a probe may be sent, in seconds."""

    @property
    def is_usable(self) -> bool:
        """Whether a request may be sent to the peer now. That is so if the peer is up, or if it is down and the pause
        before the next probe is over.
        """
        return not self.is_down or self._clock() >= self._pause_end_s

    @property
    def is_usable_alone(self) -> bool:
        """Whether a request that no other peer can take may be sent to the peer now: if the peer is up, if the pause is
        over, or if ALONE_S seconds have passed since the pause began. If the peer is down, this request is a probe.
        """
        return self.is_usable or self._clock() >= self._pause_start_s + ALONE_S

    def allows(self, request: object) -> bool:
        """Return whether a request that already runs on the peer may continue there. It may if the peer is up, or if
        this request is the probe.
        """
        return not self.is_down or self._probe is request

    def begin(self, request: object) -> None:
        """Record that a request is sent to the peer. If the peer is down, this request is the probe, and the pause
        before the next probe begins at once.
        """
        if self.is_down:
            self._pause(request)

    def note(self, outcome: CallOutcome) -> None:
        """Record how a request to the peer ended. If the peer is down, a success marks it as up again. If it is down
        and a probe runs, a failure of any request ends the probe and doubles the pause.
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
        """Record that the peer's process was restarted. A peer that is down may then be probed at once."""
        self._pause_end_s = self._clock()

    def _pause(self, probe: object | None) -> None:
        self._probe = probe
        self._pause_start_s = self._clock()
        self._pause_end_s = self._pause_start_s + self._pause_s * (0.5 + 0.5 * self._jitter())
