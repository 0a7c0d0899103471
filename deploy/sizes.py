"""Decide how many workers each pool is to have: at the start, by hand and by load. For `fleet.py`, which starts and
drains them.

`PoolLoads` sums up the reports of workers and gateways as the load of a pool, a `PoolLoad`; a `Scaler` decides by it.
No I/O, and no clock of their own.

A pool grows by one worker after a few seconds of too much load, and shrinks by one after a minute of too little. It
does neither while a worker starts, whose effect is still to come. While a worker drains, the pool can grow, which takes
that worker back, but not shrink. The last draft is drained when no request of its targets runs, and a draft is started
again when some have run for as long as growing takes.
"""

from __future__ import annotations

import concurrent.futures
import math
import queue
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from deploy.pool_member import ROLES
from deploy.sightings import PERIOD_S
from outrider.v1 import common_pb2, registry_pb2
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.settings.cores import Role
from outrider.wire.settings.pools import MAX_COUNT, Pool
from outrider.wire.settings.system import ScalingConfig
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

WINDOW_S = 5.0
"""Number of seconds, up to now, over which loads are measured: busy time, late rounds and refused choices."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Load of a pool at one moment."""

    num_serving: int
    """Number of workers that serve."""
    num_starting: int = 0
    """Number of workers that start."""
    num_draining: int = 0
    """Number of workers that drain."""
    num_queued: int = 0
    """Number of choices that wait for a slot of this pool, at all gateways; 0 for a draft pool."""
    num_refused: int = 0
    """Number of choices that all gateways together refused in the last WINDOW_S seconds because no slot was free; 0 for
    a draft pool."""
    num_choices: int = 0
    """For a draft pool: number of choices that run or wait, at all gateways, in the target pools that it drafts for. 0
    for a target pool."""
    busy_share: float | None = None
    """Fraction (0 to 1) of the last WINDOW_S seconds that a serving worker of the pool spent in steps: the mean over
    these workers. None if it is unknown for one of them, or none serves."""
    late_share: float | None = None
    """For a draft pool: the fraction (0 to 1) of rounds for which draft tokens came too late, in the last WINDOW_S
    seconds and in the target pools that it drafts for. None without rounds, and for a target pool."""


class SizeChange(Enum):
    """Change of a pool's number of workers: one more, one fewer, or none."""

    STAY = 0
    GROW = 1
    SHRINK = -1


@dataclass(frozen=True, slots=True)
class Decision:
    """Change of a pool's number of workers, and its reason for the log."""

    change: SizeChange
    reason: str


class Scaler:
    """Decides the size of one pool by its load. Call `decide` about once a second."""

    def __init__(self, role: Role, min_count: int, max_count: int, config: ScalingConfig) -> None:
        """Prepare for a pool of `min_count` to `max_count` workers.

        config: thresholds of load, and times before a change.
        """
        self._role = role
        self._min_count = min_count
        self._max_count = max_count
        self._config = config
        self._over_since_s = math.nan
        self._under_since_s = math.nan

    def reset(self) -> None:
        """Forget how long the load has been too high or too low. Call it after the pool's size was set by hand."""
        self._over_since_s = self._under_since_s = math.nan

    def decide(self, load: PoolLoad, now_s: float) -> Decision:
        """Return the change of the pool's size that is due now, with its reason. A change is due once the load has been
        too high or too low for as long as the settings say.

        load: the pool's present load. now_s: monotonic time in seconds.
        """
        if load.num_starting:
            self.reset()
            return Decision(SizeChange.STAY, "a worker is starting")
        over = self._too_much(load)
        under = self._too_little(load)
        self._over_since_s = _since(self._over_since_s, over is not None, now_s)
        self._under_since_s = _since(self._under_since_s, under is not None, now_s)
        if over is not None and now_s - self._over_since_s >= self._config.up_after_s:
            return self._change(SizeChange.GROW, load.num_serving < self._max_count, over)
        if under is not None and now_s - self._under_since_s >= self._config.down_after_s:
            return self._change(SizeChange.SHRINK, load.num_serving > self._min_count, under)
        return Decision(SizeChange.STAY, over or under or "neither too much nor too little")

    def _change(self, change: SizeChange, is_allowed: bool, reason: str) -> Decision:
        if not is_allowed:
            limit = "min"
            if change is SizeChange.GROW:
                limit = "max"
            return Decision(SizeChange.STAY, f"{reason}, and the pool has {limit}")
        self.reset()
        return Decision(change, reason)

    def _too_much(self, load: PoolLoad) -> str | None:
        """Return the reason to grow; None if there is none."""
        if not load.num_serving:
            if not load.num_choices:
                return None
            return f"no draft for {load.num_choices} answers"
        if self._role == "target":
            return self._too_much_for_targets(load)
        if load.late_share is not None and load.late_share > self._config.late_high:
            return f"{load.late_share:.0%} of the steps get their drafts too late"
        return None

    def _too_much_for_targets(self, load: PoolLoad) -> str | None:
        if load.num_queued + load.num_refused > self._config.queue_high * load.num_serving:
            reason = f"{load.num_queued} answers wait for {load.num_serving} targets"
            if load.num_refused:
                reason += f" and {load.num_refused} were refused"
            return reason
        if load.busy_share is not None and load.busy_share > self._config.busy_high:
            return f"busy for {load.busy_share:.0%} of the time"
        return None

    def _too_little(self, load: PoolLoad) -> str | None:
        """Return the reason to shrink; None if there is none, the load is not known, or a worker drains already."""
        if (
            load.busy_share is None
            or load.num_draining
            or load.num_queued
            or load.num_refused
            or self._too_much(load) is not None
        ):
            return None
        if load.num_serving == 1:  # the last one of a pool that may have none
            if load.busy_share == 0 and not load.num_choices:
                return "idle"
            return None
        # 3 workers busy for 20 % of the time: the remaining 2 would be for 30 %
        share_of_others = load.busy_share * load.num_serving / (load.num_serving - 1)
        if share_of_others >= self._config.busy_low:
            return None
        return f"busy for {load.busy_share:.0%} of the time"


def _since(since_s: float, holds: bool, now_s: float) -> float:
    """Return the monotonic time, in seconds, since which a condition has held without a break; NaN while it does not
    hold. since_s: the previous result.
    """
    if not holds:
        return math.nan
    if math.isnan(since_s):
        return now_s
    return since_s


_Samples = deque[tuple[float, int, int]]
"""Samples of the last WINDOW_S: the time in seconds, and two sums that only grow."""


class PoolLoads:
    """Collects workers' replies to GetInfo and the gateways' reports, and computes the load of each pool from them."""

    def __init__(self) -> None:
        self._busy: dict[str, _Samples] = {}
        """Samples of the microseconds spent in steps, by worker."""
        self._rounds: dict[tuple[str, str], _Samples] = {}
        """Samples of the numbers of rounds, and of rounds with a late proposal, by gateway and target pool."""
        self._queued: dict[str, int] = {}
        """Number of choices that wait, by target pool."""
        self._refused: dict[tuple[str, str], _Samples] = {}
        """Samples of the number of refused choices, by gateway and target pool."""
        self._running: dict[str, int] = {}
        """Number of choices that run, by target pool."""

    def add_info(self, member: str, info: common_pb2.WorkerInfo, at_s: float) -> None:
        """Add a worker's reply to GetInfo. member: name of the worker. at_s: monotonic time of the call in seconds."""
        samples = self._busy.setdefault(member, deque())
        if samples and info.busy_us < samples[-1][1]:  # another life
            samples.clear()
        if info.busy_us or not info.num_steps:
            _add(samples, at_s, info.busy_us, 0)

    def forget(self, member: str) -> None:
        """Drop the replies of a worker, so that its busy time no longer counts."""
        self._busy.pop(member, None)

    def set_reports(self, reports: Iterable[registry_pb2.GatewayReport], at_s: float) -> None:
        """Replace the gateways' reports by the latest ones. What is known of gateways that are not among them is
        dropped.

        reports: the latest report of each running gateway. at_s: monotonic time in seconds.
        """
        self._queued.clear()
        self._running.clear()
        reported: set[tuple[str, str]] = set()
        for report in reports:
            for load in report.pools:
                self._queued[load.pool] = self._queued.get(load.pool, 0) + load.num_queued
                self._running[load.pool] = self._running.get(load.pool, 0) + load.num_running
                key = (report.gateway, load.pool)
                reported.add(key)
                _add(self._rounds.setdefault(key, deque()), at_s, load.num_rounds, load.num_late)
                _add(self._refused.setdefault(key, deque()), at_s, load.num_refused, 0)
        for key in self._rounds.keys() - reported:
            del self._rounds[key], self._refused[key]

    def load_of(self, pool: Pool, serving: Iterable[str], *, num_starting: int, num_draining: int) -> PoolLoad:
        """Return the load of a pool.

        serving: names of the pool's workers that can be used. num_starting, num_draining: numbers of its workers that
        start and that drain.
        """
        members = list(serving)
        num_queued = num_refused = 0
        late_share = None
        if pool.role == "target":
            num_queued = self._queued.get(pool.name, 0)
            num_refused = self._num_refused(pool.name)
        else:
            late_share = self._late_share(pool.serves)
        num_choices = 0
        for target in pool.serves:
            num_choices += self._queued.get(target, 0) + self._running.get(target, 0)
        return PoolLoad(
            num_serving=len(members),
            num_starting=num_starting,
            num_draining=num_draining,
            num_queued=num_queued,
            num_choices=num_choices,
            num_refused=num_refused,
            busy_share=self._busy_share(members),
            late_share=late_share,
        )

    def _busy_share(self, members: Sequence[str]) -> float | None:
        total = 0.0
        for name in members:
            share = _share(self._busy.get(name))
            if share is None:
                return None
            total += share
        if not members:
            return None
        return total / len(members)

    def _num_refused(self, target: str) -> int:
        num_refused = 0
        for (_, pool), samples in self._refused.items():
            if pool == target:
                num_refused += max(0, samples[-1][1] - samples[0][1])
        return num_refused

    def _late_share(self, targets: Sequence[str]) -> float | None:
        num_rounds = num_late = 0
        for (_, pool), samples in self._rounds.items():
            if pool in targets:
                num_rounds += samples[-1][1] - samples[0][1]
                num_late += samples[-1][2] - samples[0][2]
        if num_rounds <= 0:
            return None
        return num_late / num_rounds


def _add(samples: _Samples, at_s: float, first: int, second: int) -> None:
    samples.append((at_s, first, second))
    while samples[0][0] < at_s - WINDOW_S and len(samples) > 2:
        samples.popleft()


def _share(samples: _Samples | None) -> float | None:
    """Return the fraction of the time between the samples that was spent in steps; None if that time is too short."""
    if samples is None or len(samples) < 2 or samples[-1][0] - samples[0][0] < WINDOW_S / 2:
        return None
    return min(1.0, 1e-6 * (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0]))


_Order = tuple[str, int | None, concurrent.futures.Future[registry_pb2.ScaleReply]]
"""Name of a pool (empty for all pools), its new number of workers or None, and the future of the reply with the
sizes."""


@dataclass(frozen=True, slots=True)
class Census:
    """The workers of one pool by state: serving, starting, draining."""

    serving: list[str]
    """Names of the pool's workers that serve."""
    num_starting: int
    num_draining: int

    @property
    def total(self) -> int:
        """Number of the pool's workers in these three states."""
        return len(self.serving) + self.num_starting + self.num_draining


class PoolSizes:
    """Holds the number of workers that each pool is to have. Used on the fleet's thread, except `request_size`."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        scaling: ScalingConfig,
        loads: PoolLoads,
        census: Callable[[Pool], Census],
        why_full: Callable[[Pool], str | None],
        report: Callable[[str, str, str], None],
    ) -> None:
        """Start with the counts in the pools' settings.

        scaling: the settings for sizes by load. loads: the loads of the pools. census: returns a pool's workers by
        state. why_full, report: as for `Fleet`.
        """
        self._pools = pools
        self._loads = loads
        self._census = census
        self._why_full = why_full
        self._report = report
        self._scalers = dict[str, Scaler]()
        self.desired_counts = dict[str, int]()
        """Number of workers that each pool is to have, by pool name."""
        for pool in pools.values():
            self.desired_counts[pool.name] = pool.count
            if pool.is_sized_by_load:
                self._scalers[pool.name] = Scaler(pool.role, pool.min, pool.max, scaling)
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._by_load_at_s = 0.0

    def request_size(self, pool: str, count: int | None) -> concurrent.futures.Future[registry_pb2.ScaleReply]:
        """Change a pool's number of workers at the next call of `set_by_hand`. Return the future of a reply with the
        pool's size.

        pool: name of the pool; empty to get the sizes of all pools, with `count` None. count: new number of workers;
        None to change nothing. May be called on any thread.
        """
        done: concurrent.futures.Future[registry_pb2.ScaleReply] = concurrent.futures.Future()
        self._orders.put((pool, count, done))
        return done

    def set_by_hand(self) -> list[str]:
        """Give pools the numbers of workers that `request_size` was asked for since the last `set_by_hand`. Return the
        names of these pools.
        """
        names = list[str]()
        while not self._orders.empty():
            name, count, done = self._orders.get()
            if not done.set_running_or_notify_cancel():
                continue  # the caller has left
            try:
                if count is not None:
                    self._set(self._pool(name), count)
                    names.append(name)
                pools = list(self._pools.values())
                if name:
                    pools = [self._pool(name)]
                done.set_result(registry_pb2.ScaleReply(pools=list(map(self._size, pools))))
            except OutriderError as error:
                done.set_exception(error)
        return names

    def set_by_load(self, reports: Iterable[registry_pb2.GatewayReport], now_s: float) -> None:
        """Add a worker to each pool whose load is too high, and remove one from each pool whose load is too low. If the
        loads were checked less than a second ago, do nothing.

        reports: the latest report of each gateway. now_s: monotonic time in seconds.
        """
        if now_s - self._by_load_at_s < PERIOD_S:
            return
        self._by_load_at_s = now_s
        self._loads.set_reports(reports, now_s)
        for name, scaler in self._scalers.items():
            pool = self._pools[name]
            census = self._census(pool)
            num_starting = max(census.num_starting, self.desired_counts[name] - len(census.serving))
            load = self._loads.load_of(
                pool, census.serving, num_starting=num_starting, num_draining=census.num_draining
            )
            decision = scaler.decide(load, now_s)
            if decision.change is not SizeChange.STAY:
                self._resize(pool, decision)

    def _resize(self, pool: Pool, decision: Decision) -> None:
        count = self.desired_counts[pool.name] + decision.change.value
        if decision.change is SizeChange.GROW:
            reason = self._why_not_added(pool, count)
            if reason is not None:
                log.warning("%s would get another worker: %s; but %s", pool.name, decision.reason, reason)
                return
        self.desired_counts[pool.name] = count
        self._report(pool.name, "scaling", f"to {count}: {decision.reason}")

    def _pool(self, name: str) -> Pool:
        if name not in self._pools:
            known = ", ".join(self._pools)
            raise ConfigError(f"there is no pool {name!r}; there are {known}", param="pool")
        return self._pools[name]

    def _set(self, pool: Pool, count: int) -> None:
        min_count = int(pool.role == "target")
        max_count = MAX_COUNT
        limits = ""
        if pool.is_sized_by_load:
            min_count = pool.min
            max_count = pool.max
            limits = ", its min and max"
        if not min_count <= count <= max_count:
            raise ConfigError(
                f"{pool.name} cannot have {count} workers: from {min_count} to {max_count}{limits}", param="count"
            )
        if count > self.desired_counts[pool.name]:
            reason = self._why_not_added(pool, count)
            if reason is not None:
                raise ConfigError(reason, param="count")
        self.desired_counts[pool.name] = count
        if pool.name in self._scalers:
            self._scalers[pool.name].reset()

    def _why_not_added(self, pool: Pool, count: int) -> str | None:
        """Return the reason why there is no room for `count` workers; None if there is room. Draining workers can be
        taken back.
        """
        if count <= self._census(pool).total:
            return None
        return self._why_full(pool)

    def _size(self, pool: Pool) -> registry_pb2.PoolSize:
        census = self._census(pool)
        return registry_pb2.PoolSize(
            pool=pool.name,
            role=ROLES[pool.role],
            num_desired=self.desired_counts[pool.name],
            num_starting=census.num_starting,
            num_serving=len(census.serving),
            num_draining=census.num_draining,
        )
