"""Start Ray on this machine and end it with this process, or join a running cluster and leave it as it was. For
`launcher.py`.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from deploy.placement import ClusterNode
from deploy.ray_workers import NAMESPACE, STOP_GRACE_S
from outrider.wire.errors import ConfigError
from outrider.wire.processes.descendants import become_subreaper, end_descendants
from outrider.wire.processes.folders import RAY_SOCKET, parent_for_sockets
from outrider.wire.processes.stop_flag import StopRequested
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

_LOCAL_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what makes Ray listen on 127.0.0.1 alone, here too
    "RAY_prestart_worker_first_driver": "0",  # else an idle process per core
    "RAY_COLOR_PREFIX": "0",  # the launcher's log may be a file
    "RAY_worker_niceness": "0",  # Ray's 15 is for batch jobs: other processes here would come before requests
}
"""Environment variables of a Ray that this process starts."""


class Cluster:
    """A Ray cluster, used as a context manager. When its block is left, every process that Ray started for this process
    has ended, Ray's agents included.
    """

    def __init__(self, address: str | None) -> None:
        """Prepare to join the running cluster at `address`; None = start Ray on this machine."""
        self._address = address
        self._folder: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this process starts the cluster's Ray itself; False = it joins a running cluster."""
        return self._address is None

    def __enter__(self) -> Cluster:
        if self.is_ours:
            become_subreaper()  # Ray's agents outlive their parents for a while; they must not outlive us
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    @property
    def address(self) -> str:
        """Address host:port at which other machines may join the cluster while it runs."""
        return str(_ray().get_runtime_context().gcs_address)

    @property
    def folder(self) -> str | None:
        """Folder of the Ray session that this process started, with logs and sockets; None for a cluster that it
        joined.
        """
        return self._folder

    def nodes(self) -> list[ClusterNode]:
        """Return the total resources of each running machine, whether they are in use or not."""
        return [_node(node["Resources"], node["Labels"]) for node in _alive_nodes()]

    def free(self) -> list[ClusterNode]:
        """Return the free resources of each running machine."""
        from ray._private.state import available_resources_per_node

        free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
        return [_node(free.get(node["NodeID"], {}), node["Labels"]) for node in _alive_nodes()]

    def local_cores(self) -> frozenset[int] | None:
        """Return the CPU cores of this machine if the cluster has no other machine; None if others may run workers."""
        nodes = _alive_nodes()
        if len(nodes) != 1 or nodes[0]["NodeID"] != _ray().get_runtime_context().get_node_id():
            return None
        return frozenset(os.sched_getaffinity(0))

    def _start(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        local: dict[str, Any] = {}
        if self._address not in (None, "auto"):
            check_reachable(str(self._address))
        if self.is_ours:
            os.environ.update({**_LOCAL_ENVIRONMENT, **own_authentication(os.environ)})
            self._folder = tempfile.mkdtemp(prefix="outrider-", dir=parent_for_sockets(RAY_SOCKET))
            local = {
                "num_cpus": len(os.sched_getaffinity(0)),
                "include_dashboard": False,
                "object_store_memory": 100 << 20,  # near Ray's least: nothing but start-up facts goes through it
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": str(Path(self._folder, "ray")),  # Ray opens its folders to everybody; ours is closed
            }
        try:
            self._init(local)
        except Exception as error:
            where = f"at {self._address!r}"
            if self.is_ours:
                where = "on this machine"
            raise ConfigError(f"no Ray {where}: {_reason(error)}; start one, or use --no-ray") from error
        except SystemExit:  # Ray's own answer to SIGTERM while it starts
            raise StopRequested from None

    def _init(self, local: Mapping[str, Any]) -> None:
        """Join a cluster, or start a Ray of our own: a second time if it was not up in time, as on a busy machine."""
        # Ray's workers import from the driver's current folder first, whatever PYTHONSAFEPATH is; not for a client.
        job_config = _ray().job_config.JobConfig(_client_job=sys.flags.safe_path)
        options = {**local, "job_config": job_config}
        try:
            _ray().init(address=self._address or "local", namespace=NAMESPACE, **options)
        except Exception as error:  # Ray raises no class of its own for it
            if not self.is_ours or "timed out during startup" not in str(error):
                raise
            log.warning("Ray was not up within the 30 s that it waits for itself; it is started once more")
            self._end_ray()
            _ray().init(address="local", namespace=NAMESPACE, **options)

    def _end_ray(self) -> None:
        _ray().shutdown()
        if self.is_ours:
            ended = end_descendants(STOP_GRACE_S)
            if ended:
                log.debug("ended what Ray left behind: %s", ended)

    def _end(self) -> None:
        self._end_ray()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def own_authentication(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that turn on token authentication for a Ray that this process starts.

    environment: this process's variables. If they hold no token, a new one is made. If they set RAY_AUTH_MODE, the
    result is empty.
    """
    if environment.get("RAY_AUTH_MODE"):
        return {}
    if environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH"):
        return {"RAY_AUTH_MODE": "token"}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def check_reachable(address: str) -> None:
    """Raise ConfigError unless a server listens at `address`. Call it before Ray connects, since Ray itself would try
    for minutes and cannot be interrupted.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise ConfigError(
            f"ray.address is {address!r}, must be auto or host:port of a cluster's head, such as head:6379"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"no Ray at {address!r}: {error}; start a cluster, or leave ray.address out") from None


def _reason(error: Exception) -> str:
    if isinstance(error.__cause__, _ray().exceptions.AuthenticationError):  # its own text is a page
        return f"{error}: its token is not RAY_AUTH_TOKEN, or that of RAY_AUTH_TOKEN_PATH, with RAY_AUTH_MODE=token"
    return str(error)


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in _ray().nodes() if node["Alive"]]


def _node(resources: dict[str, float], labels: dict[str, str]) -> ClusterNode:
    return ClusterNode(resources.get("CPU", 0.0), resources.get("GPU", 0.0), labels)


def _ray() -> Any:
    """Return the module ray. It is imported late, since it reads the environment, and untyped, as its functions are."""
    import ray

    return ray
