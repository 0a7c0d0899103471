"""Starts a whole system, watches it, and ends all of it. For `outrider up`, `demo`, `tune` and `outrider.LLM`.

Its child processes are the gateways and, without Ray, the workers. With Ray they are the gateways and the launcher,
which starts the workers. A gateway that ends is started again, and so is a launcher that can take over its workers. The
delay grows each time, and a process that keeps ending is not started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Protocol

import httpx

from outrider.cli.up.endpoints import Endpoints, Gateway, StartedWorker
from outrider.cli.up.machine_shares import own_cores, own_gpu_memory, with_grpc_port, with_own_ports
from outrider.cli.up.restarts import Restarts
from outrider.wire.errors import ConfigError, IncompatiblePair, Unavailable
from outrider.wire.models.model_id import local_path
from outrider.wire.processes.descendants import become_subreaper, end_descendants
from outrider.wire.processes.processes import POLL_S, Child, Event, OnLog
from outrider.wire.processes.stop_flag import StopFlag
from outrider.wire.settings.api_keys import read_keys
from outrider.wire.settings.config import GatewayConfig, read_chat_template
from outrider.wire.settings.gpu_shares import num_weight_bytes
from outrider.wire.settings.pools import Pool
from outrider.wire.settings.system import (
    FROM_POOLS,
    NODE_TIMEOUT_S,
    START_TIMEOUT_S,
    SystemConfig,
    flags,
    gateway_config,
)
from outrider.wire.telemetry.phases import phase_in
from outrider.wire.transport.address import check_free

_POLL_S = 0.1
"""Seconds between two requests to a starting gateway that ask whether it serves."""
_SERVED_TIMEOUT_S = 120.0
"""Maximum seconds until a gateway serves, counted from when its workers are ready."""
_GRACE_S = 5.0
"""Seconds, after its drain_timeout_s, that a gateway has to end running requests with a message to their clients."""
_HURRIED_GRACE_S = 1.0
"""Seconds that a gateway has for these messages after a second signal to stop."""
_WORKERS_GRACE_S = 30.0
"""Seconds, after the workers' drain_timeout_s, that the launcher has to stop its actors and Ray."""
_SHOWN_LINES = 20
"""Number of last lines of a part's log that are shown if the part fails."""
_LAUNCHER = "launcher"


class Reporter(Protocol):
    """Interface of an object that shows the progress of a system's start."""

    def progress(self, component: str, state: str, detail: str) -> None:
        """Show the state of a part of the system ("starting", "loading", "ready" or a phase in between) and a detail on
        it. Any thread may call it.
        """


class ProcessFailed(Unavailable):
    """A process of the system ended by itself, or did not become ready."""

    def __init__(self, message: str, log_lines: list[str]) -> None:
        super().__init__(message)
        self.log_lines = log_lines
        """Last lines of the log of the part that failed."""


class Supervisor:
    """Runs one system. Use it as `with`. Leaving the block ends all child processes of this process, also those that
    the Supervisor did not start, so use it only in a process without other children.
    """

    def __init__(
        self,
        config: SystemConfig,
        stop: StopFlag,
        on_log: OnLog | None = None,
        gateway_module: str = "gateway",
        *,
        api_key: str | None = None,
    ) -> None:
        """Prepare a system without starting it.

        stop: flag that is set to end the system. on_log: called with a part's name and each line of its log; None =
        not. gateway_module: name of the Python module that is run as a gateway. api_key: API key for reading the list
        of models; needed if the gateway requires keys.
        """
        self._gateway_module = gateway_module
        self._api_key = api_key
        self._config = config
        self._reporter: Reporter | None = None
        self._needs_drafts = True
        self._stop_flag = stop
        self._on_log = on_log
        self._children: dict[str, Child] = {}
        self._roles: dict[str, str] = {}
        self._restarts: dict[str, Restarts] = {}
        """Restarts of the parts that are started again when they end, by name of the part."""
        self._workers: list[StartedWorker] = []
        self._registry: str | None = None
        self._ray_folder: str | None = None

    def __enter__(self) -> Supervisor:
        become_subreaper()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, reporter: Reporter, *, needs_drafts: bool = True) -> Endpoints:
        """Start all parts of the system. Return their addresses once a request would be served.

        needs_drafts: whether the start fails if a draft cannot start or the gateway does not use the draft. False = the
        system then runs without that draft. Raises OutriderError if a part fails, and StopRequested after a stop.
        """
        self._reporter = reporter
        self._needs_drafts = needs_drafts
        if not self._config.gateways:
            raise ConfigError("gateways is 0: nobody would be served; for the workers alone: python -m deploy.launcher")
        self._config = with_grpc_port(self._config)
        for index in range(self._config.gateways):
            wanted = self._gateway_config(index, target="127.0.0.1:0")
            check_free(wanted.host, wanted.port, "--port")
            check_free(wanted.host, wanted.grpc_port, "--grpc-port")
            check_free(wanted.host, wanted.metrics_port or 0, "--metrics-port")
            if wanted.api_keys is not None:
                read_keys(wanted.api_keys)  # a fault in the file ends the start before the models load
            read_chat_template(wanted)
        self._find_models()
        if self._config.ray is None:
            self._start_plain()
        else:
            self._start_ray()
        gateways = [self._start_gateway(index) for index in range(self._config.gateways)]
        if needs_drafts:
            _check_drafts_used(gateways)
        self._reporter = None
        return Endpoints(gateways, self._workers, self._registry, self._chats(gateways[0].url))

    def _find_models(self) -> None:
        """Raise ConfigError if the path of a model does not exist, and report the models that will be fetched from a
        hub.

        Models on the machines of an existing Ray cluster are not checked. The check comes first because a hub may take
        a minute to refuse a request.
        """
        if self._config.ray is not None and self._config.ray.address is not None:
            return
        for pool in self._config.pools:
            if not pool.has_model or (pool.role == "draft" and not self._needs_drafts):
                continue
            model = pool.worker.model
            try:
                is_hub_id = local_path(model) is None
            except ConfigError as error:
                raise ConfigError(f"{pool.setting}: {error.message}", param=error.param) from None
            if is_hub_id and num_weight_bytes(model) is None:
                self._progress(pool.setting, "fetching", f"{model}: there is no such folder here, so a hub is asked")

    def watch(self) -> None:
        """Block until a stop is requested. Meanwhile start each part of the system again that ends by itself.

        Raises ProcessFailed if a needed part has ended and is not started again.
        """
        while not self._stop_flag.wait(self._until_next_look_s()):
            for name, child in list(self._children.items()):
                has_ended = child.has_ended()
                while not child.events.empty():
                    self._show(name, child.events.get())
                if has_ended:
                    self._handle_end(name, child)
            for restarts in self._restarts.values():
                restarts.start_if_due(time.monotonic())

    def _until_next_look_s(self) -> float:
        until_s = POLL_S
        now_s = time.monotonic()
        for restarts in self._restarts.values():
            if restarts.due_at_s is not None:
                until_s = min(until_s, restarts.due_at_s - now_s)
        return until_s

    def stop(self) -> None:
        """End the gateways, then the workers, then any other descendants of this process. Idempotent."""
        gateways = list[Child]()
        others = list[Child]()
        for name, child in self._children.items():
            if name.startswith("gateway"):
                gateways.append(child)
            else:
                others.append(child)
        for child in gateways:  # all drain at the same time
            child.request_stop()
        for child in gateways:
            child.stop(self.drain_timeout_s + _GRACE_S, self._is_hurried, _HURRIED_GRACE_S)
        drain_timeout_s = max((pool.worker.drain_timeout_s for pool in self._config.pools), default=0.0)
        workers_grace_s = _WORKERS_GRACE_S + drain_timeout_s
        for child in others:
            hurried_grace_s = 0.0
            if child.name == _LAUNCHER and self._joins_cluster:
                hurried_grace_s = workers_grace_s  # actors on another's cluster end only when the launcher kills them
            child.stop(workers_grace_s, self._is_hurried, hurried_grace_s)
        end_descendants(grace_s=0.5)
        for child in self._children.values():
            child.close()
        self._children.clear()
        if self._ray_folder is not None:  # a launcher that was killed could not remove it
            shutil.rmtree(self._ray_folder, ignore_errors=True)

    @property
    def drain_timeout_s(self) -> float:
        """Seconds for which running requests may continue after a stop was requested."""
        return gateway_config(self._config.gateway, target="127.0.0.1:0").drain_timeout_s

    def _is_hurried(self) -> bool:
        return self._stop_flag.is_hurried

    @property
    def _joins_cluster(self) -> bool:
        """Whether the workers run on a Ray cluster that existed before this system was started."""
        return self._config.ray is not None and self._config.ray.address is not None

    def _handle_end(self, name: str, child: Child) -> None:
        """Start a part that has ended again, or continue without it. Raises ProcessFailed if neither is possible."""
        failed = _ended(child)
        restarts = self._restarts.get(name)
        if restarts is not None and restarts.ended(time.monotonic()):
            consequence = "; it is started again"
        else:
            consequence = self._describe_loss(name, failed)
        del self._children[name]
        self._warn(name, failed.message + consequence)
        child.close()

    def _describe_loss(self, name: str, failed: ProcessFailed) -> str:
        """Return what the end of a part means for the system, as text for the log. Raises ProcessFailed if the part is
        needed.
        """
        restarts = self._restarts.pop(name, None)
        consequence = ""
        if restarts is not None:
            consequence = f"; given up, for it ended {restarts.num_short} times soon after its start"
        if not self._can_do_without(name):
            raise ProcessFailed(failed.message + consequence, failed.log_lines)
        if self._running_workers("draft") == [name]:
            return "; plain decoding from now on"
        return consequence

    def _can_do_without(self, name: str) -> bool:
        role = self._roles.get(name)
        if name == _LAUNCHER:
            return False
        if role is None:  # a gateway: another one runs, or is started again
            return bool(self._restarts.keys() - {_LAUNCHER})
        return role == "draft" or self._running_workers(role) != [name]

    def _running_workers(self, role: str) -> list[str]:
        names = list[str]()
        for name, own_role in self._roles.items():
            if own_role == role and name in self._children:
                names.append(name)
        return names

    def _start_ray(self) -> None:
        child = self._spawn_launcher(self._config)
        config = self._config.ray
        assert config is not None
        ready = self._await_ready(child, START_TIMEOUT_S + NODE_TIMEOUT_S + 60)
        for member in ready["members"]:
            self._workers.append(
                StartedWorker(member["name"], member["role"], member["address"], member["metrics"], member["memory"])
            )
        self._registry = str(ready["registry"])
        if not config.workers_outlive_launcher:
            return
        host = (config.registry or self._registry).rpartition(":")[0]
        # the next launcher listens where the gateways expect the registry
        ray = config.model_copy(update={"registry": f"{host}:{_port(self._registry)}"})
        self._keep(_LAUNCHER, lambda: self._spawn_launcher(replace(self._config, ray=ray)))

    def _spawn_launcher(self, config: SystemConfig) -> Child:
        args = ["-m", "deploy.launcher", "--config", "-"]
        if self._needs_drafts:
            args.append("--needs-drafts")
        return self._spawn(_LAUNCHER, args, stdin=config.to_json() + "\n")

    def _keep(self, name: str, start: Callable[[], object]) -> None:
        self._restarts[name] = Restarts(start)
        self._restarts[name].ready(time.monotonic())

    def _start_plain(self) -> None:
        pools = dict[str, Pool]()
        for pool in self._config.pools:
            for index in range(pool.count):
                pools[pool.member(index)] = pool
        utilization = own_gpu_memory(self._config.pools, self._config.gpu_memory_utilization)
        for name, cores in own_cores(pools).items():
            pool = pools[name]
            own: dict[str, object] = {}
            detail = pool.drafter_or_model
            if cores is not None:
                own["cpu_cores"] = cores
                detail = f"{detail} on cores {cores}"
            if pool.name in utilization:
                own["gpu_memory_utilization"] = utilization[pool.name]
            worker = pool.worker.model_copy(update=own)
            self._roles[name] = pool.role
            self._progress(name, "loading", detail)
            self._spawn(name, ["-m", f"{pool.role}_service", *flags(worker)])
        for name, pool in pools.items():
            if name in self._children:  # a draft may have ended meanwhile
                self._await_worker(name, pool)

    def _await_worker(self, name: str, pool: Pool) -> None:
        try:
            ready = self._await_ready(self._children[name], START_TIMEOUT_S)
        except ProcessFailed:
            if name in self._children:
                raise
            return  # a draft that is not needed; `_check_running` has warned of its end
        self._workers.append(
            StartedWorker(name, pool.role, ready["address"], ready["metrics_address"], ready["memory"])
        )
        self._progress(name, "ready", ready["address"])

    def _where(self) -> dict[str, str | None]:
        """Return the gateway's settings that contain addresses: either the registry's, or those of the
        running workers.
        """
        if self._registry is not None:
            return {"registry": self._registry}
        addresses = {worker.name: worker.address for worker in self._workers if worker.name in self._children}
        # {"target": "127.0.0.1:7001", "draft": "draft=127.0.0.1:7002,127.0.0.1:7003;other=127.0.0.1:7004"}
        pools: dict[str, list[str]] = {"target": [], "draft": []}
        for pool in self._config.pools:
            own = list(filter(None, map(addresses.get, map(pool.member, range(pool.count)))))
            if own:
                prefix = ""
                if pool.role == "draft":
                    prefix = f"{pool.name}="  # the pool's label in metrics
                pools[pool.role].append(prefix + ",".join(own))
        return {
            "target": ";".join(pools["target"]) or None,
            "draft": ";".join(pools["draft"]) or None,
            "model_name": self._config.target_pools[0].model_name,
        }

    def _gateway_config(self, index: int, **workers: str | None) -> GatewayConfig:
        return with_own_ports(gateway_config(self._config.gateway, **workers), index, self._config.gateways)

    def _start_gateway(self, index: int) -> Gateway:
        where = self._where()
        config = self._gateway_config(index, **where)
        name = "gateway"
        if self._config.gateways > 1:
            name = f"gateway-{index}"
        self._progress(name, "starting", f"for {where.get('registry') or where['target']}")
        ready = self._await_ready(self._spawn_gateway(name, config), _SERVED_TIMEOUT_S)
        scheme = "http"
        if config.public_tls_dir is not None:
            scheme = "https"
        url = metrics_url = f"{scheme}://{ready['http']}"
        # Started again, it has the same ports: its users know them.
        ports = {"port": _port(ready["http"]), "grpc_port": _port(ready["grpc"])}
        if config.metrics_port is not None:
            ports["metrics_port"] = _port(ready["metrics"])
            metrics_url = f"http://{ready['metrics']}"
        gateway = Gateway(str(ready["http"]), str(ready["grpc"]), url, metrics_url, self._await_served(url))
        self._progress(name, "ready", gateway.http)
        self._keep(name, lambda: self._spawn_gateway(name, config.model_copy(update={**self._where(), **ports})))
        return gateway

    def _spawn_gateway(self, name: str, config: GatewayConfig) -> Child:
        return self._spawn(name, ["-m", self._gateway_module, *flags(config)], without=FROM_POOLS)

    def _progress(self, component: str, state: str, detail: str) -> None:
        if self._reporter is not None:
            self._reporter.progress(component, state, detail)

    def _spawn(self, name: str, args: list[str], stdin: str | None = None, without: Collection[str] = ()) -> Child:
        """Start a part as a child process. without: names of the gateway's settings that it must not read from the
        environment.
        """
        hidden = {f"OUTRIDER_GATEWAY_{setting}".upper() for setting in without}
        env = {key: value for key, value in os.environ.items() if key not in hidden}
        args = [sys.executable, *args]
        child = Child(name, args, stdin=stdin, on_log=self._log, notify=self._stop_flag.notify, env=env)
        self._children[name] = child
        return child

    def _await_ready(self, child: Child, timeout_s: float) -> Event:
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            self._stop_flag.check()
            if child.events.empty():
                self._check_running()
                if child.name not in self._children:
                    raise _ended(child)
                self._stop_flag.wait(POLL_S)
                continue
            event = child.events.get()
            if event["event"] == "ready":
                return event
            if event["event"] == "progress":
                self._ray_folder = event.get("folder") or self._ray_folder
                self._progress(event["part"], event["state"], event["detail"])
        raise ProcessFailed(f"{child.name} is not ready after {timeout_s:g} s", child.last_lines(_SHOWN_LINES))

    def _await_served(self, url: str) -> Sequence[str]:
        """Wait until a gateway serves, which is when `/readyz` replies with 200. Return the workers that it does not
        use.
        """
        give_up = time.monotonic() + _SERVED_TIMEOUT_S
        reason = "it does not answer"
        while time.monotonic() < give_up:
            self._stop_flag.check()
            self._check_running()
            try:
                # verify: it is a child of this process, and its certificate may be of another name.
                reply = httpx.get(f"{url}/readyz", timeout=5.0, trust_env=False, verify=False)
                if reply.status_code == httpx.codes.OK:
                    refused: list[str] = reply.json()["refused"]
                    return refused
                reason = reply.text.strip()
            except httpx.TransportError:
                pass
            self._stop_flag.wait(_POLL_S)
        raise Unavailable(f"the gateway serves no request after {_SERVED_TIMEOUT_S:g} s: {reason}")

    def _chats(self, url: str) -> bool:
        """Return whether the first model's chat template marks the roles of messages. False also if it cannot
        be read.
        """
        headers = {}
        if self._api_key is not None:
            headers["authorization"] = f"Bearer {self._api_key}"
        try:
            reply = httpx.get(f"{url}/v1/models", headers=headers, timeout=5.0, trust_env=False, verify=False)
            return bool(reply.json()["data"][0]["chat_template"] == "turns")
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return False

    def _show(self, name: str, event: Event) -> None:
        """Log an event of a running part: one on the launcher's workers, or that the part is ready again."""
        if event["event"] == "ready" and name in self._restarts:
            self._restarts[name].ready(time.monotonic())
            self._warn(name, "it serves again")
        if event["event"] == "progress" and self._on_log is not None:
            self._on_log(event["part"], f"{event['state']} {event['detail']}")

    def _log(self, name: str, line: str) -> None:
        """Pass a line of a part's log to `on_log`. During the start, a line with a worker's phase goes to the reporter
        instead. Called on reader threads.
        """
        if self._reporter is not None:
            phase = phase_in(name, line)
            if phase is not None:
                self._progress(*phase, "")
                return
        if self._on_log is not None:
            self._on_log(name, line)

    def _warn(self, name: str, text: str) -> None:
        if self._on_log is not None:
            self._on_log(name, f" WARNING {text}")

    def _check_running(self) -> None:
        """Raise ProcessFailed if a part has ended, unless it is a draft that is not needed."""
        for name, child in list(self._children.items()):
            if not child.has_ended() or not child.events.empty():
                continue
            if self._needs_drafts or self._roles.get(name) != "draft":
                raise _ended(child)
            self._handle_end(name, child)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _check_drafts_used(gateways: Sequence[Gateway]) -> None:
    for gateway in gateways:
        for reason in gateway.refused:
            if reason.startswith("draft "):
                raise IncompatiblePair(f"the {reason}")


def _reason(process: str, last_line: str) -> str | None:
    """Return the reason for a part's end, given the last line of its log (text or JSON). None = the line has
    no reason.
    """
    # "target: out of memory", or {"level": "critical", "message": "out of memory"}
    if last_line.startswith(f"{process}: "):
        return last_line
    with contextlib.suppress(json.JSONDecodeError, TypeError, KeyError):
        record = json.loads(last_line)
        if record["level"] == "critical":
            return f"{process}: {record['message']}"
    return None


def _ended(child: Child) -> ProcessFailed:
    """Return the error for a part that has ended. Its message is the reason that the part logged if it could not start,
    otherwise the last lines of its log.
    """
    lines = child.last_lines(_SHOWN_LINES)
    if child.returncode == 1 and lines:
        reason = _reason(child.name.partition("-")[0], lines[-1])
        if reason is not None:
            return ProcessFailed(reason, [])
    code = child.returncode or 0
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was ended by signal {-code}"
    return ProcessFailed(f"{child.name} {how}", lines)
