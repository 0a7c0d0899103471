"""A fleet of workers that are played."""

from collections.abc import Iterable, Mapping
from typing import Any

from deploy.actors import StartedActor
from deploy.fleet import Fleet
from deploy.ray_workers import Answer
from deploy.sightings import Sighting
from outrider.v1 import common_pb2, registry_pb2
from outrider.wire.errors import Unavailable
from outrider.wire.settings.config import DraftConfig, TargetConfig
from outrider.wire.settings.pools import Pool
from outrider.wire.settings.system import ScalingConfig

DRAIN_LIMIT_S = 20.0
"""Of the fleets here."""


class PlayedWorker:
    """Answers what the test says, when it says so."""

    def __init__(self) -> None:
        self.num_queries = 1
        self.num_ends = 0
        self.num_ended_by_us = 0
        self.next: Answer | None = None
        self.is_stopping = False
        self.stops_at_once = True
        self.is_killed = False

    def query(self) -> None:
        self.num_queries += 1

    def answer(self) -> Answer | None:
        found, self.next = self.next, None
        return found

    def num_restarts(self) -> int:
        return self.num_ends

    def restart(self) -> None:
        self.num_ended_by_us += 1

    def begin_stop(self) -> None:
        self.is_stopping = True

    def has_stopped(self) -> bool:
        return self.stops_at_once

    def kill(self) -> None:
        self.is_killed = True


class Stage:
    """A fleet, its workers by name, and a clock."""

    def __init__(
        self,
        *pools: Pool,
        left_behind: Mapping[str, str] | None = None,
        room: str | None = None,
        is_refusing: bool = False,
        starts: bool = True,
        needs_drafts: bool = False,
    ) -> None:
        self.is_refusing = is_refusing
        self.now_s = 1000.0
        self.workers: dict[str, PlayedWorker] = {}
        self.watched: dict[str, str] = {}
        self.seen: list[Sighting] = []
        self.told: list[tuple[str, str]] = []
        self.reports: list[registry_pb2.GatewayReport] = []
        self.room = room
        self._left_behind = left_behind or {}
        self.fleet = Fleet(
            pools,
            ScalingConfig(up_after_s=5, down_after_s=60, queue_high=1),
            self,
            self,
            lambda part, state, detail: self.told.append((part, state)),
            lambda pool: self.room,
            lambda: self.now_s,
            needs_drafts=needs_drafts,
        )
        self.membership = registry_pb2.WorkerList()
        if starts:
            self.fleet.start()

    def create(self, pool: Pool, member: str) -> PlayedWorker:
        if self.is_refusing:
            raise Unavailable("no actor")
        self.workers[member] = PlayedWorker()
        return self.workers[member]

    def take_over(self, pools: Iterable[Pool]) -> dict[str, tuple[Pool, PlayedWorker]]:
        by_name = {pool.name: pool for pool in pools}
        return {name: (by_name[pool], self.create(by_name[pool], name)) for name, pool in self._left_behind.items()}

    def watch(self, member: str, role: str, address: str) -> None:
        self.watched[member] = address

    def forget(self, member: str) -> None:
        self.watched.pop(member, None)

    def read_sightings(self) -> list[Sighting]:
        found, self.seen = self.seen, []
        return found

    def tick(self, after_s: float = 1.0) -> None:
        self.now_s += after_s
        changed = self.fleet.tick(self.reports)
        if changed is not None:
            assert changed.version == self.membership.version + 1
            self.membership = changed

    def started(self, member: str, epoch: int = 1, port: int = 7) -> None:
        self.workers[member].next = StartedActor(f"node:{port}", 1, epoch, f"node:{port + 1}", "node")
        self.tick(0.1)

    def answers(self, member: str, epoch: int = 1, **info: Any) -> None:
        """The next time that it is asked for its facts; nothing at all with epoch 0."""
        made = common_pb2.WorkerInfo(epoch=epoch, num_steps=1, **info) if epoch else None
        self.seen.append(Sighting(member, self.watched[member], self.now_s, made, False))

    def silent(self, member: str) -> None:
        self.seen.append(Sighting(member, self.watched[member], self.now_s, None, True))

    def refuses(self, member: str) -> None:
        self.seen.append(Sighting(member, self.watched[member], self.now_s, None, refusal="PERMISSION_DENIED: not you"))

    def look(self, seconds: int, **how: str) -> None:
        """Once a second, by worker: answers, silent, refuses, or hangs, which is an engine at one step all the time.

        Ray says of each that its process runs.
        """
        names = {name.replace("_", "-"): what for name, what in how.items()}
        for second in range(seconds):
            for member in names.keys() - self.watched.keys():
                self.workers[member].next = StartedActor("node:7", 1, 1, "node:8", "node")
            self.tick(0.0)
            for member, what in names.items():
                if what == "hangs":
                    self.answers(member, current_step_us=1_000_000 * second, **HUNG)
                else:
                    getattr(self, what)(member)
            self.tick(1.0)

    def ended(self) -> dict[str, int]:
        """How often the launcher ended each: those that it did."""
        return {name: worker.num_ended_by_us for name, worker in self.workers.items() if worker.num_ended_by_us}

    def serve(self, *members: str) -> None:
        for member in members or list(self.workers):
            self.started(member)
            self.answers(member)
            self.tick(0.1)

    def states(self) -> dict[str, int]:
        return {member.name: member.state for member in self.membership.workers}

    def scale(self, pool: str, count: int | None) -> registry_pb2.PoolSize:
        done = self.fleet.scale(pool, count)
        self.tick(0.1)
        size: registry_pb2.PoolSize = done.result(0).pools[0]
        return size


def chat(count: int = 2, **size: Any) -> Pool:
    return Pool(name="chat", role="target", worker=TargetConfig(model="t"), count=count, **size)


def small(count: int = 1, least: int = 1) -> Pool:
    worker = DraftConfig(model="d")
    return Pool(
        name="small", role="draft", worker=worker, count=count, min=least, max=max(count, least), serves=("chat",)
    )


HUNG = {"busy_us": 1, "longest_step_us": 1_000_000, "num_slots_in_use": 1}
"""With a step of more than 8 s."""
