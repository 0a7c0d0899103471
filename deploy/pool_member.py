"""State of a worker under its lasting name, through all its lives. No I/O; the fleet owns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from deploy.actors import StartedActor
from deploy.ray_workers import Answer
from deploy.sightings import Sighting
from outrider.v1 import common_pb2, registry_pb2
from outrider.wire.models.model_id import without_folders
from outrider.wire.settings.pools import Pool
from outrider.wire.transport.hang_watch import describe_hang

ROLES = {"target": registry_pb2.ROLE_TARGET, "draft": registry_pb2.ROLE_DRAFT}
STARTING = registry_pb2.MEMBER_STATE_STARTING
SERVING = registry_pb2.MEMBER_STATE_SERVING
DRAINING = registry_pb2.MEMBER_STATE_DRAINING
MAX_RETRY_S = 10.0
"""Longest pause before another start of a worker, in seconds; the first is 1 s."""


class Replica(Protocol):
    """An actor, as `ray_workers.RayWorker` has it."""

    def ask(self) -> None: ...
    def answer(self) -> Answer | None: ...
    def num_restarts(self) -> int: ...
    def restart(self) -> None: ...
    def begin_stop(self) -> None: ...
    def has_stopped(self) -> bool: ...
    def kill(self) -> None: ...


@dataclass(slots=True, eq=False)
class PoolMember:
    """State of one worker of a pool. Times are monotonic, in seconds."""

    name: str
    pool: Pool
    worker: Replica
    """Its actor."""
    state: registry_pb2.MemberState = STARTING
    started: StartedActor | None = None
    """Addresses of its present life; None before they are known, and once that life is over."""
    epoch: int = 0
    """Number of its last life whose addresses were known; 0 before the first."""
    is_watched: bool = False
    """Whether the launcher calls it at its address every second. Not while it is lost."""
    info: common_pb2.WorkerInfo | None = None
    """Its last reply of GetInfo in this life."""
    info_at_s: float = 0.0
    """Time of the call that `info` is the reply to."""
    is_adopted: bool = False
    """Whether an earlier launcher started it."""
    may_be_used: bool = False
    """Whether gateways may have streams to it: this life has served, or may have for an earlier launcher."""
    has_served: bool = False
    num_failures: int = 0
    """Failed calls in a row."""
    failing_since_s: float | None = None
    """Time of the first failed call in a row; None while calls succeed, and once its process has ended."""
    hanging_since_s: float | None = None
    """Time from which on nothing comes from it, or its engine hangs; None while neither. A refusal is a reply."""
    is_silent: bool = False
    """Whether nothing came back from the last call."""
    seen_at_s: float | None = None
    """Time of the last call from which anything came back."""
    ask_at_s: float | None = None
    """Time at which its actor is asked for its outcome again; None where it is not due."""
    num_refused: int = 0
    """Lives in a row that did not start."""
    why: str = ""
    """Reason of the last life that did not start, with paths, for the log."""
    retry_at_s: float | None = None
    """Time at which its process is ended, so that Ray starts another; None where that is not due."""
    draining_since_s: float = 0.0
    stopping_since_s: float | None = None

    def end_life(self) -> None:
        """Record that its life is over: no gateway uses it, and its failures do not count any more."""
        self.started = self.info = self.failing_since_s = self.hanging_since_s = None
        self.may_be_used = False

    def hangs(self, now_s: float, after_s: float) -> bool:
        """Return whether it has hung for `after_s` seconds."""
        return self.hanging_since_s is not None and now_s - self.hanging_since_s >= after_s

    def is_idle_since(self, noticed_s: float) -> bool:
        """Return whether a reply from after `noticed_s` has no slots in use.

        noticed_s: time by which all gateways have the membership in which it drains.
        """
        return self.info is not None and self.info_at_s >= noticed_s and not self.info.num_slots_in_use

    def record_failed_start(self, why: str, now_s: float) -> None:
        """Record that another life did not start. The next one starts after a pause, longer each time."""
        self.end_life()
        self.retry_at_s = now_s + min(2.0 ** min(self.num_refused, 4), MAX_RETRY_S)
        self.num_refused += 1
        self.why = why

    def record_serving(self) -> None:
        """Record that this life serves; earlier lives' failures do not count any more."""
        self.state = SERVING
        self.has_served = True
        self.num_refused = 0
        self.why = ""
        self.retry_at_s = None

    @property
    def is_well(self) -> bool:
        """Whether its last reply is good, and calls do not fail."""
        return self.is_watched and self.info is not None and self.failing_since_s is None

    @property
    def drain_order(self) -> tuple[bool, int, int]:
        """Sort key by which a pool drains workers: those that do not serve, then by slots in use, then the newest."""
        num_slots = 0
        if self.info is not None:
            num_slots = self.info.num_slots_in_use
        return (self.state == SERVING, num_slots, -int(self.name.rpartition("-")[2]))

    def message(self) -> registry_pb2.Member:
        """Return the worker's entry in the membership, with its addresses unless it is starting."""
        message = registry_pb2.Member(
            name=self.name,
            pool=self.pool.name,
            role=ROLES[self.pool.role],
            state=self.state,
            why=without_folders(self.why, self.pool.worker.model),
        )
        if self.started is not None and self.state != STARTING:
            message.address = self.started.address
            message.metrics_address = self.started.metrics_address or ""
            message.node = self.started.node
        return message


def trouble_of(seen: Sighting) -> str | None:
    """Return why a worker cannot be used after this call of it; None where it can."""
    if seen.refusal is not None:
        return f"it refuses to say what it is: {seen.refusal}"
    if seen.info is None:
        if seen.is_silent:
            return "it does not answer"
        return "it cannot be reached"
    return describe_hang(seen.info.current_step_us / 1e6, seen.info.longest_step_us / 1e6)
