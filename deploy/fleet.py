"""The workers of a system and what becomes of them: started, followed through restarts, added, drained and ended.

One owner: the launcher's main thread, which calls `tick` a few times a second. Workers are reached through
`ray_workers`, seen through `sightings`; gateways hear of them through what `membership` returns.
"""

from __future__ import annotations

import concurrent.futures
import queue
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from deploy.actors import Refused, Started
from deploy.loads import Loads
from deploy.ray_workers import Answer, Lost
from deploy.scaling import Change, Scaler
from deploy.sightings import Seen
from outrider.cli.pools import MAX_COUNT, Pool, Role
from outrider.cli.system import ScalingConfig
from outrider.v1 import common_pb2, registry_pb2
from outrider.wire.errors import ConfigError, OutriderError, Unavailable
from outrider.wire.log import get_logger

log = get_logger(__name__)

ROLES = {"target": registry_pb2.ROLE_TARGET, "draft": registry_pb2.ROLE_DRAFT}
STARTING = registry_pb2.MEMBER_STATE_STARTING
SERVING = registry_pb2.MEMBER_STATE_SERVING
DRAINING = registry_pb2.MEMBER_STATE_DRAINING

_LOST_AFTER_S = 5.0
"""A worker that answers nothing for this long is not to be used; one that refuses the connection twice, at once."""
_HUNG_AFTER_S = 30.0
_ASK_AGAIN_S = 1.0
_MOST_LOST = 3
"""Times that a process may end while it starts for the first time."""
_RETRY_S = 30.0
"""Before another worker is tried in a pool whose last one could not start."""
_FIRST_TOLD_S = 10.0
"""Some of the workers are better than none."""
_NOTICE_S = 1.5
"""Gateways may open slots on a draining worker until they have heard of it."""
_STOP_TIMEOUT_S = 5.0


class Worker(Protocol):
    """`ray_workers.Worker`."""

    def ask(self) -> None: ...
    def answer(self) -> Answer | None: ...
    def restart(self) -> None: ...
    def begin_stop(self) -> None: ...
    def has_stopped(self) -> bool: ...
    def kill(self) -> None: ...


class Workers(Protocol):
    """`ray_workers.RayWorkers`."""

    def create(self, pool: Pool, member: str) -> Worker: ...
    def adopt(self, pools: Iterable[Pool]) -> Mapping[str, tuple[Pool, Worker]]: ...


class Eyes(Protocol):
    """`sightings.Sightings`."""

    def watch(self, member: str, role: Role, address: str) -> None: ...
    def forget(self, member: str) -> None: ...
    def take(self) -> list[Seen]: ...


@dataclass(slots=True, eq=False)
class Member:
    """A worker under its lasting name."""

    name: str
    pool: Pool
    worker: Worker
    state: registry_pb2.MemberState = STARTING
    started: Started | None = None
    """Of its present life, once it has said where it is."""
    epoch: int = 0
    """Of its last life that did."""
    info: common_pb2.WorkerInfo | None = None
    was_there: bool = False
    """A launcher before this one started it."""
    has_served: bool = False
    num_failures: int = 0
    failing_since_s: float | None = None
    """When it was last asked for its facts in vain for the first time; None once Ray says that its process ended."""
    num_lost: int = 0
    ask_at_s: float | None = None
    draining_since_s: float = 0.0
    stopping_since_s: float | None = None


class Fleet:
    """`start` once, then `tick` until `stop`."""

    def __init__(
        self,
        pools: Iterable[Pool],
        scaling: ScalingConfig,
        drain_limit_s: float,
        workers: Workers,
        eyes: Eyes,
        report: Callable[[str, str, str], None],
        room: Callable[[Pool], str | None] = lambda pool: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """report(part, state, detail): what users are told. room(pool): why another worker cannot be placed."""
        self._pools = {pool.name: pool for pool in pools}
        self._workers = workers
        self._eyes = eyes
        self._report = report
        self._room = room
        self._clock = clock
        self._drain_limit_s = drain_limit_s
        self._loads = Loads()
        self._scalers = {
            pool.name: Scaler(pool.role, pool.min, pool.max, scaling)
            for pool in self._pools.values()
            if pool.sized_by_load
        }
        self._wanted = {pool.name: pool.count for pool in self._pools.values()}
        self._members: dict[str, Member] = {}
        self._ending: list[Member] = []
        self._not_before_s: dict[str, float] = {}
        self._scaled_at_s = 0.0
        self._asked: queue.SimpleQueue[tuple[str, int | None, concurrent.futures.Future[registry_pb2.ScaleReply]]]
        self._asked = queue.SimpleQueue()
        self._published = registry_pb2.Membership(epoch=secrets.randbits(64) | 1)
        self._has_started = False
        self._began_s = clock()
        self._is_told = False

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    def start(self) -> None:
        """Ask for every worker; those that run already are taken over, also beyond the count where they may be."""
        for name, (pool, worker) in self._workers.adopt(self._pools.values()).items():
            self._members[name] = Member(name, pool, worker, was_there=True)
        for pool in self._pools.values():
            found = sum(member.pool is pool for member in self._members.values())
            self._wanted[pool.name] = max(pool.count, min(found, pool.max))
        self._reconcile()

    def is_ready(self) -> bool:
        """Whether at some tick every worker that was wanted could be used."""
        return self._has_started

    def late(self) -> list[str]:
        """Names of those that are not ready."""
        return [member.name for member in self._members.values() if member.state == STARTING]

    def tick(self, reports: Iterable[registry_pb2.GatewayReport]) -> registry_pb2.Membership | None:
        """The membership, when it has changed and may be told. Raises OutriderError when the system cannot start."""
        now_s = self._clock()
        for member in self.members:
            self._hear(member, now_s)
        for seen in self._eyes.take():
            self._see(seen)
        for member in self.members:
            self._follow(member, now_s)
        self._end_stopped(now_s)
        if not self._has_started:
            self._has_started = all(self._count(pool, SERVING) >= self._wanted[pool.name] for pool in self._all_pools())
        self._answer_scale_requests()
        self._scale_by_load(reports, now_s)
        self._reconcile()
        return self._changed() if self._may_tell(now_s) else None

    def scale(self, pool: str, count: int | None) -> concurrent.futures.Future[registry_pb2.ScaleReply]:
        """From any thread: `count` workers, or only ask. An empty pool's name asks about all."""
        done: concurrent.futures.Future[registry_pb2.ScaleReply] = concurrent.futures.Future()
        self._asked.put((pool, count, done))
        return done

    def drain_all(self) -> registry_pb2.Membership | None:
        """Everything is to end: no gateway sends more here."""
        for pool in self._all_pools():
            self._wanted[pool.name] = 0
        for member in self.members:
            self._drain(member)
        return self._changed()

    def is_idle(self) -> bool:
        """No answer runs anywhere, as far as can be seen."""
        for seen in self._eyes.take():
            self._see(seen)
        return not any(member.info is not None and member.info.num_slots_in_use for member in self._members.values())

    def end_all(self, but_what_was_there: bool = False) -> None:
        """Orderly, side by side and within seconds; then for good.

        but_what_was_there: workers that run since before this launcher go on; its own start has failed.
        """
        for member in self.members:
            if not (but_what_was_there and member.was_there):
                self._begin_end(member)
        while self._ending:
            self._end_stopped(self._clock())
            time.sleep(0.02)

    def _hear(self, member: Member, now_s: float) -> None:
        """What its actor says of its present life."""
        answer = member.worker.answer()
        if isinstance(answer, Started | Lost):
            self._forget_failures(member, answer)
        if isinstance(answer, Started):
            member.started, member.epoch = answer, answer.epoch
            self._eyes.watch(member.name, member.pool.role, answer.address)
        elif isinstance(answer, Refused):
            self._not_started(member, ConfigError(answer.message), now_s)
        elif isinstance(answer, Lost) and answer.is_final:
            error = Unavailable(f"the process of {member.name} ended for good: {answer.message}")
            self._not_started(member, error, now_s)
        elif isinstance(answer, Lost):
            member.num_lost += 1
            member.ask_at_s = now_s + _ASK_AGAIN_S
            if member.num_lost >= _MOST_LOST and not self._has_started and not member.has_served:
                raise Unavailable(f"the process of {member.name} ended while it started: {answer.message}")

    def _forget_failures(self, member: Member, answer: Started | Lost) -> None:
        """Those of a life that is over. An actor that goes on and whose server does not answer hangs."""
        if isinstance(answer, Lost) or answer.epoch != member.epoch:
            member.failing_since_s = None

    def _not_started(self, member: Member, error: OutriderError, now_s: float) -> None:
        """At first the system does not start; later the pool tries another, after a pause."""
        if not self._has_started and not member.has_served:
            raise error
        log.warning("%s is given up: %s", member.name, error.message)
        if not member.has_served:
            self._not_before_s[member.pool.name] = now_s + _RETRY_S
        self._begin_end(member)

    def _see(self, seen: Seen) -> None:
        member = self._members.get(seen.member)
        if member is None or member.started is None or member.started.address != seen.address:
            return  # of another life, or given up
        if seen.info is None:
            member.num_failures += 1
            member.failing_since_s = member.failing_since_s or seen.at_s
            since_s = seen.at_s - member.failing_since_s
            if since_s >= _LOST_AFTER_S or (not seen.is_silent and member.num_failures > 1):
                self._lose(member, "it does not answer" if seen.is_silent else "its process is gone")
            return
        if seen.info.epoch != member.started.epoch:
            self._lose(member, "it has another life")
            return
        member.info, member.num_failures, member.failing_since_s = seen.info, 0, None
        self._loads.add_info(member.name, seen.info, seen.at_s)
        if member.state == STARTING:
            member.state, member.has_served = SERVING, True
            self._report(member.name, "ready", member.started.address)

    def _lose(self, member: Member, why: str) -> None:
        """It is not to be used until it has said where it is, and answered there."""
        if member.state == SERVING:
            log.warning("%s at %s is lost: %s", member.name, member.started and member.started.address, why)
            self._report(member.name, "lost", why)
            member.state = STARTING
        self._eyes.forget(member.name)
        self._loads.forget(member.name)
        member.started = member.info = None
        member.num_failures = 0
        member.worker.ask()

    def _follow(self, member: Member, now_s: float) -> None:
        if member.ask_at_s is not None and now_s >= member.ask_at_s:
            member.ask_at_s = None
            member.worker.ask()
        if member.state == DRAINING:
            idle = member.info is None or not member.info.num_slots_in_use
            since_s = now_s - member.draining_since_s
            if since_s >= self._drain_limit_s or (idle and since_s >= _NOTICE_S):
                self._report(member.name, "ended", "it has drained" if idle else "its answers took too long")
                self._begin_end(member)
        elif member.failing_since_s is not None and now_s - member.failing_since_s >= _HUNG_AFTER_S:
            log.warning("%s has not answered for %.0f s: its process is ended", member.name, _HUNG_AFTER_S)
            member.failing_since_s = None
            member.worker.restart()

    def _drain(self, member: Member) -> None:
        if member.state == STARTING:  # nobody uses it
            self._begin_end(member)
        elif member.state == SERVING:
            member.state, member.draining_since_s = DRAINING, self._clock()
            self._report(member.name, "draining", member.started.address if member.started else "")

    def _begin_end(self, member: Member) -> None:
        del self._members[member.name]
        self._eyes.forget(member.name)
        self._loads.forget(member.name)
        member.worker.begin_stop()
        member.stopping_since_s = self._clock()
        self._ending.append(member)

    def _end_stopped(self, now_s: float) -> None:
        for member in list(self._ending):
            since_s = now_s - (member.stopping_since_s or now_s)
            if member.worker.has_stopped() or since_s >= _STOP_TIMEOUT_S:
                member.worker.kill()
                self._ending.remove(member)

    def _answer_scale_requests(self) -> None:
        while not self._asked.empty():
            name, count, done = self._asked.get()
            if not done.set_running_or_notify_cancel():
                continue  # who asked has left
            try:
                if count is not None:
                    self._set_wanted(self._pool(name), count)
                pools = [self._pool(name)] if name else self._all_pools()
                done.set_result(registry_pb2.ScaleReply(pools=[self._size(pool) for pool in pools]))
            except OutriderError as error:
                done.set_exception(error)

    def _pool(self, name: str) -> Pool:
        if name not in self._pools:
            known = ", ".join(self._pools)
            raise ConfigError(f"there is no pool {name!r}; there are {known}", param="pool")
        return self._pools[name]

    def _set_wanted(self, pool: Pool, count: int) -> None:
        least, most = (pool.min, pool.max) if pool.sized_by_load else (int(pool.role == "target"), MAX_COUNT)
        if not least <= count <= most:
            by = ", its min and max" if pool.sized_by_load else ""
            raise ConfigError(f"{pool.name} cannot have {count} workers: from {least} to {most}{by}", param="count")
        if count > self._wanted[pool.name] and (reason := self._room(pool)):
            raise ConfigError(reason, param="count")
        self._wanted[pool.name] = count
        self._not_before_s.pop(pool.name, None)
        if pool.name in self._scalers:
            self._scalers[pool.name].reset()

    def _size(self, pool: Pool) -> registry_pb2.PoolSize:
        return registry_pb2.PoolSize(
            pool=pool.name,
            role=ROLES[pool.role],
            num_wanted=self._wanted[pool.name],
            num_starting=self._count(pool, STARTING),
            num_serving=self._count(pool, SERVING),
            num_draining=self._count(pool, DRAINING),
        )

    def _scale_by_load(self, reports: Iterable[registry_pb2.GatewayReport], now_s: float) -> None:
        if not self._has_started or now_s - self._scaled_at_s < 1.0:
            return
        self._scaled_at_s = now_s
        self._loads.set_reports(reports, now_s)
        for name, scaler in self._scalers.items():
            pool = self._pools[name]
            serving = [member.name for member in self._of(pool) if member.state == SERVING]
            starting = max(self._count(pool, STARTING), self._wanted[name] - len(serving))
            sight = self._loads.sight(pool, serving, num_starting=starting, num_draining=self._count(pool, DRAINING))
            decision = scaler.decide(sight, now_s)
            if decision.change is Change.GROW and (reason := self._room(pool)):
                log.warning("%s would get another worker: %s; but %s", name, decision.reason, reason)
            elif decision.change is not Change.STAY:
                self._wanted[name] += decision.change.value
                self._report(name, "scaling", f"to {self._wanted[name]}: {decision.reason}")

    def _reconcile(self) -> None:
        """Start what is missing, drain what is too much."""
        for pool in self._all_pools():
            active = [member for member in self._of(pool) if member.state != DRAINING]
            missing = self._wanted[pool.name] - len(active)
            for member in [one for one in self._of(pool) if one.state == DRAINING][: max(0, missing)]:
                member.state = SERVING  # it takes requests again; its actor was told nothing
                missing -= 1
            if missing > 0 and self._clock() >= self._not_before_s.get(pool.name, -1.0):
                for _ in range(missing):
                    self._create(pool)
            for member in sorted(active, key=_least_useful)[: max(0, -missing)]:
                self._drain(member)

    def _create(self, pool: Pool) -> None:
        taken = {*self._members, *(member.name for member in self._ending)}
        name = next(name for index in range(2 * MAX_COUNT) if (name := pool.member(index)) not in taken)
        self._report(name, "loading", pool.worker.model)
        try:
            self._members[name] = Member(name, pool, self._workers.create(pool, name))
        except Unavailable as error:
            if not self._has_started:
                raise
            log.warning("%s; tried again in %g s", error.message, _RETRY_S)
            self._not_before_s[pool.name] = self._clock() + _RETRY_S

    def _may_tell(self, now_s: float) -> bool:
        """Not before the workers were found: gateways that a launcher before this one told of them go on with that."""
        if not self._is_told:
            some = any(member.state == SERVING for member in self._members.values())
            self._is_told = self._has_started or (some and now_s - self._began_s >= _FIRST_TOLD_S)
        return self._is_told

    def _changed(self) -> registry_pb2.Membership | None:
        now = registry_pb2.Membership(
            epoch=self._published.epoch,
            version=self._published.version,
            pools=[_pool_message(pool) for pool in self._all_pools()],
            members=[_member_message(member) for member in self._members.values()],
        )
        if now == self._published:
            return None
        now.version += 1
        self._published = now
        return now

    def _all_pools(self) -> list[Pool]:
        return list(self._pools.values())

    def _of(self, pool: Pool) -> list[Member]:
        return [member for member in self._members.values() if member.pool is pool]

    def _count(self, pool: Pool, state: registry_pb2.MemberState) -> int:
        return sum(member.state == state for member in self._of(pool))


def _least_useful(member: Member) -> tuple[bool, int, int]:
    """First to go: one that nobody uses yet, then the one with the fewest answers, then the last."""
    slots = member.info.num_slots_in_use if member.info is not None else 0
    return (member.state == SERVING, slots, -int(member.name.rpartition("-")[2]))


def _pool_message(pool: Pool) -> registry_pb2.Pool:
    return registry_pb2.Pool(
        name=pool.name, role=ROLES[pool.role], model_name=pool.model_name or "", serves=pool.serves
    )


def _member_message(member: Member) -> registry_pb2.Member:
    started = member.started if member.state != STARTING else None
    return registry_pb2.Member(
        name=member.name,
        pool=member.pool.name,
        role=ROLES[member.pool.role],
        state=member.state,
        address=started.address if started else "",
        metrics_address=(started.metrics_address or "") if started else "",
        node=started.node if started else "",
    )
