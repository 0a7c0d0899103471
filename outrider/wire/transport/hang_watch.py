"""When a worker that has work and makes no step counts as hung: for gateways, the launcher and Kubernetes. Pure.

A stopped process or a cut network is noticed by keepalive; this is for an engine that hangs while its server answers.
A long prompt keeps a worker silent while its steps go on, and a step may be long: what is too long is a multiple of the
longest one seen.
"""

from __future__ import annotations

MIN_SILENCE_S = 4.0
"""Seconds without a step that every worker is given. Twice as long, and an engine that hangs keeps its requests so much
longer."""
STEPS = 8
"""Times the longest recent step after which an engine hangs. Twice as many, and one with long steps is noticed so much
later."""

MOST_STEP_S = 300.0
"""Seconds at one step after which an engine hangs, whatever its other steps took; one that has made none yet, too.
Twice as long, and an engine that hangs in its first step is ended so much later."""


def allowed_s(longest_step_s: float, least_s: float, most_s: float) -> float:
    """Return how long a step may take: the most where none is known (0)."""
    return min(most_s, max(least_s, STEPS * longest_step_s)) if longest_step_s else most_s


def trouble_of_step(step_s: float, longest_step_s: float) -> str | None:
    """Return why a worker's engine hangs, by what the worker says of its steps; None when it does not."""
    if step_s < allowed_s(longest_step_s, MIN_SILENCE_S, MOST_STEP_S):
        return None
    return f"its engine has been at one step for {step_s:.0f} s, the longest took {longest_step_s:.3g} s"


class HangWatch:
    """Watches one life of a stream."""

    def __init__(self, min_silence_s: float, max_silence_s: float, now: float) -> None:
        """Begin at `now`.

        min_silence_s: what every worker is given, as far as max_silence_s allows. max_silence_s: the most that any is
        given, and what one is given whose steps are not known yet.
        """
        self._min_silence_s = min_silence_s
        self._max_silence_s = max_silence_s
        self._longest_step_s = 0.0
        self._num_steps = -1
        self._alive_s = now

    def step_seen(self, num_steps: int, longest_step_s: float, now: float) -> None:
        """Note what the worker says of its steps."""
        self._longest_step_s = longest_step_s
        if num_steps != self._num_steps:
            self._num_steps, self._alive_s = num_steps, now

    def idle(self, now: float) -> None:
        """Note that it has no work."""
        self._alive_s = now

    @property
    def limit_s(self) -> float:
        return allowed_s(self._longest_step_s, self._min_silence_s, self._max_silence_s)

    def silent_s(self, heard_s: float, now: float) -> float:
        """Return how long it has made no step. heard_s: when its last answer came."""
        return now - max(self._alive_s, heard_s)

    def hangs(self, heard_s: float, now: float) -> bool:
        return self.silent_s(heard_s, now) >= self.limit_s
