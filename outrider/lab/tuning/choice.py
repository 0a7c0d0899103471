"""Which of the measured settings to run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.lab.tuning.runs import Pass
from outrider.lab.tuning.settings import PLAIN

TIE = 0.02
"""A simpler setting is taken that is behind by no more than this, and ahead in at least one repeat."""

Speeds = Mapping[str, Sequence[float]]
"""Tokens per second by setting, simplest first, one of each a repeat: passes of the same repeat are compared."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Compares speeds, repeat by repeat: the ratio of one setting's to another's."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, speeds: Sequence[float], others: Sequence[float]) -> Ratio:
        ratios = [one / other for one, other in zip(speeds, others, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Recommendation:
    name: str
    fastest: str
    """The same where it was measured the fastest."""
    speedup: Ratio
    """Over plain decoding."""
    fastest_speedup: Ratio


def speeds_of(passes: Mapping[str, Sequence[Pass]]) -> dict[str, list[float]]:
    return {name: [one.tokens_per_s for one in own] for name, own in passes.items()}


def choose(speeds: Speeds) -> Recommendation:
    """Return the fastest, or what is simpler and as fast within noise. PLAIN is one of them."""
    plain = speeds[PLAIN]
    fastest = max(speeds, key=lambda name: statistics.median(speeds[name]))
    name = next(name for name in speeds if name == fastest or _ties(speeds[name], speeds[fastest]))
    return Recommendation(name, fastest, Ratio.of(speeds[name], plain), Ratio.of(speeds[fastest], plain))


def fastest_of(speeds: Speeds) -> str:
    """Return the name of the fastest setting but for plain decoding."""
    return max((name for name in speeds if name != PLAIN), key=lambda name: statistics.median(speeds[name]))


def _ties(speeds: Sequence[float], others: Sequence[float]) -> bool:
    ratio = Ratio.of(speeds, others)
    return ratio.median >= 1 - TIE and ratio.high >= 1
