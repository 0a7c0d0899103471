"""The Ray actors of a worker: one that runs a service's `start_worker` in a process that Ray restarts, and one for each
other rank of a target. Created by `ray_workers.py`.

A worker locks a file for each CPU core that it uses, also after a restart: a core is free as soon as the process that
holds its lock has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import node_drain
from deploy.placement import Placement
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.processes import folders
from outrider.wire.processes.worker_main import memory_taken
from outrider.wire.settings.config import DraftConfig, TargetConfig, WorkerConfig
from outrider.wire.settings.cores import format_cores
from outrider.wire.telemetry.log import configure_logging, get_logger
from outrider.wire.telemetry.phases import name_member
from outrider.wire.transport.address import join_host_port

log = get_logger(__name__)

_QUOTA_FILES = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
"""Files with the quota of CPU time, in cgroup v2 and v1."""
_ALL_ADDRESSES = ("0.0.0.0", "::")
"""Hosts that stand for all addresses of a machine."""
_ALONE_S = 30.0
"""Seconds after which a worker that did not start again ends by itself: its launcher ends it within 10 s."""


def is_limited() -> bool:
    """Return whether a cgroup limits the CPU time of this process, as a container's CPU limit does."""
    for path in _QUOTA_FILES:
        with contextlib.suppress(OSError):
            return path.read_text().split()[0] not in ("max", "-1")
    return False


def lock_cores(count: int, folder: Path | None = None, offered: frozenset[int] | None = None) -> frozenset[int]:
    """Lock `count` CPU cores until this process ends, and return their numbers. Several processes may lock a core;
    cores that the fewest have locked are taken first. If fewer than `count` cores are offered, all of them are locked.

    folder: folder of the lock files; None = the one that all workers of this user on the machine share. offered: cores
    to choose from; None = all on which this process may run. Raises ConfigError if the locks cannot be made.
    """
    # level 0 is free cores; at level 1 each core has a second holder
    if folder is None:
        folder = folders.shared_folder()
    if offered is None:
        offered = frozenset(os.sched_getaffinity(0))
    cores = sorted(offered)
    locked: set[int] = set()
    for level in itertools.count():
        for core in cores:
            if len(locked) >= min(count, len(cores)):
                return frozenset(locked)
            if core in locked:
                continue
            lock = folders.try_lock(folder / f"core-{core}.{level}")  # stays open for the life of the process
            if lock is not None:
                locked.add(core)
    raise AssertionError("some level is free")


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """Settings and placement of a worker. They stay the same when Ray restarts the worker."""

    member: str
    """Name of the worker."""
    pool: str
    """Name of the worker's pool."""
    role: str
    """Role of the worker: target or draft."""
    settings: dict[str, Any]
    """Settings of the worker that were set explicitly, by field name of TargetConfig or DraftConfig. Without the field
    `host`, the worker listens on its machine's own address."""
    placement: Placement
    """Resources that Ray reserves for the worker, and labels of the machines that may run it. A later launcher takes
    over the running worker only if it would give it this same placement."""
    ranks_folder: str | None = None
    """Folder of the socket by which a tensor-parallel target's ranks connect; None for a worker of one rank."""


@dataclass(frozen=True, slots=True)
class StartedActor:
    """Outcome of a successful start: addresses, epoch and machine of the worker."""

    address: str
    """Address host:port of the worker's gRPC server."""
    pid: int
    epoch: int
    """Epoch of the worker, a number that differs at each start."""
    metrics_address: str | None
    """Address host:port of the worker's Prometheus endpoint; None if it has none."""
    node: str
    """Address of the worker's machine."""
    memory: str = ""
    """Text for users on the worker's resident memory and on the size of its full KV cache."""


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Outcome of a start that failed."""

    message: str
    """Reason of the failure, for users."""


class WorkerActor:
    """Ray actor that runs one worker. The constructor starts the worker, because after a restart Ray calls only the
    constructor.
    """

    def __init__(self, spec: ActorSpec) -> None:
        """Start the worker. Nothing here may import torch before the worker has pinned its threads."""
        if spec.placement.visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = spec.placement.visible_devices
        self._spec = spec
        name_member(spec.member)
        try:
            node = _node_address()
            config = _config(spec.role, _settings_here(spec, node))
            self._handle = _start(config, spec.ranks_folder)
            self._outcome: StartedActor | StartFailure = _facts(self._handle, node)
        except OutriderError as error:  # its message quotes settings and files alone
            log.error("the %s worker did not start: %s", spec.role, error.message)
            self._outcome = StartFailure(error.message)
        except Exception as error:
            log.exception("the %s worker did not start", spec.role)
            self._outcome = StartFailure(f"{spec.role}: {error!r}")
        if isinstance(self._outcome, StartFailure):
            if _was_restarted():
                threading.Thread(target=_exit_alone, name="exit", daemon=True).start()
            return
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        self._drain_with_node(config.drain_timeout_s)

    def __repr__(self) -> str:
        """Return the worker's name, which Ray puts before the worker's lines in the launcher's log."""
        return self._spec.member

    def outcome(self) -> StartedActor | StartFailure:
        """Return the outcome of the worker's start in the actor's present process."""
        return self._outcome

    def spec(self) -> ActorSpec:
        """Return the spec with which the actor was started. A later launcher compares it with its own settings."""
        return self._spec

    def drain(self, limit_s: float) -> None:
        """Make the worker accept no new slots, and wait at most `limit_s` seconds for its open ones to finish."""
        if isinstance(self._outcome, StartedActor):
            self._handle.drain(limit_s)

    def stop(self, grace_s: float) -> None:
        """End the worker's gRPC streams, which get `grace_s` seconds to end by themselves, and then its engine. The
        process stays alive until it is killed.
        """
        if isinstance(self._outcome, StartedActor):
            self._handle.stop(grace_s)

    def _drain_with_node(self, limit_s: float) -> None:
        """Drain the worker when the container of this process, if it has one, is about to end."""
        folder = os.environ.get(node_drain.FOLDER)
        if folder is None:
            return

        def drain() -> None:
            log.info("this node is about to end: the %s worker drains for at most %g s", self._spec.role, limit_s)
            try:
                self._handle.drain(limit_s)
            except Exception:
                log.exception("the %s worker did not drain", self._spec.role)

        try:
            node_drain.listen(Path(folder), drain, limit_s)
        except OSError as error:
            log.warning("the %s worker will not be notified of its node's end: %s", self._spec.role, error)

    def _watch(self) -> None:
        """End the process when the engine ends by itself, so that Ray starts another."""
        try:
            self._handle.wait_failed()
        except Exception:
            log.exception("the %s worker's engine ended; the process follows", self._spec.role)
            _exit_for_restart()


class RankActor:
    """Ray actor that runs one rank of a tensor-parallel target, except rank 0. When the process of rank 0 ends, this
    process ends too, and Ray restarts both.
    """

    def __init__(
        self, folder: str, rank: int, cpu_cores: str | None, num_cores: int | None, visible_devices: str | None
    ) -> None:
        """Run the rank for the target that connects through `folder`, on a thread of its own.

        cpu_cores: the rank's cores, in the form of the setting. num_cores: number of cores to take if `cpu_cores` is
        None. visible_devices: value of CUDA_VISIBLE_DEVICES; None = the value that Ray sets.
        """
        if visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        arguments = (Path(folder), rank, cpu_cores or _cores_here(num_cores))
        threading.Thread(target=self._run_rank, args=arguments, name="rank", daemon=True).start()

    def _run_rank(self, folder: Path, rank: int, cpu_cores: str | None) -> None:
        from outrider.engine.loading.rank_process import run_rank

        try:
            run_rank(folder, rank, cpu_cores, lambda: None)
        except Exception:
            log.exception("rank %d of the target ended", rank)
        # Also when the target has ended well: it may start again. Whoever stops both kills them for good.
        _exit_for_restart()


def _settings_here(spec: ActorSpec, node: str) -> dict[str, Any]:
    """Return the settings, completed by those that depend on the machine, which may be another one in the next life."""
    settings = {"host": node, **spec.settings}
    if settings.get("cpu_cores") is None:
        settings["cpu_cores"] = _cores_here(spec.placement.num_cores)
    return settings


def _cores_here(num_cores: int | None) -> str | None:
    """Return the cores to which the process is to be pinned; None = it is not pinned.

    Under a quota of CPU time all threads share the quota, and other processes of the machine may be pinned to the same
    cores.
    """
    if num_cores is None or is_limited():
        return None
    try:
        return format_cores(lock_cores(num_cores))
    except ConfigError as error:
        log.warning("this worker is pinned to no cores: %s", error.message)
        return None


def _config(role: str, settings: dict[str, Any]) -> WorkerConfig:
    if role == "target":
        return TargetConfig(**settings)
    return DraftConfig(**settings)


def _start(config: WorkerConfig, ranks_folder: str | None) -> Any:
    if isinstance(config, TargetConfig):
        from target_service.worker import start_worker as start_target

        configure_logging(config.log_level, "target", config.log_format)
        return start_target(config, ranks_folder)
    from draft_service.worker import start_worker as start_draft

    assert isinstance(config, DraftConfig)
    configure_logging(config.log_level, "draft", config.log_format)
    return start_draft(config)


def _facts(handle: Any, node: str) -> StartedActor:
    info = handle.info()
    metrics = None
    if info.metrics_address:
        metrics = _reachable(info.metrics_address, node)
    return StartedActor(_reachable(handle.address, node), info.pid, info.epoch, metrics, node, memory_taken(info))


def _reachable(address: str, node: str) -> str:
    # "0.0.0.0:7001" on 10.0.0.5: "10.0.0.5:7001"
    host, _, port = address.rpartition(":")
    if host.strip("[]") in _ALL_ADDRESSES:
        return join_host_port(node, int(port))
    return address


def _node_address() -> str:
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def _was_restarted() -> bool:
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _exit_alone() -> None:
    """End a worker that did not start again. The launcher reads its outcome and, if it runs, ends it sooner."""
    time.sleep(_ALONE_S)
    _exit_for_restart()


def _exit_for_restart() -> None:
    """End the process: Ray restarts an actor whose process ended, but not one whose `__init__` raised."""
    time.sleep(1.0)  # Ray would restart it without a pause
    sys.stderr.flush()
    os._exit(1)
