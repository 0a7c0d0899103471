"""`python -m deploy.launcher --config FILE`: starts a pair's workers as Ray actors and ends them when it ends.

Prints JSON lines on stdout: {"event": "progress", "part", "state", "detail"} while it works, then one
{"event": "ready", "target", "draft", ...} with the addresses. `--config -` reads one line from stdin, and the end of
stdin then ends the system: that is how `outrider up` makes sure that nothing outlives it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from deploy.actors import Refused, Started, WorkerActor, actor_options
from deploy.cluster import Cluster
from deploy.placement import Placement, check_fits, place
from deploy.ports import Ports
from deploy.ranks import Ranks
from outrider.cli.cores import format_cores
from outrider.cli.stopping import StopFlag, StopRequested
from outrider.cli.system import RayConfig, SystemConfig, read_yaml, workers_of
from outrider.wire.config import DraftConfig, TargetConfig
from outrider.wire.errors import ConfigError, OutriderError, Unavailable
from outrider.wire.log import configure_logging

_POLL_S = 0.2
_STOP_GRACE_S = 2.0
_STOP_TIMEOUT_S = 4.0
_CALL_TIMEOUT_S = 10.0


class Launcher:
    """The actors of one system. `start` and `stop` once each, with Ray up."""

    def __init__(self, config: SystemConfig, ray_config: RayConfig, stop: StopFlag, events: TextIO) -> None:
        self._config = config
        self._ray_config = ray_config
        self._stop_flag = stop
        self._events = events
        self._run = secrets.token_hex(4)  # two systems on one cluster must not find each other's actors
        self._actors: dict[str, Any] = {}
        self._ports = Ports()
        self._ranks: Ranks | None = None

    def start(self, cluster: Cluster) -> dict[str, Started]:
        """Blocks until both workers can be called. Raises OutriderError saying why they cannot."""
        nodes = cluster.nodes()
        if len(nodes) > 1:
            raise ConfigError(
                f"the cluster has {len(nodes)} machines, and workers are reached on the launcher's own alone: use a "
                "cluster of one machine, or start the workers by hand (python -m target_service --host ADDRESS, the "
                "same for draft_service) and then python -m gateway with --target and --draft"
            )
        placements = place(self._config, nodes, cluster.local_cores())
        check_fits(placements, nodes, "has")
        check_fits(placements, [cluster.free()], "has free")
        if self._config.target.tensor_parallel > 1:
            self._ranks = Ranks(self._run, self._config.target.tensor_parallel, placements, cluster.folder)
            self._ranks.start_followers()
        for role, worker in workers_of(self._config).items():
            self.progress(role, "loading", f"{worker.model} on {placements[role]}")
            self._actors[role] = self._create(role, worker, placements[role])
        return self._await_all(cluster)

    def announce(self, workers: Mapping[str, Started], cluster: Cluster) -> None:
        draft = workers.get("draft")
        pids = {role: worker.pid for role, worker in workers.items()}
        metrics = {role: worker.metrics_address for role, worker in workers.items()}
        self._print(
            event="ready",
            target=workers["target"].address,
            draft=draft and draft.address,
            pids=pids,
            metrics=metrics,
            run=self._run,
            ray=cluster.address,
        )

    def progress(self, part: str, state: str, detail: str, **more: object) -> None:
        self._print(event="progress", part=part, state=state, detail=detail, **more)

    def stop(self) -> None:
        """Orderly first, then for good: a detached actor ends only when it is killed."""
        import ray

        with contextlib.suppress(Exception):  # an actor that is restarting or dead has nothing to stop
            ray.get([actor.stop.remote(_STOP_GRACE_S) for actor in self._actors.values()], timeout=_STOP_TIMEOUT_S)
        for actor in self._actors.values():
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        if self._ranks is not None:
            self._ranks.stop()

    def _create(self, role: str, worker: TargetConfig | DraftConfig, placement: Placement) -> Any:
        import ray

        settings = worker.model_dump(exclude_unset=True)
        # Chosen here and kept through restarts: the gateway finds a restarted worker where the old one was.
        settings["port"] = worker.port or self._ports.free(worker.host)
        if worker.metrics_port == 0:
            settings["metrics_port"] = self._ports.free(worker.host)
        settings["device"] = placement.device
        settings["cpu_cores"] = None if placement.cpu_cores is None else format_cores(placement.cpu_cores)
        strategy = _on_this_machine()
        if role == "target" and self._ranks is not None:
            settings["parallel_folder"] = self._ranks.folder
            strategy = self._ranks.strategy(0)
        options = ray.remote(WorkerActor).options(**actor_options(f"{self._run}-{role}", placement, strategy))
        return options.remote(role, settings, placement.visible_devices)

    def _await_all(self, cluster: Cluster) -> dict[str, Started]:
        import ray

        pending = {actor.outcome.remote(): role for role, actor in self._actors.items()}
        give_up = time.monotonic() + self._ray_config.start_timeout_s
        started: dict[str, Started] = {}
        while pending:
            self._stop_flag.check()
            if time.monotonic() > give_up:
                raise Unavailable(self._late(list(pending.values()), cluster))
            done, _ = ray.wait(list(pending), timeout=_POLL_S)
            for reply in done:
                role = pending.pop(reply)
                started[role] = self._accept(role, reply)
        return started

    def _accept(self, role: str, reply: Any) -> Started:
        import ray

        try:
            outcome: Started | Refused = ray.get(reply, timeout=_CALL_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            first_line = str(error).strip().splitlines()[0]
            raise Unavailable(f"the {role} worker's process ended while it started: {first_line}") from None
        if isinstance(outcome, Refused):
            raise ConfigError(outcome.message)
        self.progress(role, "ready", outcome.address)
        return outcome

    def _late(self, roles: Sequence[str], cluster: Cluster) -> str:
        free = cluster.free()
        return (
            f"{' and '.join(roles)} not ready after ray.start_timeout_s = {self._ray_config.start_timeout_s:g} s; "
            f"the cluster has {free.num_cpus:g} CPU and {free.num_gpus:g} GPU free. "
            "Raise it if a model is large or still being fetched"
        )

    def _print(self, **event: object) -> None:
        self._events.write(json.dumps(event) + "\n")
        self._events.flush()


def _on_this_machine() -> Any:
    """Also after a restart: a machine that joins the cluster later must not get a worker that nobody reaches."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)


def read_config(argv: Sequence[str], stop: StopFlag) -> SystemConfig:
    parser = argparse.ArgumentParser(prog="python -m deploy.launcher", description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file; - reads one line of JSON from stdin")
    path: str = parser.parse_args(argv).config
    if path != "-":
        return SystemConfig.read(read_yaml(Path(path)))
    line = sys.stdin.readline()
    threading.Thread(target=_stop_at_end_of_stdin, args=(stop,), name="stdin", daemon=True).start()
    try:
        return SystemConfig.read(json.loads(line))
    except json.JSONDecodeError as error:
        raise ConfigError(f"stdin must start with one line of JSON: {error}") from None


def _stop_at_end_of_stdin(stop: StopFlag) -> None:
    while os.read(0, 4096):
        pass
    stop.set()


def _claim_stdout() -> TextIO:
    """The real stdout for our lines alone: Ray repeats what its workers print."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


def run(config: SystemConfig, stop: StopFlag, events: TextIO) -> None:
    """Returns when `stop` is set. Raises OutriderError when the workers cannot start."""
    if config.ray is None:
        raise ConfigError("ray is off in the settings; start the workers as plain processes instead")
    launcher = Launcher(config, config.ray, stop, events)
    launcher.progress("ray", "starting", config.ray.address or "on this machine")
    with Cluster(config.ray.address) as cluster:
        stop.install()  # Ray has put its own handler in
        launcher.progress("ray", "ready", f"{len(cluster.nodes())} node(s)", folder=cluster.folder)
        try:
            launcher.announce(launcher.start(cluster), cluster)
            while not stop.wait(1.0):
                pass
        finally:
            launcher.stop()


def main(argv: Sequence[str]) -> int:
    events = _claim_stdout()
    configure_logging("info", "launcher")
    stop = StopFlag()
    stop.install()
    try:
        run(read_config(argv, stop), stop, events)
    except StopRequested:
        return 0
    except OutriderError as error:
        sys.stderr.write(f"launcher: {error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
