"""Workers under Ray Serve instead of the launcher: as little code as carries pools, drains, sizes and a registry.

`python -m benchmarks.serve_workers --config FILE --address HEAD:6379 --registry HOST:PORT` is to Serve what
`python -m deploy.launcher` is to bare actors, with the same file. Its lines are those that Serve would need of us,
beside what it imports from `deploy`; `benchmarks.serve_launcher` measures both.

Serve places replicas, starts them again and ends them. Its proxies and handles carry nothing of an answer: gateways
call the workers' own gRPC servers, so that somebody must tell them where these are, and a replica must count its
answers itself before it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentID  # what the REST call to size a deployment uses

from deploy import actors
from deploy.cluster import Cluster
from deploy.fleet import DRAIN_LIMIT_S, HUNG_AFTER_S
from deploy.member import DRAINING, ROLES, SERVING, trouble_of
from deploy.placement import NO_GPU, Placement, place
from deploy.registry import Registry
from deploy.sightings import PERIOD_S, Seen
from deploy.sizes import Census, Loads, Sizes
from outrider.v1 import common_pb2, registry_pb2
from outrider.wire.errors import OutriderError
from outrider.wire.settings.pools import Pool
from outrider.wire.settings.system import ScalingConfig, SystemConfig, read_yaml
from outrider.wire.telemetry.log import configure_logging, get_logger

log = get_logger(__name__)

APP = "outrider"
DIRECTORY = "directory"
LEASE_S = 5.0
"""Seconds of silence after which a worker is not to be used, as with the launcher."""


class Worker:
    """A replica: one worker, the same `start_worker` as everywhere."""

    def __init__(self, pool: Pool, placement: Placement) -> None:
        self._pool = pool
        self._name = f"{pool.name}-{serve.get_replica_context().replica_tag}"
        spec = actors.ActorSpec(
            self._name,
            pool.name,
            pool.role,
            {**pool.worker.model_dump(exclude_unset=True), "device": placement.device},
            placement,
        )
        node = actors._node_address()
        config = actors._config(pool.role, actors._settings_here(spec, node))
        try:
            self._handle = actors._start(config, None)
        except OutriderError as error:
            raise RuntimeError(f"{pool.setting}: {error.message}") from None
        self._facts = actors._facts(self._handle, node)
        self._state = SERVING
        self._is_told = threading.Event()
        threading.Thread(target=self._tell, name="tell", daemon=True).start()

    async def check_health(self) -> None:
        """Fail when the engine has ended or hangs; Serve ends the replica at the third time.

        The first call returns once gateways may know of it: whoever it replaces is drained then.
        """
        await asyncio.to_thread(self._is_told.wait, LEASE_S)
        if not self._handle.running:
            raise RuntimeError("its engine ended")
        trouble = trouble_of(Seen(self._name, self._facts.address, time.monotonic(), self._handle.info()))
        if trouble is not None:
            raise RuntimeError(trouble)

    async def __del__(self) -> None:
        """Serve calls it before it ends the replica, and waits: until no answer runs here."""
        self._state = DRAINING
        await asyncio.to_thread(self._handle.drain, DRAIN_LIMIT_S)
        with contextlib.suppress(Exception):  # it may have ended first
            async with asyncio.timeout(1.0):
                await serve.get_deployment_handle(DIRECTORY, APP).forget.remote(self._name)
        await asyncio.to_thread(self._handle.stop)

    def _tell(self) -> None:
        """Say every second where this worker is and how busy."""
        directory = serve.get_deployment_handle(DIRECTORY, APP)
        while True:
            member = registry_pb2.Member(
                name=self._name,
                pool=self._pool.name,
                role=ROLES[self._pool.role],
                state=self._state,
                address=self._facts.address,
                metrics_address=self._facts.metrics_address or "",
                node=self._facts.node,
            )
            try:
                info = self._handle.info().SerializeToString()
                directory.hear.remote(member.SerializeToString(), info).result(timeout_s=LEASE_S)
                self._is_told.set()
            except Exception as error:  # it restarts, or the controller does
                log.warning("%s cannot say where it is: %s", self._name, error)
            time.sleep(PERIOD_S)


class Directory:
    """The one replica that gateways join: the launcher's registry, fed by the workers themselves."""

    def __init__(self, pools: Sequence[Pool], scaling: ScalingConfig, address: str, *_workers: Any) -> None:
        """_workers: bound here so that Serve deploys them."""
        self._pools = {pool.name: pool for pool in pools}
        self._members: dict[str, tuple[float, registry_pb2.Member]] = {}
        self._loads = Loads()
        self._sizes = Sizes(self._pools, scaling, self._loads, self._census, lambda _: None, self._report)
        self._asked = dict(self._sizes.wanted)
        self._published = registry_pb2.Membership(epoch=time.time_ns())
        self._began_s = time.monotonic()
        self._registry = Registry(self._sizes.ask)
        self.address = self._registry.start(address, None)
        threading.Thread(target=self._follow, name="follow", daemon=True).start()

    async def hear(self, told: bytes, info: bytes) -> None:
        member = registry_pb2.Member.FromString(told)
        self._members[member.name] = (time.monotonic(), member)
        self._loads.add_info(member.name, common_pb2.WorkerInfo.FromString(info), time.monotonic())

    async def forget(self, name: str) -> None:
        self._members.pop(name, None)
        self._loads.forget(name)

    def _report(self, part: str, state: str, detail: str) -> None:
        log.info("%s: %s %s", part, state, detail)

    def _census(self, pool: Pool) -> Census:
        of_pool = [member for _, member in list(self._members.values()) if member.pool == pool.name]
        serving = [member.name for member in of_pool if member.state == SERVING]
        num_starting = max(0, self._sizes.wanted[pool.name] - len(serving))
        return Census(serving, num_starting, len(of_pool) - len(serving))

    def _follow(self) -> None:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        while True:
            now_s = time.monotonic()
            for name, (heard_s, _) in list(self._members.items()):
                if now_s - heard_s > LEASE_S:
                    self._members.pop(name, None)
                    self._loads.forget(name)
            self._sizes.set_by_hand()
            self._sizes.set_by_load(self._registry.reports(), now_s)
            for name, count in self._sizes.wanted.items():
                if self._asked[name] != count:
                    controller.update_deployment_replicas.remote(DeploymentID(name, APP), count)
                    self._asked[name] = count
            self._publish(now_s)
            time.sleep(0.1)

    def _publish(self, now_s: float) -> None:
        """Not before all have been heard, or might have been: gateways may know more than one that has just begun."""
        if not self._published.version and now_s - self._began_s < LEASE_S:
            found = [member.pool for _, member in list(self._members.values())]
            if any(found.count(name) < pool.count for name, pool in self._pools.items()):
                return
        now = registry_pb2.Membership(
            epoch=self._published.epoch,
            version=self._published.version,
            pools=[
                registry_pb2.Pool(
                    name=pool.name, role=ROLES[pool.role], model_name=pool.model_name or "", serves=pool.serves
                )
                for pool in self._pools.values()
            ],
            members=[member for _, member in sorted(self._members.values(), key=lambda each: each[1].name)],
        )
        if now != self._published:
            now.version += 1
            self._published = now
            self._registry.publish(now)


def application(config: SystemConfig, placements: dict[str, Placement], registry: str) -> serve.Application:
    """A deployment for each pool, and the directory on the machine that has the registry's address."""
    workers = []
    for pool in config.pools:
        placement = placements[pool.name]
        hidden = {"CUDA_VISIBLE_DEVICES": NO_GPU} if placement.visible_devices == NO_GPU else {}
        options = {
            "num_cpus": placement.num_cpus,
            "num_gpus": placement.num_gpus,
            "label_selector": dict(placement.labels),
            "runtime_env": {"env_vars": hidden},
        }
        deployment = serve.deployment(
            Worker,
            name=pool.name,
            num_replicas=pool.count,
            ray_actor_options=options,
            health_check_period_s=PERIOD_S,
            health_check_timeout_s=HUNG_AFTER_S / 3,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=DRAIN_LIMIT_S,
            max_constructor_retry_count=3,
        )
        workers.append(deployment.bind(pool, placement))
    node = ray.util.get_node_ip_address()
    directory = serve.deployment(
        Directory,
        name=DIRECTORY,
        ray_actor_options={"num_cpus": 0, "resources": {f"node:{node}": 0.001}},
        health_check_period_s=PERIOD_S,
        graceful_shutdown_wait_loop_s=0.1,
    )
    return directory.bind(config.pools, config.scaling, registry, *workers)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--config", "--address", "--registry"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args(argv)
    configure_logging("info", "serve")
    values = read_yaml(Path(arguments.config))
    config = SystemConfig.read(values)
    with Cluster(arguments.address) as cluster:
        placements = place(config, cluster.nodes(), cluster.local_cores())
        serve.start(proxy_location="Disabled")
        application_ = application(config, placements, arguments.registry)
        serve.run(application_, name=APP, route_prefix=None, external_scaler_enabled=True)
        sys.stdout.write(json.dumps({"event": "ready", "registry": arguments.registry}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()  # its end is ours, as with `outrider up`
        serve.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
