"""The runner of all benchmarks: options, arms in turn, ratios with intervals, and one document.

A benchmark compares *arms*: systems, or ways to ask one. A *unit* is what each arm does once before the next unit, such
as answering a few prompts. Arms take turns in another order each time, so that a drift of the machine hits all alike,
and a ratio compares two arms on one unit in one repetition.

A module has its benchmark as `BENCHMARK`; `benchmarks.__main__` names the modules.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from benchmarks.common import Report, parser

NUM_RESAMPLES = 2000
Arm = TypeVar("Arm")
Sample = TypeVar("Sample")
Found = dict[str, list[list[Sample]]]
"""What was measured, by arm, unit and repetition."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its options and what it measures."""

    title: str
    measure: Callable[[Report, argparse.Namespace], Sequence[str] | None]
    """Measures everything and fills the report. Returns the violations of what must hold; None = nothing must."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Defaults, or an `Option` each, by name."""
    well: str = "No violation."
    """What the report says where nothing is violated."""


def run(name: str, doc: str | None, benchmark: Benchmark, args: Sequence[str]) -> int:
    """Run a benchmark and write its document, also of what was measured until a failure.

    Returns the exit code: 1 where something that must hold does not.
    """
    options = parser(doc, **benchmark.options).parse_args(args)
    report = Report(name, benchmark.title)
    violations: Sequence[str] | None = None
    try:
        violations = benchmark.measure(report, options)
        if violations is not None:
            report.verdict(violations, benchmark.well)
    finally:
        if report.data:
            report.write(options.results)
    return 1 if violations else 0


def in_turn(arms: Sequence[Arm], index: int) -> Sequence[Arm]:
    """Return the arms in the order of a turn: each turn begins with the next arm."""
    first = index % len(arms)
    return (*arms[first:], *arms[:first])


async def take_turns(
    arms: Sequence[str], num_units: int, repetitions: int, measure: Callable[[str, int, int], Awaitable[Sample]]
) -> Found[Sample]:
    """Measure every unit with every arm, as often as `repetitions` says.

    measure: called with the arm's name, the unit's index and the repetition's.
    """
    found: Found[Sample] = {arm: [[] for _ in range(num_units)] for arm in arms}
    for repetition in range(repetitions):
        for unit in range(num_units):
            for arm in in_turn(arms, repetition + unit):
                found[arm][unit].append(await measure(arm, unit, repetition))
    return found


@dataclass(frozen=True)
class Ratio:
    """A median, or another middle, and the interval of 95 % from a bootstrap that draws whole units."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, by_unit: Sequence[Sequence[Any]], middle: Callable[[Any], Any] = np.median) -> Ratio:
        """Return the ratio of the values by unit, at least one each: numbers, or rows for `middle`."""
        rng = np.random.default_rng(0)
        picks = rng.integers(len(by_unit), size=(NUM_RESAMPLES, len(by_unit)))
        middles = [float(middle(np.concatenate([by_unit[i] for i in row]))) for row in picks]
        low, high = np.quantile(middles, (0.025, 0.975))
        return cls(float(middle(np.concatenate([*by_unit]))), float(low), float(high))

    @classmethod
    def between(
        cls,
        own: Sequence[Sequence[Sample]],
        base: Sequence[Sequence[Sample]],
        value: Callable[[Sample], float],
        middle: Callable[[Any], Any] = np.median,
    ) -> Ratio:
        """Return the ratio of one arm's values to another's, sample by sample."""
        ratios = list[list[float]]()
        for samples, others in zip(own, base, strict=True):
            ratios.append([value(one) / value(other) for one, other in zip(samples, others, strict=True)])
        return cls.of(ratios, middle)

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.low:.3f}-{self.high:.3f})"
