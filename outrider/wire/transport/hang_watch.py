"""The rule by which a worker that has work but makes no step counts as hung. Used by gateways, the launcher and
Kubernetes' probes. This module does no I/O.

A stopped process or a cut network is detected by gRPC's keepalive. This rule detects an engine that hangs while its
server still replies. A long prompt takes many steps before the first token, and a single step may be long. Therefore
the limit is on the time of one step, as a multiple of the longest recent step.
"""

from __future__ import annotations

MIN_SILENCE_S = 4.0
"""Seconds that a worker's engine may be silent, without ending a step, even if its recent steps were much shorter."""
STEPS = 8
"""A worker's engine counts as hung if a step takes this many times as long as its longest recent step, and at least
MIN_SILENCE_S."""

MAX_STEP_S = 300.0
"""Seconds after which a worker's engine counts as hung within one step, however long its recent steps were; the only
limit of its first step."""


def allowed_s(longest_step_s: float, min_s: float, max_s: float) -> float:
    """Return the seconds that a step may take: STEPS times the longest recent step, but at least `min_s` and at most
    `max_s`. longest_step_s: seconds of that step; 0 = no step is known yet, and `max_s` is returned.
    """
    if not longest_step_s:
        return max_s
    return min(max_s, max(min_s, STEPS * longest_step_s))


def describe_hang(step_s: float, longest_step_s: float) -> str | None:
    """Return a text that says for how long a worker's engine has been in one step, if that is longer than allowed. None
    = the engine does not hang.

    step_s: seconds since the engine's current step began. longest_step_s: seconds of its longest recent step.
    """
    if step_s < allowed_s(longest_step_s, MIN_SILENCE_S, MAX_STEP_S):
        return None
    return f"its engine has been at one step for {step_s:.0f} s, the longest took {longest_step_s:.3g} s"


class HangWatch:
    """Decides whether the worker at the other end of a stream hangs, from its reports on its steps. All times are
    readings of the monotonic clock, in seconds.
    """

    def __init__(self, min_silence_s: float, max_silence_s: float, now: float) -> None:
        """min_silence_s: seconds that any step may take. max_silence_s: maximum seconds of a step, even if it is
        smaller than min_silence_s, and the limit while no step of the worker is known. now: monotonic time, in seconds,
        at which the stream began.
        """
        self._min_silence_s = min_silence_s
        self._max_silence_s = max_silence_s
        self._longest_step_s = 0.0
        self._num_steps: int | None = None
        """Number of steps that the worker has made, by its last report; None = there was no report yet."""
        self._last_step_s = now
        """Monotonic time, in seconds, at which the worker last made a step or had no work."""

    def note_step(self, num_steps: int, longest_step_s: float, now: float) -> None:
        """Record a report of the worker at time `now`. num_steps: number of steps that it has made since its start.
        longest_step_s: seconds of its longest recent step.
        """
        self._longest_step_s = longest_step_s
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self._last_step_s = now

    def idle(self, now: float) -> None:
        """Record that the worker has no work at time `now`, from which its time without a step is counted."""
        self._last_step_s = now

    @property
    def limit_s(self) -> float:
        """Seconds without a step and without a reply after which the worker counts as hung."""
        return allowed_s(self._longest_step_s, self._min_silence_s, self._max_silence_s)

    def silent_s(self, last_reply_s: float, now: float) -> float:
        """Return the seconds since the worker's last step or last reply, whichever was later. last_reply_s: time of its
        last reply.
        """
        return now - max(self._last_step_s, last_reply_s)

    def is_hung(self, last_reply_s: float, now: float) -> bool:
        """Return whether the worker counts as hung at `now`. last_reply_s, now: monotonic times, in seconds, of the
        worker's last reply and of this call.
        """
        return self.silent_s(last_reply_s, now) >= self.limit_s
