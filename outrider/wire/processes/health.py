"""Whether a peer may be given work: one object for each worker, and for the way from a draft to a target. Pure.

It is Finagle's failure accrual: failures in a row put the peer down, and after a pause one request probes it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from enum import Enum

_DOWN = 15


class Outcome(Enum):
    """How something that was asked of the peer ended. The number is its weight: the peer is down at 15 in a row."""

    OK = 0
    LATE = 3
    """It did its part, and not in time. Five in a row: a busy machine delays some."""
    REFUSED = 5
    """It failed, broke a rule, or ended the stream. Three in a row."""
    LOST = _DOWN
    """It made no step for as long as the hang watch allows. One is enough."""


FIRST_PAUSE_S = 0.5
"""Before the first probe. Twice as long, and a peer that is well again waits twice as long for it."""
MAX_PAUSE_S = 15.0
"""The pause doubles with every probe that fails, up to this. Twice as long halves the requests lost to a dead peer."""
ALONE_S = 1.0
"""The longest pause while no other peer could take the request. Twice as long, and requests wait so much longer."""


class Health:
    """Outcomes in, usable or not out. One event loop owns it."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = random.random
    ) -> None:
        """`jitter` is in [0, 1): a pause lasts from its half to its whole."""
        self.is_down = False
        self._clock = clock
        self._jitter = jitter
        self._weight = 0
        self._probe: object | None = None
        """Who tries a peer that is down, since the last pause began."""
        self._pause_s = FIRST_PAUSE_S
        self._paused_s = self._probe_from_s = 0.0

    @property
    def usable(self) -> bool:
        """A request may be sent there now."""
        return not self.is_down or self._clock() >= self._probe_from_s

    @property
    def usable_alone(self) -> bool:
        """A request may be sent there now if there is nobody else."""
        return self.usable or self._clock() >= self._paused_s + ALONE_S

    def lets(self, request: object) -> bool:
        """Return whether a request that was sent there may go on there."""
        return not self.is_down or self._probe is request

    def begin(self, request: object) -> None:
        """Note that a request is sent there. While the peer is down it is the probe: the next one waits for a pause,
        whether this one is ever heard of or not.
        """
        if self.is_down:
            self._pause(request)

    def note(self, outcome: Outcome) -> None:
        """Note how a request fared. While the peer is down any success brings it back. Once a probe is under way any
        failure ends it, be it another request's, and the pause doubles.
        """
        if outcome is Outcome.OK:
            self.is_down, self._probe, self._weight, self._pause_s = False, None, 0, FIRST_PAUSE_S
        elif not self.is_down:
            self._weight += outcome.value
            if self._weight >= _DOWN:
                self.is_down = True
                self._pause(None)
        elif self._probe is not None:
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
            self._pause(None)

    def restarted(self) -> None:
        """Note that the peer began a new life: it may be probed now."""
        self._probe_from_s = self._clock()

    def _pause(self, probe: object | None) -> None:
        self._probe, self._paused_s = probe, self._clock()
        self._probe_from_s = self._paused_s + self._pause_s * (0.5 + 0.5 * self._jitter())
