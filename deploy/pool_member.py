"""State of a worker of a pool through all its lives. A worker keeps its name when its process is restarted. No I/O; the
fleet owns it.
"""

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
STARTING = registry_pb2.WORKER_STATE_STARTING
SERVING = registry_pb2.WORKER_STATE_SERVING
DRAINING = registry_pb2.WORKER_STATE_DRAINING
MAX_RETRY_S = 10.0
"""Longest pause in seconds between a worker's failed start and its next start. The first pause is 1 s."""


class Replica(Protocol):
    """Interface of one worker's Ray actor. `ray_workers.RayWorker` implements it."""

    def query(self) -> None: ...
    def answer(self) -> Answer | None: ...
    def num_restarts(self) -> int: ...
    def restart(self) -> None: ...
    def begin_stop(self) -> None: ...
    def has_stopped(self) -> bool: ...
    def kill(self) -> None: ...


@dataclass(slots=True, eq=False)
class PoolMember:
    """State of one worker of a pool. All times are monotonic, in seconds."""

    name: str
    pool: Pool
    worker: Replica
    """The worker's actor."""
    state: registry_pb2.WorkerState = STARTING
    started: StartedActor | None = None
    """Addresses of the worker's present process; None before they are known, and after that process has ended."""
    epoch: int = 0
    """Epoch of the worker when its addresses were last known; 0 until they are known for the first time."""
    is_watched: bool = False
    """Whether the launcher calls the worker's GetInfo every second. False until the actor has reported the address of
    its present process, and again after too many failed calls."""
    info: common_pb2.WorkerInfo | None = None
    """Last reply to GetInfo of the worker's present process; None before the first."""
    info_at_s: float = 0.0
    """Monotonic time, in seconds, of the GetInfo call to which `info` is the reply."""
    is_taken_over: bool = False
    """Whether an earlier launcher started the worker."""
    may_be_used: bool = False
    """Whether gateways may have streams to the worker. True once its present process has served, and at once for a
    worker that an earlier launcher left running."""
    has_served: bool = False
    num_failures: int = 0
    """Number of failed GetInfo calls to the worker since the last successful one."""
    failing_since_s: float | None = None
    """Monotonic time, in seconds, of the first failed GetInfo call since the last successful one; None while calls
    succeed, and after the worker's process has ended."""
    hanging_since_s: float | None = None
    """Monotonic time, in seconds, since which the worker does not reply, or its engine hangs. None while it replies,
    even with an error, and its engine works."""
    is_silent: bool = False
    """Whether the last GetInfo call to the worker got neither a reply nor an error from its server."""
    last_reply_at_s: float | None = None
    """Monotonic time, in seconds, of the last GetInfo call to which the worker's server replied, with information or
    with an error; None before the first."""
    query_at_s: float | None = None
    """Monotonic time, in seconds, at which the launcher next asks the worker's Ray actor how its start went; None if it
    is not to ask."""
    num_failed_starts: int = 0
    """Number of failed starts of the worker since its last successful one."""
    why: str = ""
    """Reason why the last start failed, for the log; empty if it succeeded. It may contain paths of files."""
    retry_at_s: float | None = None
    """Monotonic time, in seconds, at which the worker's process is to be ended after a failed start, so that Ray starts
    another; None if it is not to be ended."""
    draining_since_s: float = 0.0
    stopping_since_s: float | None = None

    def end_life(self) -> None:
        """Record that the worker's process has ended: gateways may no longer use the worker. Its addresses, its last
        WorkerInfo, and since when it fails or hangs are dropped.
        """
        self.started = self.info = self.failing_since_s = self.hanging_since_s = None
        self.may_be_used = False

    def is_hung(self, now_s: float, after_s: float) -> bool:
        """Return whether, at `now_s`, the worker has been silent or its engine has hung for `after_s` s or more."""
        return self.hanging_since_s is not None and now_s - self.hanging_since_s >= after_s

    def is_idle_since(self, noticed_s: float) -> bool:
        """Return whether the worker's last reply to GetInfo is from after `noticed_s` and reports no slots in use.

        noticed_s: monotonic time, in seconds, by which all gateways know that the worker drains.
        """
        return self.info is not None and self.info_at_s >= noticed_s and not self.info.num_slots_in_use

    def record_failed_start(self, why: str, now_s: float) -> None:
        """Record that a start of the worker failed. The next start follows after a pause, which grows with each
        failure.

        why: reason of the failure. now_s: monotonic time, in seconds.
        """
        self.end_life()
        self.retry_at_s = now_s + min(2.0 ** min(self.num_failed_starts, 4), MAX_RETRY_S)
        self.num_failed_starts += 1
        self.why = why

    def record_serving(self) -> None:
        """Record that the worker's present process serves, and forget its earlier failed starts."""
        self.state = SERVING
        self.has_served = True
        self.num_failed_starts = 0
        self.why = ""
        self.retry_at_s = None

    @property
    def is_healthy(self) -> bool:
        """Whether the launcher calls the worker's GetInfo every second, the last call succeeded, and the worker's
        present process has replied to one.
        """
        return self.is_watched and self.info is not None and self.failing_since_s is None

    @property
    def drain_order(self) -> tuple[bool, int, int]:
        """Sort key of the order in which a pool drains workers: first those that do not serve, then those with the
        fewest slots in use, then the newest.
        """
        num_slots = 0
        if self.info is not None:
            num_slots = self.info.num_slots_in_use
        return (self.state == SERVING, num_slots, -int(self.name.rpartition("-")[2]))

    def message(self) -> registry_pb2.Worker:
        """Return the worker's entry in the list of workers that gateways get. While the worker starts, the entry has no
        addresses.
        """
        message = registry_pb2.Worker(
            name=self.name,
            pool=self.pool.name,
            role=ROLES[self.pool.role],
            state=self.state,
            reason=without_folders(self.why, self.pool.worker.model),
        )
        if self.started is not None and self.state != STARTING:
            message.address = self.started.address
            message.metrics_address = self.started.metrics_address or ""
            message.node = self.started.node
        return message


def describe_fault(sighting: Sighting) -> str | None:
    """Return the reason why a worker cannot be used, as a GetInfo call to it has shown; None if it can be used."""
    if sighting.refusal is not None:
        return f"it refuses GetInfo: {sighting.refusal}"
    if sighting.info is None:
        if sighting.is_silent:
            return "it does not answer"
        return "it cannot be reached"
    return describe_hang(sighting.info.current_step_us / 1e6, sighting.info.longest_step_us / 1e6)
