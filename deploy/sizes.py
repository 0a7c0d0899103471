"""How many workers each pool is to have: at the start, by hand and by load. The fleet owns `Sizes` and makes it so.

`Loads` reduces what workers and gateways report to what is seen of a pool, a `Sight`; a `Scaler` decides by it. No I/O,
and no clock of their own.

A pool grows by one after a few seconds of too much, shrinks by one after a minute of too little, and never while a
worker is starting: what that one changes is not seen yet. A worker that drains bars shrinking alone: load that rises
meanwhile takes it back. The last draft goes when nothing at all runs that it could draft for, and one comes back when
something has run for as long as growing asks.
"""

from __future__ import annotations

import concurrent.futures
import math
import queue
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from deploy.member import ROLES
from deploy.sightings import PERIOD_S
from outrider.v1 import common_pb2, registry_pb2
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.settings.pools import MAX_COUNT, Pool, Role
from outrider.wire.settings.system import ScalingConfig
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

WINDOW_S = 5.0
"""Seconds over which shares and refusals count. Twice as long, and a pool follows its load so much later."""


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
        """Forget what was seen before: somebody has set the size by hand."""
        self._over_since_s = self._under_since_s = math.nan

    def decide(self, sight: Sight, now_s: float) -> Decision:
        """Return what to do now. now_s: of any clock that never goes back."""
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
        if self._role == "target" and sight.busy_share is not None and sight.busy_share > config.busy_high:
            return f"busy for {sight.busy_share:.0%} of the time"
        if self._role == "draft" and sight.late_share is not None and sight.late_share > config.late_high:
            return f"{sight.late_share:.0%} of the steps get their drafts too late"
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


_Samples = deque[tuple[float, int, int]]
"""(when, a sum that only grows, another one)."""


class Loads:
    """Collects every answer of a worker and every report of a gateway, and returns a pool's `sight`."""

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
        """Take the reports of all gateways that live, in place of those before."""
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
        """Return what is seen of a pool. serving: names of its workers that can be used."""
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


_Asked = tuple[str, int | None, concurrent.futures.Future[registry_pb2.ScaleReply]]


@dataclass(frozen=True, slots=True)
class Census:
    """A pool's workers by state."""

    serving: list[str]
    """Their names."""
    num_starting: int
    num_draining: int

    @property
    def total(self) -> int:
        return len(self.serving) + self.num_starting + self.num_draining


class Sizes:
    """Holds what each pool is to have. All on the fleet's thread, but for `ask`."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        scaling: ScalingConfig,
        loads: Loads,
        census: Callable[[Pool], Census],
        room: Callable[[Pool], str | None],
        report: Callable[[str, str, str], None],
    ) -> None:
        """Begin with the pools' counts. census: counts a pool's workers. room, report: as in the fleet."""
        self._pools = pools
        self._loads = loads
        self._census = census
        self._room = room
        self._report = report
        self._scalers = {
            pool.name: Scaler(pool.role, pool.min, pool.max, scaling) for pool in pools.values() if pool.sized_by_load
        }
        self.wanted = {pool.name: pool.count for pool in pools.values()}
        self._asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._by_load_at_s = 0.0

    def ask(self, pool: str, count: int | None) -> concurrent.futures.Future[registry_pb2.ScaleReply]:
        """Ask for `count` workers, or for the sizes alone; an empty name means all pools. For any thread."""
        done: concurrent.futures.Future[registry_pb2.ScaleReply] = concurrent.futures.Future()
        self._asked.put((pool, count, done))
        return done

    def set_by_hand(self) -> list[str]:
        """Do what was asked since the last call. Return the pools that were set."""
        names = []
        while not self._asked.empty():
            name, count, done = self._asked.get()
            if not done.set_running_or_notify_cancel():
                continue  # who asked has left
            try:
                if count is not None:
                    self._set(self._pool(name), count)
                    names.append(name)
                pools = [self._pool(name)] if name else list(self._pools.values())
                done.set_result(registry_pb2.ScaleReply(pools=[self._size(pool) for pool in pools]))
            except OutriderError as error:
                done.set_exception(error)
        return names

    def set_by_load(self, reports: Iterable[registry_pb2.GatewayReport], now_s: float) -> None:
        """Grow and shrink pools by what is seen of them, once a second."""
        if now_s - self._by_load_at_s < PERIOD_S:
            return
        self._by_load_at_s = now_s
        self._loads.set_reports(reports, now_s)
        for name, scaler in self._scalers.items():
            pool = self._pools[name]
            census = self._census(pool)
            starting = max(census.num_starting, self.wanted[name] - len(census.serving))
            sight = self._loads.sight(pool, census.serving, num_starting=starting, num_draining=census.num_draining)
            decision = scaler.decide(sight, now_s)
            wanted = self.wanted[name] + decision.change.value
            if decision.change is Change.GROW and (reason := self._why_no_room(pool, wanted)):
                log.warning("%s would get another worker: %s; but %s", name, decision.reason, reason)
            elif decision.change is not Change.STAY:
                self.wanted[name] = wanted
                self._report(name, "scaling", f"to {wanted}: {decision.reason}")

    def _pool(self, name: str) -> Pool:
        if name not in self._pools:
            known = ", ".join(self._pools)
            raise ConfigError(f"there is no pool {name!r}; there are {known}", param="pool")
        return self._pools[name]

    def _set(self, pool: Pool, count: int) -> None:
        least, most = (pool.min, pool.max) if pool.sized_by_load else (int(pool.role == "target"), MAX_COUNT)
        if not least <= count <= most:
            by = ", its min and max" if pool.sized_by_load else ""
            raise ConfigError(f"{pool.name} cannot have {count} workers: from {least} to {most}{by}", param="count")
        if count > self.wanted[pool.name] and (reason := self._why_no_room(pool, count)):
            raise ConfigError(reason, param="count")
        self.wanted[pool.name] = count
        if pool.name in self._scalers:
            self._scalers[pool.name].reset()

    def _why_no_room(self, pool: Pool, count: int) -> str | None:
        """For so many workers. Those that drain are there: they can be taken back."""
        return self._room(pool) if count > self._census(pool).total else None

    def _size(self, pool: Pool) -> registry_pb2.PoolSize:
        census = self._census(pool)
        return registry_pb2.PoolSize(
            pool=pool.name,
            role=ROLES[pool.role],
            num_wanted=self.wanted[pool.name],
            num_starting=census.num_starting,
            num_serving=len(census.serving),
            num_draining=census.num_draining,
        )
