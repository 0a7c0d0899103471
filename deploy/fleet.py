"""The workers of a system and what becomes of them: started, followed through restarts, added, drained and ended.

One owner: the launcher's main thread, which calls `tick` whenever a worker was seen, a few times a second. Workers are
reached through `ray_workers`, seen through `sightings`; gateways hear of them through the memberships that `tick`
returns.
"""

from __future__ import annotations

import concurrent.futures
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from deploy.actors import Refused, Started
from deploy.member import DRAINING, ROLES, SERVING, STARTING, PoolMember, Replica, trouble_of
from deploy.ray_workers import Lost
from deploy.sightings import PERIOD_S, Seen
from deploy.sizes import Census, Loads, Sizes
from outrider.v1 import registry_pb2
from outrider.wire.errors import ConfigError, OutriderError, Unavailable
from outrider.wire.settings.pools import MAX_COUNT, Pool, Role
from outrider.wire.settings.system import START_TIMEOUT_S, ScalingConfig
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

_LOST_AFTER_S = 5.0
"""Seconds of silence after which a worker is not to be used; one that refuses the connection twice is lost at once.
Twice as long, and gateways send requests so much longer to a machine that is gone."""
HUNG_AFTER_S = 30.0
"""Seconds for which a worker may hang before its process is ended, so that Ray starts another, and before another is
tried in a pool whose last one could not start. Twice as long, and a pool of one serves nobody for so much longer."""
DRAIN_LIMIT_S = 300.0
"""Seconds for which running answers may hold on to a worker that its pool gives up. Twice as long, and shrinking waits
so much longer for a client that reads slowly."""
_MOST_ENDS = 3
"""Times that a process may end while it starts for the first time. Twice as many, and a model that does not fit into
memory is reported after twice as many loads."""
NOTICE_S = 1.5
"""Seconds for which gateways may open slots on a draining worker until they have heard of it."""


class Workers(Protocol):
    """`ray_workers.RayWorkers`."""

    def create(self, pool: Pool, member: str) -> Replica: ...
    def adopt(self, pools: Iterable[Pool]) -> Mapping[str, tuple[Pool, Replica]]: ...


class Eyes(Protocol):
    """`sightings.Sightings`."""

    def watch(self, member: str, role: Role, address: str) -> None: ...
    def forget(self, member: str) -> None: ...
    def take(self) -> list[Seen]: ...


class Fleet:
    """`start` once, then `tick` until `stop`."""

    def __init__(
        self,
        pools: Iterable[Pool],
        scaling: ScalingConfig,
        workers: Workers,
        eyes: Eyes,
        report: Callable[[str, str, str], None],
        room: Callable[[Pool], str | None] = lambda pool: None,
        clock: Callable[[], float] = time.monotonic,
        *,
        needs_drafts: bool = False,
    ) -> None:
        """Own the workers of `pools`.

        report(part, state, detail): shows users what happens. room(pool): returns why another worker cannot be placed.
        needs_drafts: a draft that cannot start fails the start, as a target does.
        """
        self._pools = {pool.name: pool for pool in pools}
        self._workers = workers
        self._eyes = eyes
        self._report = report
        self._clock = clock
        self._spared: set[str] = set()
        self._notice_s = NOTICE_S
        self._is_ending = False
        self._loads = Loads()
        self._sizes = Sizes(self._pools, scaling, self._loads, self._census, room, report)
        self._members: dict[str, PoolMember] = {}
        self._ending: list[PoolMember] = []
        self._not_before_s: dict[str, float] = {}
        self._counted_at_s = 0.0
        self._published = registry_pb2.Membership(epoch=secrets.randbits(64) | 1)
        self._has_started = False
        self._needs_drafts = needs_drafts
        self._began_s = clock()
        self._is_published = False

    @property
    def members(self) -> list[PoolMember]:
        return list(self._members.values())

    def start(self) -> None:
        """Ask for every worker; those that run already are taken over, also beyond the count where they may be."""
        for name, (pool, worker) in self._workers.adopt(self._pools.values()).items():
            self._members[name] = PoolMember(name, pool, worker, was_there=True, may_be_used=True)
        for pool in self._pools.values():
            found = sum(member.pool is pool for member in self._members.values())
            self._sizes.wanted[pool.name] = max(pool.count, min(found, pool.max))
        self._reconcile()

    def is_ready(self) -> bool:
        """Return whether the start is over: at some tick no pool's workers had to be waited for any longer."""
        return self._has_started

    def is_settled(self) -> bool:
        """Return whether all workers serve and none starts or ends: nothing changes then before a worker is seen again,
        or somebody asks for another size.
        """
        is_quiet = all(member.state == SERVING and member.is_watched for member in self._members.values())
        return self._has_started and is_quiet and not self._ending

    def late(self) -> list[str]:
        """Return the names of workers that are not ready."""
        return [member.name for member in self._members.values() if member.state == STARTING]

    def tick(self, reports: Iterable[registry_pb2.GatewayReport]) -> registry_pb2.Membership | None:
        """Return the membership once gateways are to hear of a change. Raises OutriderError if the start fails."""
        now_s, found = self._clock(), list(reports)
        self._look(now_s, found)
        self._count_ends(now_s)
        for member in self.members:
            self._follow(member, now_s)
        self._end_stopped(now_s)
        if not self._has_started:
            self._has_started = all(self._is_done_starting(pool, now_s) for pool in self._all_pools())
        for name in self._sizes.set_by_hand():
            self._not_before_s.pop(name, None)
        if self._has_started:
            self._sizes.set_by_load(found, now_s)
        self._reconcile()
        return self._changed() if self._may_publish(now_s) else None

    def scale(self, pool: str, count: int | None) -> concurrent.futures.Future[registry_pb2.ScaleReply]:
        """Ask for `count` workers, or for the sizes alone; an empty name means all pools. For any thread."""
        return self._sizes.ask(pool, count)

    def drain_all(self, notice_s: float = NOTICE_S) -> registry_pb2.Membership | None:
        """Drain every worker and return the last membership. notice_s: until all gateways have heard of it."""
        self._is_ending, self._notice_s = True, notice_s
        for pool in self._all_pools():
            self._sizes.wanted[pool.name] = 0
        for member in self.members:
            self._drain(member)
        return self._changed()

    def is_idle(self, reports: Iterable[registry_pb2.GatewayReport] = ()) -> bool:
        """Return whether no answer runs anywhere any more, as far as can be seen. For after `drain_all`."""
        now_s = self._clock()
        self._look(now_s, reports)
        return all(self._is_unused(member, now_s) for member in self.members)

    def end_all(self, but_what_was_there: bool = False) -> None:
        """Stop all workers side by side, and kill what does not stop within seconds.

        but_what_was_there: workers that run since before this launcher go on; its own start has failed.
        """
        for member in self.members:
            if not (but_what_was_there and member.was_there):
                self._begin_end(member)
        while self._ending:
            self._end_stopped(self._clock())
            time.sleep(0.02)

    def _look(self, now_s: float, reports: Iterable[registry_pb2.GatewayReport]) -> None:
        for member in self.members:
            self._hear(member, now_s)
        for seen in self._eyes.take():
            self._see(seen)
        self._spare({name for report in reports for name in report.heard}, now_s)

    def _spare(self, heard: set[str], now_s: float) -> None:
        """Begin the time anew of workers whose silence may be the launcher's own: it may be the one that is cut off.

        heard: workers that answer gateways.
        """
        num_placed = sum(member.started is not None for member in self.members)
        can_see = num_placed < 2 or any(  # of one alone nobody can say
            member.seen_at_s is not None and now_s - member.seen_at_s <= _LOST_AFTER_S for member in self.members
        )
        spared = set()
        for member in self.members:
            since_s = None if member.hanging_since_s is None else member.failing_since_s
            is_heard = member.is_silent and member.name in heard
            if since_s is None or now_s - since_s < _LOST_AFTER_S or (can_see and not is_heard):
                continue
            if member.name not in self._spared:
                blind = "none of the workers does, so it is the launcher that is cut off"
                why = "it answers a gateway" if can_see else blind
                log.warning("%s does not answer here, and is not ended for it: %s", member.name, why)
            spared.add(member.name)
            member.hanging_since_s = now_s
        self._spared = spared

    def _hear(self, member: PoolMember, now_s: float) -> None:
        """What its actor says of its present life."""
        answer = member.worker.answer()
        if isinstance(answer, Lost) or (isinstance(answer, Started) and answer.epoch != member.epoch and member.epoch):
            member.forget_life()
        if isinstance(answer, Started):
            member.started, member.epoch, member.is_watched = answer, answer.epoch, True
            self._eyes.watch(member.name, member.pool.role, answer.address)
        elif isinstance(answer, Refused) and self._is_kept(member):
            self._try_later(member, answer.message, now_s)
        elif isinstance(answer, Refused):
            self._not_started(member, ConfigError(f"{member.pool.setting}: {answer.message}"), now_s)
        elif isinstance(answer, Lost) and answer.is_final:
            error = Unavailable(f"the process of {member.name} ended for good: {answer.message}")
            self._not_started(member, error, now_s)
        elif isinstance(answer, Lost):
            member.ask_at_s = now_s + PERIOD_S

    def _count_ends(self, now_s: float) -> None:
        """Count the ends of processes that load for the first time. Raises Unavailable for a worker that is needed and
        whose process ends again and again.
        """
        if self._has_started or now_s - self._counted_at_s < PERIOD_S:
            return
        self._counted_at_s = now_s
        for member in self.members:
            if member.was_there or not self._is_first(member):
                continue
            num_ends = member.worker.num_restarts()
            if num_ends < _MOST_ENDS:
                continue
            why = (
                f"the process of {member.name} ended {num_ends} times while it started; "
                "its last lines are in the log. Does its model fit into the memory of its machine?"
            )
            if self._is_needed(member.pool):
                raise Unavailable(why)
            if not member.why:  # Ray goes on to start it
                log.error("%s does not start: %s", member.name, why)
                member.why = why

    def _is_needed(self, pool: Pool) -> bool:
        """Return whether the system does not start without the workers of `pool`."""
        return pool.role == "target" or self._needs_drafts

    def _is_done_starting(self, pool: Pool, now_s: float) -> bool:
        """Return whether `pool` is not waited for: its workers serve, or they are drafts that cannot start."""
        num_serving = len(self._census(pool).serving)
        num_wanted = self._sizes.wanted[pool.name]
        if num_serving >= num_wanted or self._is_needed(pool):
            return num_serving >= num_wanted
        num_failed = sum(bool(member.why) for member in self._of(pool))
        is_late = now_s - self._began_s >= START_TIMEOUT_S
        return num_serving + num_failed >= num_wanted or pool.name in self._not_before_s or is_late

    def _is_kept(self, member: PoolMember) -> bool:
        """Return whether a life that does not start is followed by another, for as long as it takes."""
        return member.has_served or member.was_there or not self._is_needed(member.pool)

    def _is_first(self, member: PoolMember) -> bool:
        """Whether its failure is that of the system's start."""
        return not (self._has_started or self._is_ending or member.has_served)

    def _not_started(self, member: PoolMember, error: OutriderError, now_s: float) -> None:
        """At first the system does not start if it needs the worker; later the pool tries another, after a pause."""
        if self._is_first(member) and self._is_needed(member.pool):
            raise error
        log.warning("%s is given up: %s", member.name, error.message)
        if not member.has_served:
            self._not_before_s[member.pool.name] = now_s + HUNG_AFTER_S
        self._begin_end(member)

    def _try_later(self, member: PoolMember, why: str, now_s: float) -> None:
        """Try a worker again after a pause: what it lacks now may come back. Each reason is logged once."""
        if why != member.why:
            again = " again" if member.has_served or member.was_there else ""
            log.error("%s does not start%s: %s", member.name, again, why)
        member.note_refused(why, now_s)

    def _see(self, seen: Seen) -> None:
        member = self._members.get(seen.member)
        if member is None or not member.is_watched or member.started is None or member.started.address != seen.address:
            return  # of another life, or given up
        member.is_silent = seen.info is None and seen.refusal is None
        if not member.is_silent:
            member.seen_at_s = seen.at_s
        if seen.info is not None and seen.info.epoch != member.started.epoch:
            self._lose(member, "it has another life")
            member.forget_life()
            return
        trouble = trouble_of(seen)
        if trouble is not None:
            self._fail(member, seen, trouble)
        if seen.info is None:
            return
        member.info, member.info_at_s = seen.info, seen.at_s
        if trouble is not None:
            return
        member.num_failures, member.may_be_used = 0, True
        member.failing_since_s = member.hanging_since_s = None
        self._loads.add_info(member.name, seen.info, seen.at_s)
        if member.state == STARTING:
            if member.has_served:
                log.info("%s at %s is back", member.name, member.started.address)
            member.note_serving()
            self._report(member.name, "ready", member.started.address)

    def _fail(self, member: PoolMember, seen: Seen, trouble: str) -> None:
        member.num_failures += 1
        member.failing_since_s = member.failing_since_s or seen.at_s
        member.hanging_since_s = None if seen.refusal is not None else member.hanging_since_s or seen.at_s
        is_refused = seen.info is None and not seen.is_silent
        if seen.at_s - member.failing_since_s >= _LOST_AFTER_S or (is_refused and member.num_failures > 1):
            self._lose(member, trouble)

    def _lose(self, member: PoolMember, why: str) -> None:
        """It is not to be used until it has said where it is, and answered there."""
        if member.state == SERVING:
            log.warning("%s at %s is lost: %s", member.name, member.started and member.started.address, why)
            self._report(member.name, "lost", why)
            member.state = STARTING
        self._eyes.forget(member.name)
        self._loads.forget(member.name)
        member.is_watched, member.num_failures = False, 0
        member.worker.ask()

    def _follow(self, member: PoolMember, now_s: float) -> None:
        if member.ask_at_s is not None and now_s >= member.ask_at_s:
            member.ask_at_s = None
            member.worker.ask()
        if member.retry_at_s is not None and now_s >= member.retry_at_s:
            member.retry_at_s = None
            member.worker.restart()
            member.ask_at_s = now_s + PERIOD_S
        if member.state == DRAINING:
            is_unused = self._is_unused(member, now_s)
            if is_unused or now_s - member.draining_since_s >= DRAIN_LIMIT_S:
                self._report(member.name, "ended", "it has drained" if is_unused else "its answers took too long")
                self._begin_end(member)
        elif member.hangs(now_s, HUNG_AFTER_S):
            log.warning("%s has hung for %.0f s: its process is ended", member.name, HUNG_AFTER_S)
            member.failing_since_s = member.hanging_since_s = None
            member.worker.restart()

    def _is_unused(self, member: PoolMember, now_s: float) -> bool:
        """Of one that drains, by what was seen once no gateway opens slots there. One that hangs serves nobody."""
        if not member.may_be_used or member.hangs(now_s, HUNG_AFTER_S):
            return True
        return member.is_idle_since(member.draining_since_s + self._notice_s)

    def _drain(self, member: PoolMember) -> None:
        if not member.may_be_used:
            self._begin_end(member)
        elif member.state != DRAINING:
            member.state, member.draining_since_s = DRAINING, self._clock()
            self._report(member.name, "draining", member.started.address if member.started else "")

    def _begin_end(self, member: PoolMember) -> None:
        del self._members[member.name]
        self._eyes.forget(member.name)
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
        """Start what is missing, drain what is too much."""
        for pool in self._all_pools():
            active = [member for member in self._of(pool) if member.state != DRAINING]
            missing = self._sizes.wanted[pool.name] - len(active)
            for member in [one for one in self._of(pool) if one.state == DRAINING][: max(0, missing)]:
                self._take_back(member)
                missing -= 1
            if missing > 0 and self._clock() >= self._not_before_s.get(pool.name, -1.0):
                for _ in range(missing):
                    self._create(pool)
            for member in sorted(active, key=lambda member: member.usefulness)[: max(0, -missing)]:
                self._drain(member)

    def _take_back(self, member: PoolMember) -> None:
        """It takes requests again, once it is seen: its actor knows nothing of the drain."""
        member.state = SERVING if member.is_well else STARTING
        if member.is_well and member.started is not None:
            self._report(member.name, "ready", member.started.address)

    def _create(self, pool: Pool) -> None:
        taken = {*self._members, *(member.name for member in self._ending)}
        name = next(name for index in range(2 * MAX_COUNT) if (name := pool.member(index)) not in taken)
        self._report(name, "loading", pool.worker.model)
        try:
            self._members[name] = PoolMember(name, pool, self._workers.create(pool, name))
        except Unavailable as error:
            if not self._has_started and self._is_needed(pool):
                raise
            log.warning("%s; tried again in %g s", error.message, HUNG_AFTER_S)
            self._not_before_s[pool.name] = self._clock() + HUNG_AFTER_S

    def _may_publish(self, now_s: float) -> bool:
        """Not before the workers were found, or some after a while: until then gateways that a launcher before this one
        knew go on with what it published.
        """
        if not self._is_published:
            some = any(member.state == SERVING for member in self._members.values())
            self._is_published = self._has_started or (some and now_s - self._began_s >= 2 * _LOST_AFTER_S)
        return self._is_published

    def _changed(self) -> registry_pb2.Membership | None:
        now = registry_pb2.Membership(
            epoch=self._published.epoch,
            version=self._published.version,
            pools=[_pool_message(pool) for pool in self._all_pools()],
            members=[member.message() for member in self._members.values()],
        )
        if now == self._published:
            return None
        now.version += 1
        self._published = now
        return now

    def _all_pools(self) -> list[Pool]:
        return list(self._pools.values())

    def _of(self, pool: Pool) -> list[PoolMember]:
        return [member for member in self._members.values() if member.pool is pool]

    def _census(self, pool: Pool) -> Census:
        names: dict[int, list[str]] = {STARTING: [], SERVING: [], DRAINING: []}
        for member in self._of(pool):
            names[member.state].append(member.name)
        return Census(names[SERVING], len(names[STARTING]), len(names[DRAINING]))


def _pool_message(pool: Pool) -> registry_pb2.Pool:
    return registry_pb2.Pool(
        name=pool.name, role=ROLES[pool.role], model_name=pool.model_name or "", serves=pool.serves
    )
