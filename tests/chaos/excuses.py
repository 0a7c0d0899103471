"""Which errors a stream may see: those whose cause was there, at its own gateway and at that time. Pure.

The cause is a gateway that was struck, or that had no target at all. One target, any draft and any link to a draft may
be lost without a word to users.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

RECOVERED_WITHIN_S = 14.0
"""After a strike is over: what hung is noticed within 12 s, and a link is made anew in 2."""
TARGET_WAIT_S = 120.0
"""How long an answer waits for a target before its gateway gives it up."""

Span = tuple[float, float]
"""From and to, monotonic; to = inf while it lasts."""


class Failure(Enum):
    """How an attempt failed."""

    UNAVAILABLE = "unavailable"
    """UNAVAILABLE, 503, or a connection that broke or was refused."""
    TIMED_OUT = "timed out"
    """DEADLINE_EXCEEDED or 504."""
    OTHER = "other"


@dataclass
class Attempt:
    """A stream's asking of one gateway."""

    asked_s: float
    gateway: int
    num_messages: int = 0
    """With tokens."""


class Outages:
    """When which part or link was struck, by its name ("target 1", "gateway 0 to target 1")."""

    def __init__(self, num_gateways: int, num_targets: int) -> None:
        self._gateways = [f"gateway {index}" for index in range(num_gateways)]
        self._targets = [f"target {index}" for index in range(num_targets)]
        self._spans: defaultdict[str, list[Span]] = defaultdict(list)

    def begin(self, part: str, now_s: float) -> None:
        self._spans[part].append((now_s, math.inf))

    def end(self, part: str, now_s: float) -> None:
        began_s, _ = self._spans[part][-1]
        self._spans[part][-1] = (began_s, now_s)

    def struck(self, part: str) -> bool:
        spans = self._spans[part]
        return bool(spans) and spans[-1][1] == math.inf

    def untouched(self, parts: Iterable[str], from_s: float) -> bool:
        """Nothing struck any of them since."""
        return not any(to_s > from_s for part in parts for _, to_s in self._spans[part])

    @property
    def gateways_up(self) -> list[int]:
        return [index for index, name in enumerate(self._gateways) if not self.struck(name)]

    def targetless(self, gateway: int) -> list[Span]:
        """When every target was struck or its link to this gateway, or was so shortly before."""
        name = self._gateways[gateway]
        found: list[Span] = [(-math.inf, math.inf)]
        for target in self._targets:
            away = [*self._spans[target], *self._spans[f"{name} to {target}"]]
            found = _both(found, _merged((began_s, over_s + RECOVERED_WITHIN_S) for began_s, over_s in away))
        return found

    def excuse(self, attempt: Attempt, failure: Failure, failed_s: float) -> str | None:
        """Why this attempt may have failed so at that time; None when nothing explains it."""
        if failure is not Failure.UNAVAILABLE:
            return None
        asked_s = attempt.asked_s
        for began_s, over_s in self._spans[self._gateways[attempt.gateway]]:
            hit = asked_s <= over_s or not attempt.num_messages
            if hit and began_s <= failed_s <= over_s + RECOVERED_WITHIN_S:
                return "its gateway was struck"
        for from_s, to_s in self.targetless(attempt.gateway):
            if not attempt.num_messages and asked_s <= to_s and failed_s >= from_s:
                return "its gateway had no target"
            if failed_s <= to_s and failed_s - from_s >= TARGET_WAIT_S:
                return f"its gateway had no target for {TARGET_WAIT_S:g} s"
        return None


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Those that overlap as one."""
    found: list[Span] = []
    for from_s, to_s in sorted(spans):
        if found and from_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], to_s))
        else:
            found.append((from_s, to_s))
    return found


def _both(one: Sequence[Span], other: Sequence[Span]) -> list[Span]:
    """When both last."""
    pairs = ((max(a[0], b[0]), min(a[1], b[1])) for a in one for b in other)
    return [(from_s, to_s) for from_s, to_s in pairs if from_s < to_s]
