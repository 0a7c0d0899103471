"""`python -m deploy.launcher --config FILE`: starts a system's workers as Ray actors, follows and sizes their pools,
and ends them when it ends. Gateways join its registry, which sends them the workers' addresses.

Prints JSON lines on stdout: {"event": "progress", "part", "state", "detail"} while it works, and once, when every
worker can be called, {"event": "ready", "registry", "members", ...}. `--config -` reads one line from stdin, and the
end of stdin then ends the system: so `outrider up` leaves nothing behind.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from deploy.actors import StartedActor
from deploy.cluster import Cluster
from deploy.fleet import NOTICE_S, Fleet
from deploy.placement import Placement, check_capacity, place
from deploy.pool_member import SERVING, PoolMember
from deploy.ray_workers import RayWorkers
from deploy.registry import Registry, reachable
from deploy.sightings import PERIOD_S, WorkerCalls
from outrider.v1 import registry_pb2
from outrider.wire.errors import ConfigError, OutriderError, Unavailable
from outrider.wire.models.model_id import local_path
from outrider.wire.processes.stop_flag import StopFlag, StopRequested, ignore_log_rotation
from outrider.wire.settings import system
from outrider.wire.settings.pools import Pool
from outrider.wire.settings.system import RayConfig, SystemConfig, read_yaml, serve_metrics
from outrider.wire.telemetry.log import configure_logging, get_logger, log_end
from outrider.wire.transport.roles import Role
from outrider.wire.transport.tls import CertificateFolder

log = get_logger(__name__)

_DRAFT_NODES_S = 30.0
"""Seconds for which machines for drafts are waited for, before the targets start without drafts."""
_POLL_S = 0.1
"""Seconds between two checks of workers that start or end, which Ray does not report."""
_HERE = "127.0.0.1:0"
"""Address at which the registry of `outrider up` listens."""
_ALONE = "0.0.0.0:7000"
"""Address at which the registry of a launcher without `outrider up` listens."""
_TLS_DIR = "OUTRIDER_LAUNCHER_TLS_DIR"
"""Environment variable with `ray.tls_dir`, if the file does not set it."""


class Launcher:
    """Starts, watches and ends the workers of one system on a Ray cluster. `run` blocks until `stop` is set."""

    def __init__(
        self, config: SystemConfig, ray_config: RayConfig, stop: StopFlag, events: TextIO, *, needs_drafts: bool
    ) -> None:
        """Prepare a system; nothing is started yet.

        events: stream to which the JSON lines are written. needs_drafts: whether the start fails if a draft cannot
        start.
        """
        self._config = config
        self._needs_drafts = needs_drafts
        self._ray_config = ray_config
        self._stop_flag = stop
        self._events = events
        # Two systems on one cluster must not find each other's actors.
        self._run = ray_config.name or secrets.token_hex(4)
        self._fleet: Fleet | None = None
        self._certificates: CertificateFolder | None = None
        if ray_config.tls_dir is not None:
            self._certificates = CertificateFolder(ray_config.tls_dir, "ray.tls_dir", Role.LAUNCHER)
        self._registry = Registry(self._scale)

    def run(self) -> None:
        """Start the workers, follow them until `stop` is set, and end them. Raises OutriderError if they cannot
        start.
        """
        if self._ray_config.address is None:
            self._check_models()
        self.progress("ray", "starting", self._ray_config.address or "on this machine")
        with Cluster(self._ray_config.address) as cluster:
            self._stop_flag.install()  # Ray has installed its own handler
            self.progress("ray", "ready", f"{len(cluster.nodes())} node(s)", folder=cluster.folder)
            try:
                address = self._registry.start(self._ray_config.registry or _HERE, self._certificates)
                self._serve(cluster, address)
            finally:
                self._registry.stop()

    def _check_models(self) -> None:
        """Raise ConfigError, before Ray starts, if a model's path does not exist."""
        needed: Sequence[Pool] = self._config.target_pools
        if self._needs_drafts:
            needed = self._config.pools
        for pool in needed:
            try:
                local_path(pool.worker.model)
            except ConfigError as error:
                raise ConfigError(f"{pool.setting}: {error.message}") from None

    def progress(self, part: str, state: str, detail: str, **more: object) -> None:
        """Print an event about Ray, a pool or a worker, as a JSON line for the process that started the launcher.

        part: "ray", or the name of the pool or worker. state: its new state. detail: text for users. more: further
        fields of the JSON line.
        """
        self._print(event="progress", part=part, state=state, detail=detail, **more)

    def _serve(self, cluster: Cluster, address: str) -> None:
        placements = self._place(cluster)
        calls = WorkerCalls(self._registry.loop, self._certificates, self._stop_flag.notify)
        workers = RayWorkers(
            self._run,
            lambda pool: self._placement_of(pool, placements, cluster),
            is_lasting=self._ray_config.name is not None,
            is_local=cluster.is_ours,
            folder=cluster.folder,
        )
        fleet = self._fleet = Fleet(
            self._config.pools,
            self._config.scaling,
            workers,
            calls,
            self.progress,
            lambda pool: self._why_full(pool, placements, cluster),
            needs_drafts=self._needs_drafts,
        )
        try:
            self._start(fleet, cluster, address)
            while not self._stop_flag.wait(_pause_s(fleet)):
                self._tick(fleet)
        except StopRequested:
            self._end(fleet)
            raise
        except BaseException:  # workers of an earlier launcher go on serving gateways
            fleet.end_all(keeps_taken_over=True)
            raise
        self._end(fleet)

    def _place(self, cluster: Cluster) -> dict[str, Placement]:
        """Return the placements of the pools, as soon as there are machines for them.

        Machines of a cluster that was joined may still be about to join it. For drafts that are not needed they are
        waited for less long; `_placement_of` places such drafts later. Raises ConfigError.
        """
        started_s = time.monotonic()
        limit_s = system.NODE_TIMEOUT_S
        drafts_limit_s = _DRAFT_NODES_S
        if cluster.is_ours:
            limit_s = 0.0
        if self._needs_drafts or cluster.is_ours:
            drafts_limit_s = math.inf
        shown = ""
        while True:
            self._stop_flag.check()
            waited_s = time.monotonic() - started_s
            pools: Sequence[Pool] = self._config.pools
            if waited_s >= drafts_limit_s:
                pools = self._config.target_pools
            try:
                return self._placements(pools, cluster)
            except ConfigError as error:
                if waited_s >= limit_s:
                    raise
                if error.message != shown:
                    shown = error.message
                    self.progress("ray", "waiting", shown)
            self._stop_flag.wait(PERIOD_S)

    def _placements(self, pools: Sequence[Pool], cluster: Cluster) -> dict[str, Placement]:
        nodes = cluster.nodes()
        placements = place(replace(self._config, pools=tuple(pools)), nodes, cluster.local_cores())
        required = {pool.setting: (placements[pool.name], pool.count) for pool in pools}
        check_capacity(required, nodes, "has")
        if self._ray_config.name is None:  # else workers of an earlier launcher may take the room
            check_capacity(required, cluster.free(), "has free")
        return placements

    def _placement_of(self, pool: Pool, placements: dict[str, Placement], cluster: Cluster) -> Placement:
        """Return the placement of a pool. Raises ConfigError for drafts for which there is no machine yet."""
        if pool.name not in placements:
            placements.update(self._placements([pool], cluster))
        return placements[pool.name]

    def _why_full(self, pool: Pool, placements: Mapping[str, Placement], cluster: Cluster) -> str | None:
        """Return the reason why there is no room for another worker; None if there is room, or if a machine may be
        about to join.
        """
        if not cluster.is_ours:
            return None
        try:
            check_capacity({pool.setting: (placements[pool.name], 1)}, cluster.free(), "has free")
        except ConfigError as error:
            return error.message
        return None

    def _start(self, fleet: Fleet, cluster: Cluster, address: str) -> None:
        fleet.start()
        deadline_s = time.monotonic() + system.START_TIMEOUT_S
        self._tick(fleet)
        while not fleet.is_ready():
            self._stop_flag.check()
            if time.monotonic() > deadline_s:
                raise Unavailable(self._late(fleet, cluster))
            self._stop_flag.wait(_POLL_S)
            self._tick(fleet)
        self._announce(fleet, cluster, address)

    def _tick(self, fleet: Fleet) -> None:
        changed = fleet.tick(self._registry.reports())
        if changed is not None:
            self._registry.send_membership(changed)

    def _end(self, fleet: Fleet) -> None:
        """Drain the workers for at most their drain_timeout_s, and end them."""
        notice_s = 0.0
        if self._registry.reports():
            notice_s = NOTICE_S
        changed = fleet.drain_all(notice_s)
        if changed is not None:
            self._registry.send_membership(changed)
        limit_s = max(pool.worker.drain_timeout_s for pool in self._config.pools)
        deadline_s = time.monotonic() + limit_s
        while (
            not fleet.is_idle(self._registry.reports())
            and not self._stop_flag.is_hurried
            and time.monotonic() < deadline_s
        ):
            time.sleep(_POLL_S)
        fleet.end_all()

    def _scale(self, pool: str, count: int | None) -> concurrent.futures.Future[registry_pb2.ScaleReply]:
        if self._fleet is None or not self._fleet.is_ready():
            raise Unavailable("the workers are still being started; try again")
        reply = self._fleet.scale(pool, count)
        self._stop_flag.notify()
        return reply

    def _announce(self, fleet: Fleet, cluster: Cluster, address: str) -> None:
        members = list[dict[str, object]]()
        for member in fleet.members:
            if member.state == SERVING and member.started is not None:
                members.append(_member_event(member, member.started))
        self._print(event="ready", registry=reachable(address), members=members, run=self._run, ray=cluster.address)

    def _late(self, fleet: Fleet, cluster: Cluster) -> str:
        free = cluster.free()
        offered = "; ".join(f"{node.num_cpus:g} CPU and {node.num_gpus:g} GPU" for node in free) or "nothing"
        return (
            f"{' and '.join(fleet.names_starting())} not ready after {system.START_TIMEOUT_S:g} s; the cluster has "
            f"free: {offered}. A model that is fetched from a hub may need another start"
        )

    def _print(self, **event: object) -> None:
        self._events.write(json.dumps(event) + "\n")
        self._events.flush()


def _pause_s(fleet: Fleet) -> float:
    if fleet.is_settled():
        return PERIOD_S
    return _POLL_S


def _member_event(member: PoolMember, started: StartedActor) -> dict[str, object]:
    return {
        "name": member.name,
        "pool": member.pool.name,
        "role": member.pool.role,
        "address": started.address,
        "metrics": started.metrics_address,
        "pid": started.pid,
        "node": started.node,
        "memory": started.memory,
    }


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. If it is wrong, argparse ends the process."""
    parser = argparse.ArgumentParser(prog="python -m deploy.launcher", description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file; - reads one line of JSON from stdin")
    parser.add_argument("--registry", help=f"host:port that gateways join at; {_ALONE} unless the file sets another")
    parser.add_argument("--needs-drafts", action="store_true", help="end when a draft cannot start, as for a target")
    return parser.parse_args(argv)


def read_config(arguments: argparse.Namespace, stop: StopFlag) -> SystemConfig:
    """Return the settings from the YAML file that the command line names, or, with `--config -`, from one line of JSON
    on stdin. In the second case the end of stdin sets `stop`.

    Raises ConfigError if the settings cannot be read or are not valid.
    """
    if arguments.config != "-":
        values = read_yaml(Path(arguments.config))
        serve_metrics(values)
        ray = values.get("ray", {})
        if isinstance(ray, dict):
            values["ray"] = {"registry": _ALONE, "tls_dir": os.environ.get(_TLS_DIR) or None, **ray}
            if arguments.registry:
                values["ray"]["registry"] = arguments.registry
        return SystemConfig.read(values)
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
    """Return a stream to stdout for the launcher's events, and redirect all other output to stderr, since Ray repeats
    its workers' output.
    """
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


def run(config: SystemConfig, stop: StopFlag, events: TextIO, *, needs_drafts: bool) -> None:
    """Run a system until `stop` is set. Raises OutriderError if workers that it needs cannot start.

    events: stream to which the launcher writes its events as JSON lines. needs_drafts: whether the start fails if a
    draft cannot start.
    """
    if config.ray is None:
        raise ConfigError("ray is off in the settings; start the workers as plain processes instead")
    configure_logging("info", "launcher", config.gateway.get("log_format", "text"))
    for pool in config.pools_ending_with_launcher():
        log.warning(
            "ray.name is %r and %s.tensor_parallel is set: a split target ends with the launcher, also when it is "
            "killed, and loads anew under the next",
            config.ray.name,
            pool.setting,
        )
    Launcher(config, config.ray, stop, events, needs_drafts=needs_drafts).run()


def main(argv: Sequence[str]) -> int:
    """Run the launcher with the command line's arguments. Return the exit code."""
    events = _claim_stdout()
    configure_logging("info", "launcher")
    ignore_log_rotation()
    stop = StopFlag()
    stop.install()
    try:
        arguments = read_arguments(argv)
        run(read_config(arguments, stop), stop, events, needs_drafts=arguments.needs_drafts)
    except StopRequested:
        return 0
    except OutriderError as error:
        log_end("launcher", error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
