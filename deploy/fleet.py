"""The workers of a system: start them, follow them through restarts, and add, drain and end them.

Used on the launcher's main thread, which calls `tick` after each reply of a worker, a few times a second. `ray_workers`
calls the workers' actors, `sightings` calls the workers, and `tick` returns the membership that gateways get.
"""

from __future__ import annotations

import concurrent.futures
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from deploy.actors import StartedActor, StartFailure
from deploy.pool_member import DRAINING, ROLES, SERVING, STARTING, PoolMember, Replica, describe_fault
from deploy.ray_workers import ActorLost
from deploy.sightings import PERIOD_S, Sighting
from deploy.sizes import Census, PoolLoads, PoolSizes
from outrider.v1 import registry_pb2
from outrider.wire.errors import ConfigError, OutriderError, Unavailable
from outrider.wire.settings.cores import Role
from outrider.wire.settings.pools import MAX_COUNT, Pool
from outrider.wire.settings.system import START_TIMEOUT_S, ScalingConfig
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

_LOST_AFTER_S = 5.0
"""Seconds of failed calls after which a worker counts as lost. One that refuses the connection twice is lost at
once."""
HUNG_AFTER_S = 30.0
"""Seconds that a worker may hang before its process is ended, so that Ray starts another. Also the pause before a
pool's next start after a new worker of the pool could not start."""
DRAIN_LIMIT_S = 300.0
"""Maximum seconds for which a worker that is to leave its pool waits for its running requests."""
_MAX_ENDS = 3
"""Number of ends of a process during its first start after which the start fails."""
NOTICE_S = 1.5
"""Seconds within which all gateways receive a new list of workers. Until then they may still open slots on a draining
worker."""


class Workers(Protocol):
    """Interface for creating workers' Ray actors and finding running ones. `ray_workers.RayWorkers` implements it."""

    def create(self, pool: Pool, member: str) -> Replica: ...
    def take_over(self, pools: Iterable[Pool]) -> Mapping[str, tuple[Pool, Replica]]: ...


class Calls(Protocol):
    """Interface for calling workers and reading the outcomes. `sightings.WorkerCalls` implements it."""

    def watch(self, member: str, role: Role, address: str) -> None: ...
    def forget(self, member: str) -> None: ...
    def read_sightings(self) -> list[Sighting]: ...


class Fleet:
    """Starts, watches, resizes and ends the workers of a system. Call `start` once, then `tick` again and again, and at
    the end `drain_all` and `end_all`.
    """

    def __init__(
        self,
        pools: Iterable[Pool],
        scaling: ScalingConfig,
        workers: Workers,
        calls: Calls,
        report: Callable[[str, str, str], None],
        why_full: Callable[[Pool], str | None] = lambda pool: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        needs_drafts: bool = False,
    ) -> None:
        """Prepare the workers of `pools`; none is started yet.

        scaling: settings for sizes by load. workers: creates and finds the actors. calls: calls the workers. report:
        called with a part, its state and a detail, for users. why_full: returns the reason why there is no room for
        another worker of a pool; None if there is room. clock: returns monotonic seconds. needs_drafts: whether the
        start fails if a draft cannot start, as it does for a target.
        """
        self._pools = {pool.name: pool for pool in pools}
        self._workers = workers
        self._calls = calls
        self._report = report
        self._clock = clock
        self._spared: set[str] = set()
        """Names of workers that do not reply, perhaps since the launcher is cut off."""
        self._notice_s = NOTICE_S
        self._is_ending = False
        self._loads = PoolLoads()
        self._sizes = PoolSizes(self._pools, scaling, self._loads, self._census, why_full, report)
        self._members: dict[str, PoolMember] = {}
        self._ending: list[PoolMember] = []
        self._not_before_s: dict[str, float] = {}
        """Monotonic time, in seconds, before which no worker of a pool is started, by pool name."""
        self._counted_at_s = 0.0
        self._published = registry_pb2.WorkerList(epoch=secrets.randbits(64) | 1)
        self._has_started = False
        self._needs_drafts = needs_drafts
        self._began_s = clock()
        self._is_published = False

    @property
    def members(self) -> list[PoolMember]:
        """All workers except those that are ending."""
        return list(self._members.values())

    def start(self) -> None:
        """Start every worker, or take over those that an earlier launcher left running. If more of these run than the
        pool's setting `count`, the pool keeps them, up to its setting `max`.
        """
        for name, (pool, worker) in self._workers.take_over(self._pools.values()).items():
            self._members[name] = PoolMember(name, pool, worker, is_taken_over=True, may_be_used=True)
        for pool in self._pools.values():
            num_taken_over = len(self._members_of(pool))
            self._sizes.desired_counts[pool.name] = max(pool.count, min(num_taken_over, pool.max))
        self._reconcile()

    def is_ready(self) -> bool:
        """Return whether the system's start is over: at some tick since `start`, each pool had as many serving workers
        as desired. Draft workers that cannot start are not waited for, unless `needs_drafts` was set.
        """
        return self._has_started

    def is_settled(self) -> bool:
        """Return whether all workers serve and none starts or ends. If so, `tick` changes nothing until a worker
        replies or fails, or a pool's size is changed.
        """
        for member in self._members.values():
            if member.state != SERVING or not member.is_watched:
                return False
        return self._has_started and not self._ending

    def names_starting(self) -> list[str]:
        """Return the names of the workers that are starting."""
        return [member.name for member in self._members.values() if member.state == STARTING]

    def tick(self, reports: Iterable[registry_pb2.GatewayReport]) -> registry_pb2.WorkerList | None:
        """Update the state of all workers. Return the new list of workers for the gateways if it has changed, else
        None.

        reports: the latest report of each gateway. Raises OutriderError if the system's start has failed.
        """
        now_s = self._clock()
        reports = list(reports)
        self._update(now_s, reports)
        self._count_ends(now_s)
        for member in self.members:
            self._follow(member, now_s)
        self._end_stopped(now_s)
        if not self._has_started:
            self._has_started = all(self._is_done_starting(pool, now_s) for pool in self._all_pools())
        for name in self._sizes.set_by_hand():
            self._not_before_s.pop(name, None)
        if self._has_started:
            self._sizes.set_by_load(reports, now_s)
        self._reconcile()
        if not self._may_publish(now_s):
            return None
        return self._changed()

    def scale(self, pool: str, count: int | None) -> concurrent.futures.Future[registry_pb2.ScaleReply]:
        """Change a pool's number of workers at the next tick. Return the future of a reply with the pool's size.

        pool: name of the pool; empty to get the sizes of all pools, with `count` None. count: new number of workers;
        None to change nothing. May be called on any thread.
        """
        return self._sizes.request_size(pool, count)

    def drain_all(self, notice_s: float = NOTICE_S) -> registry_pb2.WorkerList | None:
        """Drain every worker. Return the new list of workers for the gateways; None if the list has not changed.

        notice_s: seconds within which all gateways receive the list. Until then they may open slots, so `is_idle`
        counts only later replies of workers.
        """
        self._is_ending = True
        self._notice_s = notice_s
        for pool in self._all_pools():
            self._sizes.desired_counts[pool.name] = 0
        for member in self.members:
            self._drain(member)
        return self._changed()

    def is_idle(self, reports: Iterable[registry_pb2.GatewayReport] = ()) -> bool:
        """Return whether every worker has no open slots, hangs or cannot be used. Call it after `drain_all`.

        reports: the latest report of each gateway. A worker that replies to a gateway counts as replying.
        """
        now_s = self._clock()
        self._update(now_s, reports)
        return all(self._is_unused(member, now_s) for member in self.members)

    def end_all(self, keeps_taken_over: bool = False) -> None:
        """Stop all workers at the same time, and kill those that do not stop within seconds.

        keeps_taken_over: whether workers that an earlier launcher started are left running. The launcher sets it if its
        own start has failed.
        """
        for member in self.members:
            if not (keeps_taken_over and member.is_taken_over):
                self._begin_end(member)
        while self._ending:
            self._end_stopped(self._clock())
            time.sleep(0.02)

    def _update(self, now_s: float, reports: Iterable[registry_pb2.GatewayReport]) -> None:
        for member in self.members:
            self._read_actor(member, now_s)
        for sighting in self._calls.read_sightings():
            self._record(sighting)
        reachable = set[str]()
        for report in reports:
            reachable.update(report.responsive_workers)
        self._spare(reachable, now_s)

    def _spare(self, reachable: set[str], now_s: float) -> None:
        """Do not count a missing reply of workers if the launcher itself may be cut off.

        reachable: names of workers that reply to gateways. A worker without a reply is spared if it is among them, or
        if no worker replies.
        """
        is_cut_off = self._is_cut_off(now_s)
        spared = set[str]()
        for member in self.members:
            if member.hanging_since_s is None or member.failing_since_s is None:
                continue
            is_reachable = member.is_silent and member.name in reachable
            if now_s - member.failing_since_s < _LOST_AFTER_S or not (is_cut_off or is_reachable):
                continue
            if member.name not in self._spared:
                why = "it answers a gateway"
                if is_cut_off:
                    why = "none of the workers does, so it is the launcher that is cut off"
                log.warning("%s does not answer here, and is not ended for it: %s", member.name, why)
            spared.add(member.name)
            member.hanging_since_s = now_s
        self._spared = spared

    def _is_cut_off(self, now_s: float) -> bool:
        """Return whether two workers or more are placed, and none has replied lately. One worker alone does not show
        it.
        """
        num_placed = 0
        for member in self.members:
            num_placed += member.started is not None
            if member.last_reply_at_s is not None and now_s - member.last_reply_at_s <= _LOST_AFTER_S:
                return False
        return num_placed >= 2

    def _read_actor(self, member: PoolMember, now_s: float) -> None:
        """Record the actor's answer about its present life, if there is one."""
        answer = member.worker.answer()
        if isinstance(answer, ActorLost) or (
            isinstance(answer, StartedActor) and answer.epoch != member.epoch and member.epoch
        ):
            member.end_life()
        if isinstance(answer, StartedActor):
            member.started = answer
            member.epoch = answer.epoch
            member.is_watched = True
            self._calls.watch(member.name, member.pool.role, answer.address)
        elif isinstance(answer, StartFailure) and self._is_kept(member):
            self._try_later(member, answer.message, now_s)
        elif isinstance(answer, StartFailure):
            self._not_started(member, ConfigError(f"{member.pool.setting}: {answer.message}"), now_s)
        elif isinstance(answer, ActorLost) and answer.is_final:
            error = Unavailable(f"the process of {member.name} ended for good: {answer.message}")
            self._not_started(member, error, now_s)
        elif isinstance(answer, ActorLost):
            member.query_at_s = now_s + PERIOD_S

    def _count_ends(self, now_s: float) -> None:
        """Count the ends of processes during their first start, once a second.

        Raises Unavailable if the process of a worker that is needed has ended _MAX_ENDS times.
        """
        if self._has_started or now_s - self._counted_at_s < PERIOD_S:
            return
        self._counted_at_s = now_s
        for member in self.members:
            if member.is_taken_over or not self._is_first(member):
                continue
            num_ends = member.worker.num_restarts()
            if num_ends < _MAX_ENDS:
                continue
            why = (
                f"the process of {member.name} ended {num_ends} times while it started; "
                "its last lines are in the log. Does its model fit into the memory of its machine?"
            )
            if self._is_needed(member.pool):
                raise Unavailable(why)
            if not member.why:  # Ray goes on starting it
                log.error("%s does not start: %s", member.name, why)
                member.why = why

    def _is_needed(self, pool: Pool) -> bool:
        """Return whether the system does not start without the workers of `pool`."""
        return pool.role == "target" or self._needs_drafts

    def _is_done_starting(self, pool: Pool, now_s: float) -> bool:
        """Return whether the start need not wait for `pool`: its workers serve, or are drafts that cannot start."""
        num_serving = len(self._census(pool).serving)
        num_desired = self._sizes.desired_counts[pool.name]
        if num_serving >= num_desired or self._is_needed(pool):
            return num_serving >= num_desired
        num_failed = len([member for member in self._members_of(pool) if member.why])
        is_late = now_s - self._began_s >= START_TIMEOUT_S
        return num_serving + num_failed >= num_desired or pool.name in self._not_before_s or is_late

    def _is_kept(self, member: PoolMember) -> bool:
        """Return whether the worker is started again and again after a life that did not start."""
        return member.has_served or member.is_taken_over or not self._is_needed(member.pool)

    def _is_first(self, member: PoolMember) -> bool:
        """Return whether a failure of the worker now is one of the system's first start."""
        return not (self._has_started or self._is_ending or member.has_served)

    def _not_started(self, member: PoolMember, error: OutriderError, now_s: float) -> None:
        """Give a worker up: the pool starts another after a pause.

        Raises `error` if the system starts for the first time and needs the worker.
        """
        if self._is_first(member) and self._is_needed(member.pool):
            raise error
        log.warning("%s is given up: %s", member.name, error.message)
        if not member.has_served:
            self._not_before_s[member.pool.name] = now_s + HUNG_AFTER_S
        self._begin_end(member)

    def _try_later(self, member: PoolMember, why: str, now_s: float) -> None:
        """Start a worker again after a pause, since a missing file may come back. Each reason is logged once."""
        if why != member.why:
            again = ""
            if member.has_served or member.is_taken_over:
                again = " again"
            log.error("%s does not start%s: %s", member.name, again, why)
        member.record_failed_start(why, now_s)

    def _record(self, sighting: Sighting) -> None:
        member = self._members.get(sighting.member)
        if (
            member is None
            or not member.is_watched
            or member.started is None
            or member.started.address != sighting.address
        ):
            return  # of another life, or given up
        member.is_silent = sighting.info is None and sighting.refusal is None
        if not member.is_silent:
            member.last_reply_at_s = sighting.at_s
        if sighting.info is not None and sighting.info.epoch != member.started.epoch:
            self._lose(member, "it has another life")
            member.end_life()
            return
        fault = describe_fault(sighting)
        if fault is not None:
            self._fail(member, sighting, fault)
        if sighting.info is None:
            return
        member.info = sighting.info
        member.info_at_s = sighting.at_s
        if fault is not None:
            return
        member.num_failures = 0
        member.may_be_used = True
        member.failing_since_s = member.hanging_since_s = None
        self._loads.add_info(member.name, sighting.info, sighting.at_s)
        if member.state == STARTING:
            if member.has_served:
                log.info("%s at %s is back", member.name, member.started.address)
            member.record_serving()
            self._report(member.name, "ready", member.started.address)

    def _fail(self, member: PoolMember, sighting: Sighting, fault: str) -> None:
        member.num_failures += 1
        member.failing_since_s = member.failing_since_s or sighting.at_s
        if sighting.refusal is not None:
            member.hanging_since_s = None
        else:
            member.hanging_since_s = member.hanging_since_s or sighting.at_s
        is_refused = sighting.info is None and not sighting.is_silent
        if sighting.at_s - member.failing_since_s >= _LOST_AFTER_S or (is_refused and member.num_failures > 1):
            self._lose(member, fault)

    def _lose(self, member: PoolMember, why: str) -> None:
        """Record that a worker cannot be used until its actor has reported its address, and the worker replies
        there.
        """
        if member.state == SERVING:
            log.warning("%s at %s is lost: %s", member.name, member.started and member.started.address, why)
            self._report(member.name, "lost", why)
            member.state = STARTING
        self._calls.forget(member.name)
        self._loads.forget(member.name)
        member.is_watched = False
        member.num_failures = 0
        member.worker.query()

    def _follow(self, member: PoolMember, now_s: float) -> None:
        if member.query_at_s is not None and now_s >= member.query_at_s:
            member.query_at_s = None
            member.worker.query()
        if member.retry_at_s is not None and now_s >= member.retry_at_s:
            member.retry_at_s = None
            member.worker.restart()
            member.query_at_s = now_s + PERIOD_S
        if member.state == DRAINING:
            if self._is_unused(member, now_s):
                self._report(member.name, "ended", "it has drained")
                self._begin_end(member)
            elif now_s - member.draining_since_s >= DRAIN_LIMIT_S:
                self._report(member.name, "ended", "its answers took too long")
                self._begin_end(member)
        elif member.is_hung(now_s, HUNG_AFTER_S):
            log.warning("%s has hung for %.0f s: its process is ended", member.name, HUNG_AFTER_S)
            member.failing_since_s = member.hanging_since_s = None
            member.worker.restart()

    def _is_unused(self, member: PoolMember, now_s: float) -> bool:
        """Return whether a draining worker has no slots in use any more, or cannot serve them.

        Only a reply from after the notice counts: until then gateways may open slots on the worker.
        """
        if not member.may_be_used or member.is_hung(now_s, HUNG_AFTER_S):
            return True
        return member.is_idle_since(member.draining_since_s + self._notice_s)

    def _drain(self, member: PoolMember) -> None:
        if not member.may_be_used:
            self._begin_end(member)
        elif member.state != DRAINING:
            member.state = DRAINING
            member.draining_since_s = self._clock()
            address = ""
            if member.started is not None:
                address = member.started.address
            self._report(member.name, "draining", address)

    def _begin_end(self, member: PoolMember) -> None:
        del self._members[member.name]
        self._calls.forget(member.name)
        self._loads.forget(member.name)
        member.worker.begin_stop()
        member.stopping_since_s = self._clock()
        self._ending.append(member)

    def _end_stopped(self, now_s: float) -> None:
        for member in list(self._ending):
            since_s = now_s - (member.stopping_since_s or now_s)
            if member.worker.has_stopped() or since_s >= _LOST_AFTER_S:
                member.worker.kill()
                self._ending.remove(member)

    def _reconcile(self) -> None:
        """Start missing workers, of which draining ones are taken back first, and drain workers that are too many."""
        for pool in self._all_pools():
            active = list[PoolMember]()
            draining = list[PoolMember]()
            for member in self._members_of(pool):
                if member.state == DRAINING:
                    draining.append(member)
                else:
                    active.append(member)
            num_missing = self._sizes.desired_counts[pool.name] - len(active)
            for member in draining[: max(0, num_missing)]:
                self._cancel_drain(member)
                num_missing -= 1
            if num_missing > 0 and self._clock() >= self._not_before_s.get(pool.name, -1.0):
                for _ in range(num_missing):
                    self._create(pool)
            active.sort(key=lambda member: member.drain_order)
            for member in active[: max(0, -num_missing)]:
                self._drain(member)

    def _cancel_drain(self, member: PoolMember) -> None:
        """Use a draining worker again, at once if its last reply is good. Its actor is not part of the drain."""
        member.state = STARTING
        if member.is_healthy:
            member.state = SERVING
            if member.started is not None:
                self._report(member.name, "ready", member.started.address)

    def _free_name(self, pool: Pool) -> str:
        used_names = {*self._members, *(member.name for member in self._ending)}
        for index in range(2 * MAX_COUNT):
            name = pool.member(index)
            if name not in used_names:
                return name
        raise AssertionError("a pool has no more than MAX_COUNT workers, and as many that end")

    def _create(self, pool: Pool) -> None:
        name = self._free_name(pool)
        self._report(name, "loading", pool.worker.model)
        try:
            self._members[name] = PoolMember(name, pool, self._workers.create(pool, name))
        except Unavailable as error:
            if not self._has_started and self._is_needed(pool):
                raise
            log.warning("%s; tried again in %g s", error.message, HUNG_AFTER_S)
            self._not_before_s[pool.name] = self._clock() + HUNG_AFTER_S

    def _may_publish(self, now_s: float) -> bool:
        """Return whether gateways may get the membership: after the start, or after a while if some workers serve.

        Until then gateways of an earlier launcher keep using its membership.
        """
        if not self._is_published:
            num_serving = len([member for member in self._members.values() if member.state == SERVING])
            is_late = now_s - self._began_s >= 2 * _LOST_AFTER_S
            self._is_published = self._has_started or (num_serving > 0 and is_late)
        return self._is_published

    def _changed(self) -> registry_pb2.WorkerList | None:
        """Return the membership, with the next version, if it differs from the last one; else None."""
        now = registry_pb2.WorkerList(
            epoch=self._published.epoch,
            version=self._published.version,
            pools=list(map(_pool_message, self._all_pools())),
            workers=[member.message() for member in self._members.values()],
        )
        if now == self._published:
            return None
        now.version += 1
        self._published = now
        return now

    def _all_pools(self) -> list[Pool]:
        return list(self._pools.values())

    def _members_of(self, pool: Pool) -> list[PoolMember]:
        return [member for member in self._members.values() if member.pool is pool]

    def _census(self, pool: Pool) -> Census:
        names: dict[int, list[str]] = {STARTING: [], SERVING: [], DRAINING: []}
        for member in self._members_of(pool):
            names[member.state].append(member.name)
        return Census(names[SERVING], len(names[STARTING]), len(names[DRAINING]))


def _pool_message(pool: Pool) -> registry_pb2.Pool:
    return registry_pb2.Pool(
        name=pool.name, role=ROLES[pool.role], model_name=pool.model_name or "", serves=pool.serves
    )
