"""Chooses which of the measured settings to run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.lab.tuning.settings import PLAIN

TIE = 0.02
"""Share of the speed by which a simpler setting may be behind and be chosen, if it was ahead in one repeat."""

Speeds = Mapping[str, Sequence[float]]
"""Tokens per second by setting, simplest first, and repeat: entries of the same repeat are compared."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speeds of one setting over those of another, repeat by repeat."""

    median: float
    low: float
    """Smallest ratio of a repeat."""
    high: float
    """Largest ratio of a repeat."""

    @classmethod
    def of(cls, speeds: Sequence[float], others: Sequence[float]) -> Ratio:
        """Compare speeds with those of another setting; both by repeat."""
        ratios = [speed / other for speed, other in zip(speeds, others, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The setting to run, and the fastest measured."""

    name: str
    """Name of the recommended setting."""
    fastest: str
    """Name of the fastest setting; the same where that is recommended."""
    speedup: Ratio
    """Speed of the recommended setting over plain decoding."""
    fastest_speedup: Ratio
    """Speed of the fastest setting over plain decoding."""


def choose(speeds: Speeds) -> Recommendation:
    """Return the fastest setting, or the simplest that is as fast within noise. PLAIN is among the settings."""
    fastest = _fastest(speeds, speeds)
    name = _simplest_tie(speeds, fastest)
    plain = speeds[PLAIN]
    return Recommendation(name, fastest, Ratio.of(speeds[name], plain), Ratio.of(speeds[fastest], plain))


def fastest_drafted(speeds: Speeds) -> str:
    """Return the name of the fastest setting that speculates."""
    return _fastest(speeds, filter(PLAIN.__ne__, speeds))


def _fastest(speeds: Speeds, names: Iterable[str]) -> str:
    return max(names, key=lambda name: statistics.median(speeds[name]))


def _simplest_tie(speeds: Speeds, fastest: str) -> str:
    for name in speeds:
        ratio = Ratio.of(speeds[name], speeds[fastest])
        if ratio.median >= 1 - TIE and ratio.high >= 1:
            return name
    return fastest
