"""Holds what is known of a worker under its lasting name, through all its lives. No I/O; the fleet owns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deploy.actors import Started
from deploy.ray_workers import Answer
from deploy.sightings import Seen
from outrider.v1 import common_pb2, registry_pb2
from outrider.wire.models.model_id import without_folders
from outrider.wire.settings.pools import Pool
from outrider.wire.transport.hang_watch import trouble_of_step

ROLES = {"target": registry_pb2.ROLE_TARGET, "draft": registry_pb2.ROLE_DRAFT}
STARTING = registry_pb2.MEMBER_STATE_STARTING
SERVING = registry_pb2.MEMBER_STATE_SERVING
DRAINING = registry_pb2.MEMBER_STATE_DRAINING
MAX_RETRY_S = 10.0
"""Seconds that the pause before another start grows to, from 1 s. A folder that is back is noticed so late."""


class Replica(Protocol):
    """`ray_workers.Worker`."""

    def ask(self) -> None: ...
    def answer(self) -> Answer | None: ...
    def num_restarts(self) -> int: ...
    def restart(self) -> None: ...
    def begin_stop(self) -> None: ...
    def has_stopped(self) -> bool: ...
    def kill(self) -> None: ...


@dataclass(slots=True, eq=False)
class PoolMember:
    """Holds what the launcher knows of one worker of a pool."""

    name: str
    pool: Pool
    worker: Replica
    state: registry_pb2.MemberState = STARTING
    started: Started | None = None
    """Where its last life that said so is, until that life is known to be over."""
    epoch: int = 0
    """The epoch of its last life that said where it is."""
    is_watched: bool = False
    """It is asked for its facts where it says it is. Not while it is lost."""
    info: common_pb2.WorkerInfo | None = None
    """What it said of itself when it was last asked in that life."""
    info_at_s: float = 0.0
    """When it was asked for `info`, monotonic seconds."""
    was_there: bool = False
    """A launcher before this one started it."""
    may_be_used: bool = False
    """Gateways may have streams to it: this life has served, or may have for a launcher before this one."""
    has_served: bool = False
    num_failures: int = 0
    failing_since_s: float | None = None
    """When it was last asked for its facts in vain for the first time; None once Ray says that its process ended."""
    hanging_since_s: float | None = None
    """Since when it says nothing at all, or that its engine hangs; None while neither. Refusing is an answer."""
    is_silent: bool = False
    """Nothing came back when it was asked last."""
    seen_at_s: float | None = None
    """When it was last asked for its facts and something came back."""
    ask_at_s: float | None = None
    num_refused: int = 0
    """Lives in a row that did not start."""
    why: str = ""
    """Why the last of these did not, with paths, for the log."""
    retry_at_s: float | None = None
    """When its process is to be ended, so that Ray starts another."""
    draining_since_s: float = 0.0
    stopping_since_s: float | None = None

    def forget_life(self) -> None:
        """Note that its life is over: nobody uses it, and how it failed does not count."""
        self.started = self.info = self.failing_since_s = self.hanging_since_s = None
        self.may_be_used = False

    def hangs(self, now_s: float, after_s: float) -> bool:
        return self.hanging_since_s is not None and now_s - self.hanging_since_s >= after_s

    def is_idle_since(self, noticed_s: float) -> bool:
        """Return whether it had no answers when it was seen after `noticed_s`, when the last gateway had heard."""
        return self.info is not None and self.info_at_s >= noticed_s and not self.info.num_slots_in_use

    def note_refused(self, why: str, now_s: float) -> None:
        """Note that another life did not start. The next is tried after a pause, longer each time."""
        self.forget_life()
        self.retry_at_s = now_s + min(2.0 ** min(self.num_refused, 4), MAX_RETRY_S)
        self.num_refused += 1
        self.why = why

    def note_serving(self) -> None:
        """Note that this life serves: how lives before it failed does not count."""
        self.state = SERVING
        self.has_served = True
        self.num_refused = 0
        self.why = ""
        self.retry_at_s = None

    @property
    def is_well(self) -> bool:
        """Return whether it can be used, as far as it is seen."""
        return self.is_watched and self.info is not None and self.failing_since_s is None

    @property
    def usefulness(self) -> tuple[bool, int, int]:
        """Return the order of going: one that nobody uses yet, then the one with the fewest answers, then the last."""
        slots = self.info.num_slots_in_use if self.info is not None else 0
        return (self.state == SERVING, slots, -int(self.name.rpartition("-")[2]))

    def message(self) -> registry_pb2.Member:
        started = self.started if self.state != STARTING else None
        return registry_pb2.Member(
            name=self.name,
            pool=self.pool.name,
            role=ROLES[self.pool.role],
            state=self.state,
            address=started.address if started else "",
            metrics_address=(started.metrics_address or "") if started else "",
            node=started.node if started else "",
            why=without_folders(self.why, self.pool.worker.model),
        )


def trouble_of(seen: Seen) -> str | None:
    """Return why a worker is of no use as it was seen; None when it is."""
    if seen.refusal is not None:
        return f"it refuses to say what it is: {seen.refusal}"
    if seen.info is None:
        return "it does not answer" if seen.is_silent else "it cannot be reached"
    return trouble_of_step(seen.info.current_step_us / 1e6, seen.info.longest_step_us / 1e6)
