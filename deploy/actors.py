"""The Ray actor that is a worker: the same `start_worker` as `python -m target_service`, in a process Ray restarts."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.cluster import NAMESPACE
from deploy.placement import Placement
from outrider.wire.config import DraftConfig, TargetConfig
from outrider.wire.errors import OutriderError
from outrider.wire.log import configure_logging, get_logger

log = get_logger(__name__)

_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Started:
    """A worker that can be called."""

    address: str
    """host:port of its gRPC server."""
    pid: int
    epoch: int
    metrics_address: str | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker that could not start."""

    message: str


def actor_options(name: str, placement: Placement, strategy: Any) -> dict[str, Any]:
    """What Ray is asked for: the actor outlives its driver and is restarted until somebody kills it."""
    return {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "scheduling_strategy": strategy,
        "max_restarts": -1,
        "max_task_retries": 0,
        "num_cpus": placement.num_cpus,
        "num_gpus": placement.num_gpus,
    }


class WorkerActor:
    """Holds the worker of one role. All is done in `__init__`: after a restart Ray runs nothing else."""

    def __init__(self, role: str, settings: dict[str, Any], visible_devices: str | None) -> None:
        """`settings`: fields of TargetConfig or DraftConfig. Nothing here may import torch before the worker pins."""
        if visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        self._role = role
        try:
            self._handle = _start(role, settings)
            self._outcome: Started | Refused = _facts(self._handle)
        except Exception as error:
            log.exception("the %s worker did not start", role)
            self._outcome = Refused(error.message if isinstance(error, OutriderError) else f"{role}: {error!r}")
            if _was_restarted():
                _exit_for_restart()  # the first start's failure is reported; a later one is tried again
            return
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def outcome(self) -> Started | Refused:
        """Answers once `__init__` is through."""
        return self._outcome

    def stop(self, grace_s: float) -> None:
        """End the streams and the engine. The process goes on until it is killed."""
        if isinstance(self._outcome, Started):
            self._handle.stop(grace_s)

    def _watch(self) -> None:
        """An engine that ended by itself ends the process, so that Ray starts a fresh one."""
        try:
            self._handle.wait_failed()
        except Exception:
            log.exception("the %s worker's engine ended; the process follows", self._role)
            _exit_for_restart()


class FollowerActor:
    """Holds a share of the target's weights. Its process ends with the target's, and Ray restarts both."""

    def __init__(self, folder: str, rank: int, cpu_cores: str | None, visible_devices: str | None) -> None:
        """`folder`: where the target meets it."""
        if visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        arguments = (Path(folder), rank, cpu_cores)
        threading.Thread(target=self._follow, args=arguments, name="follower", daemon=True).start()

    def _follow(self, folder: Path, rank: int, cpu_cores: str | None) -> None:
        from outrider.engine.parallel.follower import follow

        try:
            follow(folder, rank, cpu_cores, lambda: None)
        except Exception:
            log.exception("rank %d of the target ended", rank)
        # Also when the target has said that it ends: it may be about to start anew. Who stops both kills them for good.
        _exit_for_restart()


def _start(role: str, settings: dict[str, Any]) -> Any:
    if role == "target":
        from target_service.worker import start_worker as start_target

        target = TargetConfig(**settings)
        configure_logging(target.log_level, role, target.log_format)
        return start_target(target)
    from draft_service.worker import start_worker as start_draft

    draft = DraftConfig(**settings)
    configure_logging(draft.log_level, role, draft.log_format)
    return start_draft(draft)


def _facts(handle: Any) -> Started:
    info = handle.info()
    return Started(handle.address, info.pid, info.epoch, info.metrics_address or None)


def _was_restarted() -> bool:
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _exit_for_restart() -> None:
    """Ray restarts an actor whose process ended, but not one whose `__init__` raised."""
    time.sleep(_RETRY_S)
    sys.stderr.flush()
    os._exit(1)
