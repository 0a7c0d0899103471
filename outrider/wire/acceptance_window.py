"""The acceptance rate over the last minute, by pair of models: a series that is worked out when it is read."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

WINDOW_S = 60.0


class AcceptanceWindow:
    """Accepted over drafted in the last 60 s, of one pair."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rounds: deque[tuple[float, int, int]] = deque()
        self._drafted = 0
        self._accepted = 0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self._rounds.append((self._clock(), num_drafted, num_accepted))
        self._drafted += num_drafted
        self._accepted += num_accepted
        self._forget()

    def rate(self) -> float:
        """NaN while nothing was drafted in that time."""
        self._forget()
        return self._accepted / self._drafted if self._drafted else math.nan

    def _forget(self) -> None:
        oldest = self._clock() - WINDOW_S
        while self._rounds and self._rounds[0][0] < oldest:
            _, drafted, accepted = self._rounds.popleft()
            self._drafted -= drafted
            self._accepted -= accepted


class AcceptanceRates(Collector):
    """`spec_acceptance_rate`: the windows of all pairs."""

    def __init__(self) -> None:
        self._windows: dict[tuple[str, str], AcceptanceWindow] = {}

    def of(self, target: str, draft: str) -> AcceptanceWindow:
        return self._windows.setdefault((target, draft), AcceptanceWindow())

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "spec_acceptance_rate",
            "Draft tokens accepted over draft tokens verified in the last 60 s; the bonus token is in neither. "
            "NaN when nothing was drafted in that time.",
            labels=["target", "draft"],
        )
        for pair, window in list(self._windows.items()):
            family.add_metric(pair, window.rate())
        yield family
