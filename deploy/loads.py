"""What workers and gateways report, as the few numbers that pools are sized by. No I/O, no clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from deploy.scaling import Sight
from outrider.cli.pools import Pool
from outrider.v1 import common_pb2, registry_pb2

WINDOW_S = 5.0

_Samples = deque[tuple[float, int, int]]
"""(when, a sum that only grows, another one)."""


class Loads:
    """Feed it every answer and every report; ask it for a pool's `sight`."""

    def __init__(self) -> None:
        self._busy: dict[str, _Samples] = {}
        self._rounds: dict[tuple[str, str], _Samples] = {}
        self._queued: dict[str, int] = {}
        self._refused: dict[tuple[str, str], _Samples] = {}
        self._running: dict[str, int] = {}

    def add_info(self, member: str, info: common_pb2.WorkerInfo, at_s: float) -> None:
        samples = self._busy.setdefault(member, deque())
        if samples and info.busy_us < samples[-1][1]:  # another life
            samples.clear()
        if info.busy_us or not info.num_steps:
            _add(samples, at_s, info.busy_us, 0)

    def forget(self, member: str) -> None:
        self._busy.pop(member, None)

    def set_reports(self, reports: Iterable[registry_pb2.GatewayReport], at_s: float) -> None:
        """Those of all gateways that live."""
        found = list(reports)
        self._queued.clear()
        self._running.clear()
        seen: set[tuple[str, str]] = set()
        for report in found:
            for load in report.pools:
                self._queued[load.pool] = self._queued.get(load.pool, 0) + load.num_queued
                self._running[load.pool] = self._running.get(load.pool, 0) + load.num_running
                key = (report.gateway, load.pool)
                seen.add(key)
                _add(self._rounds.setdefault(key, deque()), at_s, load.num_rounds, load.num_late)
                _add(self._refused.setdefault(key, deque()), at_s, load.num_refused, 0)
        for key in self._rounds.keys() - seen:
            del self._rounds[key], self._refused[key]

    def sight(self, pool: Pool, serving: Iterable[str], *, num_starting: int, num_draining: int) -> Sight:
        """`serving`: names of the pool's workers that can be used."""
        members = list(serving)
        shares = [share for name in members if (share := _share(self._busy.get(name))) is not None]
        return Sight(
            num_serving=len(members),
            num_starting=num_starting,
            num_draining=num_draining,
            num_queued=self._queued.get(pool.name, 0) if pool.role == "target" else 0,
            num_asked=sum(self._queued.get(name, 0) + self._running.get(name, 0) for name in pool.serves),
            num_refused=self._num_refused(pool.name) if pool.role == "target" else 0,
            busy_share=sum(shares) / len(shares) if members and len(shares) == len(members) else None,
            late_share=self._late(pool.serves) if pool.role == "draft" else None,
        )

    def _num_refused(self, target: str) -> int:
        """In the last WINDOW_S."""
        return sum(max(0, found[-1][1] - found[0][1]) for (_, pool), found in self._refused.items() if pool == target)

    def _late(self, targets: Iterable[str]) -> float | None:
        names = set(targets)
        samples = [found for (_, pool), found in self._rounds.items() if pool in names]
        rounds = sum(found[-1][1] - found[0][1] for found in samples)
        late = sum(found[-1][2] - found[0][2] for found in samples)
        return late / rounds if rounds > 0 else None


def _add(samples: _Samples, at_s: float, first: int, second: int) -> None:
    samples.append((at_s, first, second))
    while samples[0][0] < at_s - WINDOW_S and len(samples) > 2:
        samples.popleft()


def _share(samples: _Samples | None) -> float | None:
    """Microseconds of work over the time between the samples; None where there is no span yet."""
    if samples is None or len(samples) < 2 or samples[-1][0] - samples[0][0] < WINDOW_S / 2:
        return None
    return min(1.0, 1e-6 * (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0]))
