"""Workers as Ray sees them: made, found again, asked, restarted and ended. The only place that calls actors.

Nothing here waits but `adopt`: an actor that restarts answers when it is back, and that may be never.

A split target is one placement group on one machine, where its ranks meet in a folder and share every layer's sums:
rank 0 is the worker itself, and there is a follower for each more. They end with the launcher.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.actors import ActorSpec, FollowerActor, Refused, Started, WorkerActor
from deploy.placement import Placement
from outrider.engine.parallel.meeting import SOCKET
from outrider.wire.errors import Unavailable
from outrider.wire.processes.places import parent_for_sockets
from outrider.wire.settings.config import WorkerConfig, parse_cores
from outrider.wire.settings.pools import Pool, format_cores
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.host import split_evenly

log = get_logger(__name__)

NAMESPACE = "outrider"
STOP_GRACE_S = 2.0
"""Seconds that streams have to end by themselves. Twice as long: a stop takes so much longer where a client hangs."""


class Ranks:
    """Holds the ranks of one split target. `start_followers` and `stop` are called once each."""

    def __init__(self, placement: Placement, cpu_cores: str | None, parent: str | None) -> None:
        """Reserve the ranks' places.

        placement: of each rank. cpu_cores: to share out, as in the settings. parent: a folder that goes with Ray's
        session; None = the system's folder for temporary files.
        """
        self._placement = placement
        num_ranks = placement.num_ranks
        self._cores = split_evenly(parse_cores(cpu_cores), num_ranks) if cpu_cores else [None] * num_ranks
        self._followers: list[Any] = []
        # Its length does not depend on the worker's name, for a socket's path may have 107 bytes.
        folder = f"outrider-ranks-{secrets.token_hex(4)}"
        if parent is None:
            parent = str(parent_for_sockets(f"/{folder}/{SOCKET}"))
        self.folder = str(Path(parent) / folder)
        wanted = {"CPU": placement.num_cpus, "GPU": placement.num_gpus}
        bundle = {name: amount for name, amount in wanted.items() if amount}
        labels = {"bundle_label_selector": [dict(placement.labels)] * num_ranks} if placement.labels else {}
        self._group: Any = _ray().util.placement_group([bundle] * num_ranks, "STRICT_PACK", **labels)

    def cores_of(self, rank: int) -> str | None:
        """Return a rank's cores as `cpu_cores` takes them; None where the settings say none."""
        cores = self._cores[rank]
        return None if cores is None else format_cores(cores)

    def options(self, options: dict[str, Any], rank: int) -> dict[str, Any]:
        """Turn the options of an actor on its own into those of a rank, which hold after restarts too."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        alone = {name: value for name, value in options.items() if name != "label_selector"}  # the group has it
        return {**alone, "scheduling_strategy": strategy}

    def start_followers(self, options: dict[str, Any]) -> None:
        """Start ranks 1 and up. options: as of the worker itself."""
        ray, placement = _ray(), self._placement
        for rank in range(1, placement.num_ranks):
            mine = {**self.options(options, rank), "name": f"{options['name']}-rank-{rank}"}
            arguments = (self.folder, rank, self.cores_of(rank), placement.num_cores, placement.visible_devices)
            self._followers.append(ray.remote(FollowerActor).options(**mine).remote(*arguments))

    def stop(self) -> None:
        """Kill the followers and give their places back. For after the target has ended."""
        ray = _ray()
        for follower in self._followers:
            with contextlib.suppress(Exception):
                ray.kill(follower, no_restart=True)
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(self._group)
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Lost:
    """Its process ended, or it cannot be asked now."""

    message: str
    is_final: bool
    """Ray will not restart it."""


Answer = Started | Refused | Lost


class RayWorker:
    """Asks, restarts and ends one actor."""

    def __init__(self, actor: Any, ranks: Ranks | None) -> None:
        self._actor = actor
        self._ranks = ranks
        self._pending: Any = None
        self._failed: Lost | None = None
        self.ask()

    def ask(self) -> None:
        """Ask for its outcome, of this life or the next. `answer` has it later."""
        try:
            self._pending = self._actor.outcome.remote()
        except Exception as error:
            self._pending, self._failed = None, _lost(error)

    def answer(self) -> Answer | None:
        """Return the answer to the last `ask`, once; None while there is none."""
        ray = _ray()
        if self._failed is not None:
            failed, self._failed = self._failed, None
            return failed
        if self._pending is None or not ray.wait([self._pending], timeout=0)[0]:
            return None
        pending, self._pending = self._pending, None
        try:
            outcome: Started | Refused = ray.get(pending)
            return outcome
        except Exception as error:
            return _lost(error)

    def num_restarts(self) -> int:
        """Return the lives that Ray has started after the first; 0 where Ray cannot say.

        `ask` cannot count them: it waits for the life that loads, however many end. Ray's public API says the number
        through the dashboard alone.
        """
        try:
            from ray._private.state import actors

            return int(actors(self._actor._actor_id.hex())["NumRestarts"])
        except Exception:
            log.debug("Ray does not say how often the actor was restarted", exc_info=True)
            return 0

    def restart(self) -> None:
        """End its process, so that Ray starts another: also one that hangs."""
        with contextlib.suppress(Exception):
            _ray().kill(self._actor, no_restart=False)

    def begin_stop(self) -> None:
        """Have its streams and its engine end; `has_stopped` says when. A dead actor has nothing to stop."""
        with contextlib.suppress(Exception):
            self._pending = self._actor.stop.remote(STOP_GRACE_S)

    def has_stopped(self) -> bool:
        """Return whether it has stopped, or cannot be asked."""
        return self._pending is None or bool(_ray().wait([self._pending], timeout=0)[0])

    def kill(self) -> None:
        """End it for good, with its slots: drain it first."""
        with contextlib.suppress(Exception):
            _ray().kill(self._actor, no_restart=True)
        if self._ranks is not None:
            self._ranks.stop()


def _lost(error: Exception) -> Lost:
    is_final = isinstance(error, _ray().exceptions.ActorDiedError)
    return Lost((str(error).strip() or repr(error)).splitlines()[0], is_final)


class RayWorkers:
    """Makes the actors of one system."""

    def __init__(
        self, run: str, placement_of: Callable[[Pool], Placement], *, lasting: bool, local: bool, folder: str | None
    ) -> None:
        """Make actors of the system that is named `run` on the cluster.

        placement_of: returns where a pool's workers go, or raises ConfigError. lasting: they outlive this process, for
        the next launcher of that name. local: all is on this machine, and listens on 127.0.0.1. folder: of Ray's
        session, when it is ours.
        """
        self._run = run
        self._placement_of = placement_of
        self._lasting = lasting
        self._local = local
        self._folder = folder

    def create(self, pool: Pool, member: str) -> RayWorker:
        """Make an actor, which may wait for a machine and then loads. Raises Unavailable when Ray takes no actor."""
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
            ranks.start_followers(options)
            spec.settings.update(cpu_cores=ranks.cores_of(0))
            spec = replace(spec, ranks_folder=ranks.folder)
            options = ranks.options(options, 0)
        return RayWorker(_ray().remote(WorkerActor).options(**options).remote(spec), ranks)

    def adopt(self, pools: Iterable[Pool]) -> dict[str, tuple[Pool, RayWorker]]:
        """Return the workers that a launcher of this name left behind, by name; drain and end those of other settings.

        One that does not answer is ended at once.
        """
        by_name = {pool.name: pool for pool in pools}
        found: dict[str, tuple[Pool, RayWorker]] = {}
        replaced: list[tuple[Any, ActorSpec]] = []
        for name in self._left_behind():
            try:
                actor = _ray().get_actor(name, namespace=NAMESPACE)
            except ValueError:  # it ended since it was listed
                continue
            spec = _spec_of(actor)
            pool = None if spec is None else by_name.get(spec.pool)
            if spec is not None and pool is not None and self._spec(pool, spec.member) == spec:
                log.info("%s runs already", spec.member)
                found[spec.member] = (pool, RayWorker(actor, None))
            elif spec is not None:
                log.info("%s runs with other settings than now: it drains, and another is started", spec.member)
                replaced.append((actor, spec))
            else:
                log.warning("%s of another launcher does not say what it is: it is ended", name)
                _kill(actor)
        _drain_and_kill(replaced)
        return found

    def _left_behind(self) -> list[str]:
        if not self._lasting:
            return []
        names: list[str] = _ray().util.list_named_actors()
        return sorted(name for name in names if name.startswith(f"{self._run}/"))

    def _options(self, member: str, placement: Placement) -> dict[str, Any]:
        """Ray restarts it until somebody kills it, or until its launcher has gone when it is not lasting."""
        return {
            "name": f"{self._run}/{member}/{secrets.token_hex(4)}",  # an ended one's name is not free at once
            "namespace": NAMESPACE,
            "lifetime": "detached" if self._lasting and placement.num_ranks == 1 else None,
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
        if self._local:
            settings.setdefault("host", "127.0.0.1")
        return ActorSpec(member, pool.name, pool.role, settings, placement)


def _drain_and_kill(workers: Sequence[tuple[Any, ActorSpec]]) -> None:
    """Let them drain side by side, each for as long as its settings say, and end them."""
    default_s: float = WorkerConfig.model_fields["drain_timeout_s"].default
    limits_s = [float(spec.settings.get("drain_timeout_s", default_s)) for _, spec in workers]
    draining = [actor.drain.remote(limit_s) for (actor, _), limit_s in zip(workers, limits_s, strict=True)]
    if draining:
        _ray().wait(draining, num_returns=len(draining), timeout=max(limits_s) + STOP_GRACE_S)
    for actor, _ in workers:
        _kill(actor)


def _kill(actor: Any) -> None:
    with contextlib.suppress(Exception):
        _ray().kill(actor, no_restart=True)


def _spec_of(actor: Any) -> ActorSpec | None:
    """None for one that does not answer: it hangs, restarts, or is of another version."""
    try:
        spec: ActorSpec = _ray().get(actor.spec.remote(), timeout=10.0)
    except Exception:
        return None
    return spec


def _ray() -> Any:
    """Imported late: it reads the environment. Untyped: so are its functions."""
    import ray

    return ray
