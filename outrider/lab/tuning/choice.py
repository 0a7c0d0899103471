"""Chooses the setting to recommend from the measured speeds of several."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.lab.tuning.settings import PLAIN

TIE = 0.02
"""Fraction by which a simpler setting may be slower than the fastest (median over the repeats) and still be
recommended. It must also have been at least as fast in one repeat."""

Speeds = Mapping[str, Sequence[float]]
"""Tokens per second by name of the setting: speeds[name][i] was measured in repeat i. The simplest setting comes first.
Only speeds of the same repeat are compared with each other."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of one setting's speed to another's: the median, smallest and largest over the repeats of a measurement."""

    median: float
    low: float
    """Smallest ratio of the two speeds in any repeat."""
    high: float
    """Largest ratio of the two speeds in any repeat."""

    @classmethod
    def of(cls, speeds: Sequence[float], others: Sequence[float]) -> Ratio:
        """Return the ratio of a setting's speeds to those of another setting, both given as one speed per repeat."""
        ratios = [speed / other for speed, other in zip(speeds, others, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The setting of speculation that is recommended, and the fastest setting that was measured."""

    name: str
    """Name of the recommended setting of speculation."""
    fastest: str
    """Name of the fastest setting of speculation. It may be the recommended one."""
    speedup: Ratio
    """Speed of the recommended setting relative to plain decoding."""
    fastest_speedup: Ratio
    """Speed of the fastest setting relative to plain decoding."""


def choose(speeds: Speeds) -> Recommendation:
    """Recommend the fastest setting of speculation, or a simpler setting that is as fast within noise (see TIE). One of
    the settings must be plain decoding (PLAIN).
    """
    fastest = _fastest(speeds, speeds)
    name = _simplest_tie(speeds, fastest)
    plain = speeds[PLAIN]
    return Recommendation(name, fastest, Ratio.of(speeds[name], plain), Ratio.of(speeds[fastest], plain))


def fastest_drafted(speeds: Speeds) -> str:
    """Return the name of the fastest setting other than plain decoding."""
    return _fastest(speeds, filter(PLAIN.__ne__, speeds))


def _fastest(speeds: Speeds, names: Iterable[str]) -> str:
    return max(names, key=lambda name: statistics.median(speeds[name]))


def _simplest_tie(speeds: Speeds, fastest: str) -> str:
    for name in speeds:
        ratio = Ratio.of(speeds[name], speeds[fastest])
        if ratio.median >= 1 - TIE and ratio.high >= 1:
            return name
    return fastest
