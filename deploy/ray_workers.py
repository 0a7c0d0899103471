"""Create, find, call, restart and end the actors of workers. For `launcher.py` and `fleet.py`; no other module calls
actors.

No function here waits except `take_over`: an actor that restarts replies when it is back, which may be never.

A split target is one placement group on one machine. Its ranks connect through a folder and add up the results of every
layer: rank 0 is the worker itself, the others are `RankActor`s. They end with the launcher.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.actors import ActorSpec, RankActor, StartedActor, StartFailure, WorkerActor
from deploy.placement import Placement
from outrider.engine.parallel.meeting import SOCKET
from outrider.wire.errors import Unavailable
from outrider.wire.processes.folders import parent_for_sockets
from outrider.wire.settings.config import WorkerConfig
from outrider.wire.settings.cores import format_cores, parse_cores
from outrider.wire.settings.pools import Pool
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.host import split_evenly

log = get_logger(__name__)

NAMESPACE = "outrider"
"""Ray namespace of all actors."""
STOP_GRACE_S = 2.0
"""Seconds that a worker's gRPC streams have to end by themselves when the worker is stopped."""


class Ranks:
    """Ranks (processes) of one tensor-parallel target, in one placement group of Ray. Call `start_other_ranks` and
    `stop` once each.
    """

    def __init__(self, placement: Placement, cpu_cores: str | None, parent: str | None) -> None:
        """Reserve the resources of all ranks.

        placement: resources of each rank. cpu_cores: the setting of this name, for all ranks together; None if it is
        not set. parent: folder of Ray's session; None = the system's folder for temporary files.
        """
        self._placement = placement
        num_ranks = placement.num_ranks
        self._cores: Sequence[Collection[int] | None] = [None] * num_ranks
        if cpu_cores:
            self._cores = split_evenly(parse_cores(cpu_cores), num_ranks)
        self._other_ranks: list[Any] = []
        # Without the worker's name, since a socket's path may have 107 bytes.
        folder = f"outrider-ranks-{secrets.token_hex(4)}"
        if parent is None:
            parent = str(parent_for_sockets(f"/{folder}/{SOCKET}"))
        self.folder = str(Path(parent) / folder)
        """Path of the folder with the socket through which the ranks connect."""
        wanted = {"CPU": placement.num_cpus, "GPU": placement.num_gpus}
        bundle = {name: amount for name, amount in wanted.items() if amount}
        labels: dict[str, Any] = {}
        if placement.labels:
            labels["bundle_label_selector"] = [dict(placement.labels)] * num_ranks
        self._group: Any = _ray().util.placement_group([bundle] * num_ranks, "STRICT_PACK", **labels)

    def cores_of(self, rank: int) -> str | None:
        """Return the CPU cores of one rank as a text for the setting `cpu_cores`, such as "0,2,3"; None if the target's
        own `cpu_cores` is not set.
        """
        cores = self._cores[rank]
        if cores is None:
            return None
        return format_cores(cores)

    def options(self, options: dict[str, Any], rank: int) -> dict[str, Any]:
        """Return `options`, changed so that Ray runs the actor of one rank on the rank's share of the placement group.

        options: Ray options that the actor of an unsplit target would have.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        alone = {name: value for name, value in options.items() if name != "label_selector"}  # the group has it
        return {**alone, "scheduling_strategy": strategy}

    def start_other_ranks(self, options: dict[str, Any]) -> None:
        """Start the actors of ranks 1 and up. options: Ray options that the actor of an unsplit target would have."""
        ray = _ray()
        placement = self._placement
        for rank in range(1, placement.num_ranks):
            mine = {**self.options(options, rank), "name": f"{options['name']}-rank-{rank}"}
            arguments = (self.folder, rank, self.cores_of(rank), placement.num_cores, placement.visible_devices)
            self._other_ranks.append(ray.remote(RankActor).options(**mine).remote(*arguments))

    def stop(self) -> None:
        """Kill the actors of ranks 1 and up, and release the resources of all ranks. Call it after the target has
        ended.
        """
        ray = _ray()
        for actor in self._other_ranks:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(self._group)
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class ActorLost:
    """Outcome of a call to an actor whose process has ended, or that cannot be called now."""

    message: str
    """First line of the error with which the call failed."""
    is_final: bool
    """Whether Ray will not restart the actor."""


Answer = StartedActor | StartFailure | ActorLost
"""Outcome of an actor's last start: the worker serves, it did not start, or the actor was lost."""


class RayWorker:
    """Ray actor of one worker, with which the worker is asked for its state, restarted and ended."""

    def __init__(self, actor: Any, ranks: Ranks | None) -> None:
        """Take the actor, and call for its outcome. ranks: the ranks of a split target; None for a worker of one
        rank.
        """
        self._actor = actor
        self._ranks = ranks
        self._pending: Any = None
        self._failed: ActorLost | None = None
        self.query()

    def query(self) -> None:
        """Ask the actor how its start went, without waiting for the reply, which `answer` returns later. If Ray is
        restarting the actor, the reply is about the new start.
        """
        try:
            self._pending = self._actor.outcome.remote()
        except Exception as error:
            self._pending = None
            self._failed = _lost(error)

    def answer(self) -> Answer | None:
        """Return the reply to the last `query`, if it has arrived and was not returned before; else None."""
        ray = _ray()
        if self._failed is not None:
            failed = self._failed
            self._failed = None
            return failed
        if self._pending is None or not ray.wait([self._pending], timeout=0)[0]:
            return None
        pending = self._pending
        self._pending = None
        try:
            outcome: StartedActor | StartFailure = ray.get(pending)
            return outcome
        except Exception as error:
            return _lost(error)

    def num_restarts(self) -> int:
        """Return how often Ray has restarted the actor; 0 if Ray does not report it. Ray's public API has the number
        only in its dashboard.
        """
        try:
            from ray._private.state import actors

            return int(actors(self._actor._actor_id.hex())["NumRestarts"])
        except Exception:
            log.debug("Ray does not report how often the actor was restarted", exc_info=True)
            return 0

    def restart(self) -> None:
        """End the actor's process, even if it hangs, so that Ray starts another."""
        with contextlib.suppress(Exception):
            _ray().kill(self._actor, no_restart=False)

    def begin_stop(self) -> None:
        """Begin to end the worker's streams and engine, without waiting. Call `has_stopped` to learn whether they have
        ended. If the actor is dead, there is nothing to end.
        """
        with contextlib.suppress(Exception):
            self._pending = self._actor.stop.remote(STOP_GRACE_S)

    def has_stopped(self) -> bool:
        """Return whether the stop that `begin_stop` began is over, or the actor cannot be called."""
        return self._pending is None or bool(_ray().wait([self._pending], timeout=0)[0])

    def kill(self) -> None:
        """End the actor for good, without waiting for the worker's slots; a tensor-parallel target's other ranks end
        with it. Drain the worker before.
        """
        with contextlib.suppress(Exception):
            _ray().kill(self._actor, no_restart=True)
        if self._ranks is not None:
            self._ranks.stop()


def _lost(error: Exception) -> ActorLost:
    is_final = isinstance(error, _ray().exceptions.ActorDiedError)
    return ActorLost((str(error).strip() or repr(error)).splitlines()[0], is_final)


class RayWorkers:
    """Creates the Ray actors of one system's workers, and finds those that an earlier launcher left running."""

    def __init__(
        self,
        run: str,
        placement_of: Callable[[Pool], Placement],
        *,
        is_lasting: bool,
        is_local: bool,
        folder: str | None,
    ) -> None:
        """Prepare to create actors.

        run: the system's name on the cluster. placement_of: returns the placement of a pool's workers, or raises
        ConfigError. is_lasting: whether actors outlive this process, for the next launcher of the same name. is_local:
        whether all actors run on this machine, and listen on 127.0.0.1. folder: folder of Ray's session; None for a
        cluster that this process did not start.
        """
        self._run = run
        self._placement_of = placement_of
        self._is_lasting = is_lasting
        self._is_local = is_local
        self._folder = folder

    def create(self, pool: Pool, member: str) -> RayWorker:
        """Create the actor of a new worker. Ray may start it later, once a machine has room for it. Raises Unavailable
        if Ray refuses it.

        member: name of the worker.
        """
        try:
            return self._create(pool, member)
        except Exception as error:
            raise Unavailable(f"Ray cannot start {member}: {error}") from error

    def _create(self, pool: Pool, member: str) -> RayWorker:
        placement = self._placement_of(pool)
        spec = self._spec(pool, member)
        ranks = None
        options = self._options(member, placement)
        if placement.num_ranks > 1:
            ranks = Ranks(placement, pool.worker.cpu_cores, self._folder)
            ranks.start_other_ranks(options)
            spec.settings.update(cpu_cores=ranks.cores_of(0))
            spec = replace(spec, ranks_folder=ranks.folder)
            options = ranks.options(options, 0)
        return RayWorker(_ray().remote(WorkerActor).options(**options).remote(spec), ranks)

    def take_over(self, pools: Iterable[Pool]) -> dict[str, tuple[Pool, RayWorker]]:
        """Return, by worker name, the pool and the actor of each worker that an earlier launcher of this system left
        running with the same settings as now.

        Workers with other settings are drained and ended. A worker that does not reply is ended at once.
        """
        pools_by_name = {pool.name: pool for pool in pools}
        taken_over: dict[str, tuple[Pool, RayWorker]] = {}
        replaced: list[tuple[Any, ActorSpec]] = []
        for name in self._names_on_cluster():
            try:
                actor = _ray().get_actor(name, namespace=NAMESPACE)
            except ValueError:  # it ended since it was listed
                continue
            spec = _spec_of(actor)
            if spec is None:
                log.warning("%s of another launcher has no description of itself: it is ended", name)
                _kill(actor)
                continue
            pool = pools_by_name.get(spec.pool)
            if pool is not None and self._spec(pool, spec.member) == spec:
                log.info("%s runs already", spec.member)
                taken_over[spec.member] = (pool, RayWorker(actor, None))
            else:
                log.info("%s runs with other settings than now: it drains, and another is started", spec.member)
                replaced.append((actor, spec))
        _drain_and_kill(replaced)
        return taken_over

    def _names_on_cluster(self) -> list[str]:
        if not self._is_lasting:
            return []
        names: list[str] = _ray().util.list_named_actors()
        return sorted(name for name in names if name.startswith(f"{self._run}/"))

    def _options(self, member: str, placement: Placement) -> dict[str, Any]:
        """Return the options of an actor outside of a placement group.

        Ray restarts the actor until it is killed or, if it is not lasting, until its launcher has gone.
        """
        lifetime = None
        if self._is_lasting and placement.num_ranks == 1:
            lifetime = "detached"
        return {
            "name": f"{self._run}/{member}/{secrets.token_hex(4)}",  # an ended one's name is not free at once
            "namespace": NAMESPACE,
            "lifetime": lifetime,
            "scheduling_strategy": "SPREAD",
            "label_selector": dict(placement.labels),
            "max_restarts": -1,
            "max_task_retries": 0,
            "num_cpus": placement.num_cpus,
            "num_gpus": placement.num_gpus,
        }

    def _spec(self, pool: Pool, member: str) -> ActorSpec:
        placement = self._placement_of(pool)
        settings = pool.worker.model_dump(exclude_unset=True)
        settings["device"] = placement.device
        if placement.gpu_memory_utilization is not None:
            settings.setdefault("gpu_memory_utilization", placement.gpu_memory_utilization)
        if self._is_local:
            settings.setdefault("host", "127.0.0.1")
        return ActorSpec(member, pool.name, pool.role, settings, placement)


def _drain_and_kill(workers: Sequence[tuple[Any, ActorSpec]]) -> None:
    """Drain these workers at the same time, each for at most its drain_timeout_s, and end them."""
    default_s: float = WorkerConfig.model_fields["drain_timeout_s"].default
    max_limit_s = 0.0
    draining = list[Any]()
    for actor, spec in workers:
        limit_s = float(spec.settings.get("drain_timeout_s", default_s))
        max_limit_s = max(max_limit_s, limit_s)
        draining.append(actor.drain.remote(limit_s))
    if draining:
        _ray().wait(draining, num_returns=len(draining), timeout=max_limit_s + STOP_GRACE_S)
    for actor, _ in workers:
        _kill(actor)


def _kill(actor: Any) -> None:
    with contextlib.suppress(Exception):
        _ray().kill(actor, no_restart=True)


def _spec_of(actor: Any) -> ActorSpec | None:
    """Return the spec with which an actor was started; None if it hangs, restarts, or is of another version."""
    try:
        spec: ActorSpec = _ray().get(actor.spec.remote(), timeout=10.0)
    except Exception:
        return None
    return spec


def _ray() -> Any:
    """Return the module ray. It is imported late, since it reads the environment, and untyped, as its functions are."""
    import ray

    return ray
