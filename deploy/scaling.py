"""How many workers a pool should have, by what is seen of it. Arithmetic only: no Ray, no clock of its own.

Grows by one after a few seconds of too much, shrinks by one after a minute of too little, and never while a worker is
starting: what that one changes is not seen yet. A worker that drains bars shrinking alone: load that rises meanwhile
takes it back. The last draft goes when nothing at all runs that it could draft for, and one comes back when something
has run for as long as growing asks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from outrider.cli.pools import Role
from outrider.cli.system import ScalingConfig


@dataclass(frozen=True, slots=True)
class Sight:
    """What is seen of a pool at one moment."""

    num_serving: int
    num_starting: int = 0
    num_draining: int = 0
    num_queued: int = 0
    """Answers that wait for a place, at all gateways. Of a draft pool: not looked at."""
    num_refused: int = 0
    """Answers refused for want of places in the last seconds, likewise."""
    num_asked: int = 0
    """Of a draft pool: answers that run or wait in its target pools, at all gateways."""
    busy_share: float | None = None
    """Mean over the serving workers, of the last seconds, in [0, 1]; None = not known."""
    late_share: float | None = None
    """Of a draft pool: rounds whose proposal came too late, over its target pools' rounds; None = no rounds."""


class Change(Enum):
    """Of the number of workers."""

    STAY = 0
    GROW = 1
    SHRINK = -1


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why: for the log."""

    change: Change
    reason: str


class Scaler:
    """Sizes one pool. Ask it about once a second."""

    def __init__(self, role: Role, least: int, most: int, config: ScalingConfig) -> None:
        self._role = role
        self._least = least
        self._most = most
        self._config = config
        self._over_since_s = math.nan
        self._under_since_s = math.nan

    def reset(self) -> None:
        """What was seen before does not count: somebody has set the size by hand."""
        self._over_since_s = self._under_since_s = math.nan

    def decide(self, sight: Sight, now_s: float) -> Decision:
        """`now_s`: of any clock that never goes back."""
        if sight.num_starting:
            self.reset()
            return Decision(Change.STAY, "a worker is starting")
        over, under = self._too_much(sight), self._too_little(sight)
        self._over_since_s = _since(self._over_since_s, over is not None, now_s)
        self._under_since_s = _since(self._under_since_s, under is not None, now_s)
        if over is not None and now_s - self._over_since_s >= self._config.up_after_s:
            return self._change(Change.GROW, sight.num_serving < self._most, over)
        if under is not None and now_s - self._under_since_s >= self._config.down_after_s:
            return self._change(Change.SHRINK, sight.num_serving > self._least, under)
        return Decision(Change.STAY, over or under or "neither too much nor too little")

    def _change(self, change: Change, is_allowed: bool, reason: str) -> Decision:
        if not is_allowed:
            return Decision(Change.STAY, f"{reason}, and the pool has {'max' if change is Change.GROW else 'min'}")
        self.reset()
        return Decision(change, reason)

    def _too_much(self, sight: Sight) -> str | None:
        config = self._config
        if not sight.num_serving:
            return f"no draft for {sight.num_asked} answers" if sight.num_asked else None
        if self._role == "target" and sight.num_queued + sight.num_refused > config.queue_high * sight.num_serving:
            refused = f" and {sight.num_refused} were refused" if sight.num_refused else ""
            return f"{sight.num_queued} answers wait for {sight.num_serving} targets{refused}"
        if sight.busy_share is not None and sight.busy_share > config.busy_high:
            return f"busy for {sight.busy_share:.0%} of the time"
        if self._role == "draft" and sight.late_share is not None and sight.late_share > config.late_high:
            return f"{sight.late_share:.0%} of the proposals come too late"
        return None

    def _too_little(self, sight: Sight) -> str | None:
        """Not while it is unknown or one goes already, and not when the others would have too much then."""
        if (
            sight.busy_share is None
            or sight.num_draining
            or sight.num_queued
            or sight.num_refused
            or self._too_much(sight) is not None
        ):
            return None
        if sight.num_serving == 1:  # the last one of a pool that may have none
            is_idle = sight.busy_share == 0 and not sight.num_asked
            return "idle" if is_idle else None
        others = sight.busy_share * sight.num_serving / (sight.num_serving - 1)
        return f"busy for {sight.busy_share:.0%} of the time" if others < self._config.busy_low else None


def _since(before_s: float, holds: bool, now_s: float) -> float:
    """When a condition began to hold without a pause; NaN while it does not."""
    if not holds:
        return math.nan
    return now_s if math.isnan(before_s) else before_s
