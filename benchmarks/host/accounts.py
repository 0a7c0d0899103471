"""CPU time by the operating system's accounts, and the line of a step's cost against its number of slots."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.common import with_interval
from benchmarks.host.forward_clock import Forwards
from outrider.wire.processes.descendants import descendants

GATEWAY, TARGET, DRAFT = PROCESSES = "gateway", "target", "draft"
_CPU_CLOCK = 2
"""CPUCLOCK_SCHED of Linux: of a process, all its threads together, also those that have ended."""


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process and those below it have used, in seconds. Raises OSError for no process."""
    return sum(process_cpu_s(each) for each in (pid, *descendants(pid)))


def process_cpu_s(pid: int) -> float:
    """Return the CPU time that a process alone has used, in seconds. Raises OSError for no process.

    It is utime + stime of /proc/PID/stat, in nanoseconds where that has ticks of 10 ms.
    """
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK)


@dataclass(frozen=True)
class Spent:
    """What the processes of a system have used so far, or between two moments."""

    cpu_s: Mapping[str, float]
    """By process."""
    forwards: Mapping[str, Forwards]
    """By worker; empty for an engine whose forwards nobody counts."""

    def since(self, before: Spent) -> Spent:
        """Return what was used after `before`."""
        seconds = {name: value - before.cpu_s[name] for name, value in self.cpu_s.items()}
        forwards = {name: counts.since(before.forwards[name]) for name, counts in self.forwards.items()}
        return Spent(seconds, forwards)

    def host_s(self, name: str) -> float:
        """Return the CPU time of a process outside its model's forwards, in seconds."""
        return self.cpu_s[name] - self.forwards.get(name, Forwards()).cpu_s

    @property
    def total_host_s(self) -> float:
        return sum(self.host_s(name) for name in self.cpu_s)

    @property
    def total_cpu_s(self) -> float:
        return sum(self.cpu_s.values())


@dataclass(frozen=True)
class StepCost:
    """The CPU time of a step as a straight line: `fixed_s + slot_s * slots`."""

    fixed_s: float
    slot_s: float
    max_error: float
    """Largest distance of a point from the line, over the line there."""

    @classmethod
    def fit(cls, slots: Sequence[float], seconds: Sequence[float]) -> StepCost:
        """Fit steps of `slots` slots that took `seconds`, all above 0; each point counts by its relative error."""
        took_s = np.array(seconds)
        slot_s, fixed_s = np.polyfit(slots, took_s, 1, w=1 / took_s)
        line_s = fixed_s + slot_s * np.array(slots)
        return cls(float(fixed_s), float(slot_s), float(np.max(np.abs(took_s / line_s - 1))))


def geometric_mean(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean and the ends of its 95 % interval, of ratios measured one after the other."""
    mean, low, high = with_interval([math.log(ratio) for ratio in ratios])
    return math.exp(mean), math.exp(low), math.exp(high)
