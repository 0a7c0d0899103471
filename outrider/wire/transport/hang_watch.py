"""When a worker that has work but makes no step counts as hung. Used by gateways, the launcher and Kubernetes' probes.

A stopped process or a cut network is detected by keepalive; this detects an engine that hangs while its server replies.
A long prompt takes many steps before the first token, and a step may be long: the limit is a multiple of the longest
recent step. No I/O.
"""

from __future__ import annotations

MIN_SILENCE_S = 4.0
"""Seconds that every step may take."""
STEPS = 8
"""Factor on the longest recent step after which an engine counts as hung."""

MAX_STEP_S = 300.0
"""Seconds after which an engine in one step counts as hung, whatever its other steps took, or if it has made none."""


def allowed_s(longest_step_s: float, min_s: float, max_s: float) -> float:
    """Return the seconds that a step may take: a multiple of the longest recent one, within the two limits.

    longest_step_s: 0 = no step is known yet, for which `max_s` is returned.
    """
    if not longest_step_s:
        return max_s
    return min(max_s, max(min_s, STEPS * longest_step_s))


def describe_hang(step_s: float, longest_step_s: float) -> str | None:
    """Return a sentence on a worker's engine that hangs, or None if it does not.

    step_s: seconds since the beginning of its current step. longest_step_s: seconds of the longest recent step.
    """
    if step_s < allowed_s(longest_step_s, MIN_SILENCE_S, MAX_STEP_S):
        return None
    return f"its engine has been at one step for {step_s:.0f} s, the longest took {longest_step_s:.3g} s"


class HangWatch:
    """Whether the worker at the other end of one stream hangs. All times are monotonic, in seconds."""

    def __init__(self, min_silence_s: float, max_silence_s: float, now: float) -> None:
        """min_silence_s: seconds that every step may take, unless max_silence_s is smaller. max_silence_s: seconds that
        no step may exceed, and the limit while no step of the worker is known. now: the stream's beginning.
        """
        self._min_silence_s = min_silence_s
        self._max_silence_s = max_silence_s
        self._longest_step_s = 0.0
        self._num_steps: int | None = None
        """Steps that the worker has made, by its last report."""
        self._alive_s = now
        """Time at which the worker last made a step or had no work."""

    def note_step(self, num_steps: int, longest_step_s: float, now: float) -> None:
        """Record a report of the worker: the steps that it has made, and the seconds of the longest recent one."""
        self._longest_step_s = longest_step_s
        if num_steps != self._num_steps:
            self._num_steps = num_steps
            self._alive_s = now

    def idle(self, now: float) -> None:
        """Record that the worker has no work."""
        self._alive_s = now

    @property
    def limit_s(self) -> float:
        """Seconds without a step after which the worker hangs."""
        return allowed_s(self._longest_step_s, self._min_silence_s, self._max_silence_s)

    def silent_s(self, heard_s: float, now: float) -> float:
        """Return the seconds since the worker's last step or reply. heard_s: time of its last reply."""
        return now - max(self._alive_s, heard_s)

    def hangs(self, heard_s: float, now: float) -> bool:
        """Return whether the worker hangs. heard_s: time of its last reply."""
        return self.silent_s(heard_s, now) >= self.limit_s
