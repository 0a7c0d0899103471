"""Starts a whole system, watches it, and ends all of it. Used by `outrider up` and `outrider demo`.

Its child processes are the launcher and the gateways with Ray, whose children the workers then are, else the workers
and the gateways. A gateway that ends is started again, as is a launcher that finds its workers again: later
each time, and no more once it keeps ending.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

import httpx

from outrider.wire.errors import ConfigError, IncompatiblePair, Unavailable
from outrider.wire.models.model_id import local_path
from outrider.wire.processes.processes import LOOK_S, Child, Event, OnLog, StopFlag, become_subreaper, end_descendants
from outrider.wire.settings.api_keys import read_keys
from outrider.wire.settings.config import GatewayConfig, read_chat_template
from outrider.wire.settings.gpu_shares import num_weight_bytes, utilizations
from outrider.wire.settings.pools import Pool, format_cores, share_cores
from outrider.wire.settings.system import (
    FROM_POOLS,
    NODE_TIMEOUT_S,
    START_TIMEOUT_S,
    SystemConfig,
    flags,
    gateway_config,
)
from outrider.wire.telemetry.phases import phase_in
from outrider.wire.transport.address import check_free, next_free

STEADY_S = 30.0
"""Seconds of being ready after which an end counts as an accident; a part that ends sooner may end so every time."""
DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each start, by how many short lives in a row there were."""


@dataclass(slots=True)
class Restarts:
    """When one part is started again. Times are those of one clock, in seconds."""

    start: Callable[[], object]
    """Starts the part and returns at once; the part says by itself when it is ready."""
    num_short: int = 0
    """Short lives in a row."""
    due_at_s: float | None = None
    """When the part is to be started; None while it runs, and once it is given up."""
    _ready_at_s: float | None = None

    def ready(self, now_s: float) -> None:
        self._ready_at_s = now_s

    def ended(self, now_s: float) -> bool:
        """Note that the part ended. Return whether it is to be started again."""
        was_steady = self._ready_at_s is not None and now_s - self._ready_at_s >= STEADY_S
        self.num_short = 1 if was_steady else self.num_short + 1
        self._ready_at_s = None
        if self.num_short > len(DELAYS_S):
            return False
        self.due_at_s = now_s + DELAYS_S[self.num_short - 1]
        return True

    def start_if_due(self, now_s: float) -> None:
        if self.due_at_s is not None and now_s >= self.due_at_s:
            self.due_at_s = None
            self.start()


_POLL_S = 0.1
"""Seconds between two questions to a gateway that is starting."""
_SERVED_TIMEOUT_S = 120.0
"""Seconds until a gateway whose workers are there must serve."""
_GRACE_S = 5.0
"""Seconds beyond its drain_timeout_s in which a gateway tells the clients of running answers that they end."""
_HURRIED_GRACE_S = 1.0
"""Seconds that a gateway has for it after a second signal. Doubling it makes a second signal take twice as long where
clients do not listen."""
_WORKERS_GRACE_S = 30.0
"""Seconds for the launcher to stop its actors and Ray, beyond the time of what still runs there."""
GPU_DEVICE = Path("/dev/nvidiactl")
"""Where a driver is loaded."""
_SHOWN_LINES = 20
_LAUNCHER = "launcher"


class Reporter(Protocol):
    """Shows how the start goes on."""

    def progress(self, part: str, state: str, detail: str) -> None:
        """Show that a part is "starting", "loading" or "ready" (`state`), or what it does meanwhile. Thread-safe."""


@dataclass(frozen=True, slots=True)
class StartedWorker:
    """A worker that was there at the start; with Ray there may be others later."""

    name: str
    role: str
    address: str
    """host:port of its gRPC server."""
    metrics: str | None
    """host:port of its Prometheus endpoint."""
    memory: str
    """What it takes of its machine, for people."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where a gateway listens, as "host:port"."""

    http: str
    grpc: str
    url: str
    """URL of its HTTP server."""
    metrics_url: str
    refused: Sequence[str] = ()
    """Workers that it does not use, and why."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a running system listens."""

    gateways: list[Gateway]
    workers: list[StartedWorker]
    registry: str | None
    """host:port of the launcher's registry; None without Ray."""
    chats: bool = False
    """Whether the model is known to be made for chats."""

    @property
    def http(self) -> str:
        """Return the first gateway's HTTP address."""
        return self.gateways[0].http

    @property
    def grpc(self) -> str:
        return self.gateways[0].grpc

    def first(self, role: str) -> StartedWorker:
        """Return the first worker of a role, in a pair the only one. Raises LookupError when there is none."""
        for worker in self.workers:
            if worker.role == role:
                return worker
        raise LookupError(f"no {role} was started")


class PartFailed(Unavailable):
    """A process of the system ended by itself, or was never ready."""

    def __init__(self, message: str, log_lines: list[str]) -> None:
        super().__init__(message)
        self.log_lines = log_lines
        """The end of the part's log."""


class Supervisor:
    """Runs one system. Use as `with`, in a process that does nothing else: leaving the block ends all its children."""

    def __init__(
        self,
        config: SystemConfig,
        stop: StopFlag,
        on_log: OnLog | None = None,
        gateway_module: str = "gateway",
        *,
        api_key: str | None = None,
    ) -> None:
        """api_key: to look at the models with, where a key is asked for."""
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
        """By name: the parts that are started again when they end."""
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
        """Start all parts; return once a request would be served. Raises OutriderError, or StopRequested.

        needs_drafts: a draft that cannot start or is not used fails the start, with the reason: somebody named it.
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
                read_keys(wanted.api_keys)  # what is wrong with it is said before the models load
            read_chat_template(wanted)
        self._find_models()
        if self._config.ray is None:
            self._start_plain()
        else:
            self._start_ray()
        gateways = [self._start_gateway(index) for index in range(self._config.gateways)]
        refused = [reason for gateway in gateways for reason in gateway.refused if reason.startswith("draft ")]
        if needs_drafts and refused:
            raise IncompatiblePair(f"the {refused[0]}")
        self._reporter = None
        return Endpoints(gateways, self._workers, self._registry, self._chats(gateways[0].url))

    def _find_models(self) -> None:
        """Look for the models of workers on this machine; one that is no folder is said to be asked of the hub, which
        may take a minute to say no. Raises ConfigError for a path that leads nowhere.
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
        """Block until a stop is requested. Raises PartFailed when a part that is needed has ended for good."""
        while not self._stop_flag.wait(self._until_next_look_s()):
            for name, child in list(self._children.items()):
                has_ended = child.has_ended()
                while not child.events.empty():
                    self._show(name, child.events.get())
                if has_ended:
                    self._go_on_without(name, child)
            for restarts in self._restarts.values():
                restarts.start_if_due(time.monotonic())

    def _until_next_look_s(self) -> float:
        """Return the seconds until a part is to be started, or its end to be noticed that nobody notified us of."""
        due_at_s = [restarts.due_at_s for restarts in self._restarts.values() if restarts.due_at_s is not None]
        return min(LOOK_S, min(due_at_s, default=math.inf) - time.monotonic())

    def stop(self) -> None:
        """End the gateways, then the workers, then whatever they left behind. Idempotent."""
        is_gateway = {name: name.startswith("gateway") for name in self._children}
        for name, child in self._children.items():  # they let running answers end side by side
            if is_gateway[name]:
                child.ask_to_stop()
        for name in sorted(self._children, key=lambda name: not is_gateway[name]):
            grace_s = self.drain_timeout_s + _GRACE_S if is_gateway[name] else self._workers_grace_s()
            # Actors on a cluster that is not ours end only when the launcher kills them.
            joined = name == _LAUNCHER and self._config.ray is not None and self._config.ray.address is not None
            hurried_grace_s = _HURRIED_GRACE_S if is_gateway[name] else grace_s if joined else 0.0
            self._children[name].stop(grace_s, lambda: self._stop_flag.hurry, hurried_grace_s)
        end_descendants(grace_s=0.5)
        for child in self._children.values():
            child.close()
        self._children.clear()
        if self._ray_folder is not None:  # a launcher that was killed could not remove it
            shutil.rmtree(self._ray_folder, ignore_errors=True)

    @property
    def drain_timeout_s(self) -> float:
        """Return the seconds that running answers have to end."""
        return gateway_config(self._config.gateway, target="127.0.0.1:0").drain_timeout_s

    def _workers_grace_s(self) -> float:
        return _WORKERS_GRACE_S + max(pool.worker.drain_timeout_s for pool in self._config.pools)

    def _go_on_without(self, name: str, child: Child) -> None:
        """Go on without a part until it runs again, if it is started again. Raises PartFailed when that cannot be."""
        failed = _ended(child)
        restarts = self._restarts.get(name)
        if restarts is not None and restarts.ended(time.monotonic()):
            left = "; it is started again"
        else:
            left = self._give_up(name, failed)
        del self._children[name]
        self._warn(name, failed.message + left)
        child.close()

    def _give_up(self, name: str, failed: PartFailed) -> str:
        """Say what is left without a part. Raises PartFailed when that is nothing."""
        restarts = self._restarts.pop(name, None)
        left = "" if restarts is None else f"; given up, for it ended {restarts.num_short} times soon after its start"
        if not self._can_do_without(name):
            raise PartFailed(failed.message + left, failed.log_lines)
        return "; plain decoding from now on" if self._drafts() == [name] else left

    def _can_do_without(self, name: str) -> bool:
        """A gateway or a worker that is not the last one; a draft in any case."""
        if name not in self._roles:
            return name != _LAUNCHER and bool(self._restarts.keys() - {_LAUNCHER})
        others = [other for other, role in self._roles.items() if role == self._roles[name] and other != name]
        return self._roles[name] == "draft" or any(other in self._children for other in others)

    def _drafts(self) -> list[str]:
        return [name for name, role in self._roles.items() if role == "draft" and name in self._children]

    def _start_ray(self) -> None:
        child = self._spawn_launcher(self._config)
        config = self._config.ray
        assert config is not None
        ready = self._await_ready(child, START_TIMEOUT_S + NODE_TIMEOUT_S + 60)
        self._workers = [
            StartedWorker(one["name"], one["role"], one["address"], one["metrics"], one["memory"])
            for one in ready["members"]
        ]
        self._registry = str(ready["registry"])
        if not config.workers_outlive_launcher:
            return
        host = (config.registry or self._registry).rpartition(":")[0]
        there = config.model_copy(update={"registry": f"{host}:{_port(self._registry)}"})  # where gateways look for it
        self._keep(_LAUNCHER, lambda: self._spawn_launcher(replace(self._config, ray=there)))

    def _spawn_launcher(self, config: SystemConfig) -> Child:
        args = ["-m", "deploy.launcher", "--config", "-"]
        if self._needs_drafts:
            args.append("--needs-drafts")
        return self._spawn(_LAUNCHER, args, stdin=config.to_json() + "\n")

    def _keep(self, name: str, start: Callable[[], object]) -> None:
        """Start the part again from now on when it ends."""
        self._restarts[name] = Restarts(start)
        self._restarts[name].ready(time.monotonic())

    def _start_plain(self) -> None:
        pools = {pool.member(index): pool for pool in self._config.pools for index in range(pool.count)}
        utilization = own_gpu_memory(self._config.pools, self._config.gpu_memory_utilization)
        for name, cores in own_cores(pools).items():
            pool = pools[name]
            own = {"cpu_cores": cores, "gpu_memory_utilization": utilization.get(pool.name)}
            given = {setting: value for setting, value in own.items() if value is not None}
            worker = pool.worker.model_copy(update=given)
            self._roles[name] = pool.role
            self._progress(name, "loading", f"{pool.works_with} {_on_cores(cores)}".rstrip())
            self._spawn(name, ["-m", f"{pool.role}_service", *flags(worker)])
        for name, pool in pools.items():
            if name in self._children:  # a draft may have ended meanwhile
                self._await_worker(name, pool)

    def _await_worker(self, name: str, pool: Pool) -> None:
        try:
            ready = self._await_ready(self._children[name], START_TIMEOUT_S)
        except PartFailed:
            if name in self._children:
                raise
            return  # a draft that is not needed, of which `_check_running` has warned
        self._workers.append(
            StartedWorker(name, pool.role, ready["address"], ready["metrics_address"], ready["memory"])
        )
        self._progress(name, "ready", ready["address"])

    def _where(self) -> dict[str, str | None]:
        """Return the gateway's settings of where the workers are: without a registry, those that run."""
        if self._registry is not None:
            return {"registry": self._registry}
        running = {one.name: one.address for one in self._workers if one.name in self._children}
        pools: dict[str, list[str]] = {"target": [], "draft": []}
        for pool in self._config.pools:
            found = [running[name] for name in map(pool.member, range(pool.count)) if name in running]
            named = f"{pool.name}=" if pool.role == "draft" else ""  # as the pool is called in the series
            pools[pool.role] += [named + ",".join(found)] if found else []
        lists = {role: ";".join(found) or None for role, found in pools.items()}
        return {**lists, "model_name": self._config.targets[0].model_name}

    def _gateway_config(self, index: int, **workers: str | None) -> GatewayConfig:
        """Return each gateway's own ports: counted up from the first one's, but for 0."""
        config = gateway_config(self._config.gateway, **workers)
        ports = {"port": config.port, "grpc_port": config.grpc_port}
        if config.metrics_port is not None:
            ports["metrics_port"] = config.metrics_port
        step = _step([port for port in ports.values() if port], self._config.gateways)
        own = {name: port and port + index * step for name, port in ports.items()}
        for name, port in own.items():
            if port > 65535:
                raise ConfigError(f"gateway.{name} is {ports[name]}: gateway {index} would have {port}; choose another")
        return config if index == 0 else config.model_copy(update=own)

    def _start_gateway(self, index: int) -> Gateway:
        where = self._where()
        config = self._gateway_config(index, **where)
        name = "gateway" if self._config.gateways == 1 else f"gateway-{index}"
        self._progress(name, "starting", f"for {where.get('registry') or where['target']}")
        ready = self._await_ready(self._spawn_gateway(name, config), _SERVED_TIMEOUT_S)
        scheme = "http" if config.public_tls_dir is None else "https"
        url = f"{scheme}://{ready['http']}"
        metrics_url = url if config.metrics_port is None else f"http://{ready['metrics']}"
        gateway = Gateway(str(ready["http"]), str(ready["grpc"]), url, metrics_url, self._await_served(url))
        self._progress(name, "ready", gateway.http)
        ports = {"port": _port(gateway.http), "grpc_port": _port(gateway.grpc)}  # where its users look for it
        if config.metrics_port is not None:
            ports["metrics_port"] = _port(str(ready["metrics"]))
        self._keep(name, lambda: self._spawn_gateway(name, config.model_copy(update={**self._where(), **ports})))
        return gateway

    def _spawn_gateway(self, name: str, config: GatewayConfig) -> Child:
        return self._spawn(name, ["-m", self._gateway_module, *flags(config)], without=FROM_POOLS)

    def _progress(self, part: str, state: str, detail: str) -> None:
        if self._reporter is not None:
            self._reporter.progress(part, state, detail)

    def _spawn(self, name: str, args: list[str], stdin: str | None = None, without: Collection[str] = ()) -> Child:
        """`without`: settings of the gateway that the environment must not say."""
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
                self._stop_flag.wait(LOOK_S)
                continue
            event = child.events.get()
            if event["event"] == "ready":
                return event
            if event["event"] == "progress":
                self._ray_folder = event.get("folder") or self._ray_folder
                self._progress(event["part"], event["state"], event["detail"])
        raise PartFailed(f"{child.name} is not ready after {timeout_s:g} s", child.last_lines(_SHOWN_LINES))

    def _await_served(self, url: str) -> Sequence[str]:
        """Wait until a request would be served, which `/readyz` says with 200; return which workers are not used."""
        give_up = time.monotonic() + _SERVED_TIMEOUT_S
        reason = "it does not answer"
        while time.monotonic() < give_up:
            self._stop_flag.check()
            self._check_running()
            try:
                # It is our own child: its certificate need not be of this machine's name.
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
        """Return whether the first model's chat template marks who speaks; False where that cannot be seen."""
        headers = {} if self._api_key is None else {"authorization": f"Bearer {self._api_key}"}
        try:
            reply = httpx.get(f"{url}/v1/models", headers=headers, timeout=5.0, trust_env=False, verify=False)
            return bool(reply.json()["data"][0]["chat_template"] == "turns")
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return False

    def _show(self, name: str, event: Event) -> None:
        """What the launcher says of its workers while the system runs, and that a part serves again."""
        if event["event"] == "ready" and name in self._restarts:
            self._restarts[name].ready(time.monotonic())
            self._warn(name, "it serves again")
        if event["event"] == "progress" and self._on_log is not None:
            self._on_log(event["part"], f"{event['state']} {event['detail']}")

    def _log(self, name: str, line: str) -> None:
        """Show a line of a part's log, or, while all starts, what a worker does now. Called from threads."""
        phase = phase_in(name, line) if self._reporter is not None else None
        if phase is not None:
            self._progress(*phase, "")
        elif self._on_log is not None:
            self._on_log(name, line)

    def _warn(self, name: str, text: str) -> None:
        if self._on_log is not None:
            self._on_log(name, f" WARNING {text}")

    def _check_running(self) -> None:
        """Raise PartFailed for a part that has ended; go on without a draft that is not needed."""
        for name, child in list(self._children.items()):
            if not child.has_ended() or not child.events.empty():
                continue
            if self._needs_drafts or self._roles.get(name) != "draft":
                raise _ended(child)
            self._go_on_without(name, child)


def with_grpc_port(config: SystemConfig) -> SystemConfig:
    """Return the settings with gRPC on the next free port after HTTP's, where that one alone is named. Raises
    ConfigError for settings that are wrong.
    """

    def is_named(setting: str) -> bool:
        return setting in config.gateway or f"OUTRIDER_GATEWAY_{setting}".upper() in os.environ

    if is_named("grpc_port") or not is_named("port"):
        return config
    # 0: the two defaults must not be taken for ports that are the same
    gateway = gateway_config({**config.gateway, "grpc_port": 0}, target="127.0.0.1:0")
    found = next_free(gateway.host, gateway.port, {gateway.metrics_port}) if gateway.port else 0
    return replace(config, gateway={**config.gateway, "grpc_port": found})


def own_gpu_memory(pools: Iterable[Pool], wanted: float | None = None) -> dict[str, float]:
    """Return `gpu_memory_utilization` by pool, of those whose workers share a GPU of this machine and do not say it
    themselves. wanted: what the workers of a GPU may take of it together, also one that is alone there. Raises
    ConfigError.
    """
    by_gpu: dict[str, list[Pool]] = {}
    for pool in pools:
        device = pool.worker.device
        if device == "auto":
            device = "cuda" if GPU_DEVICE.exists() else "cpu"
        if pool.has_model and device.startswith("cuda"):
            by_gpu.setdefault(device.partition(":")[2] or "0", []).append(pool)
    found: dict[str, float] = {}
    for users in by_gpu.values():
        found.update(utilizations(users, wanted))
    return found


def own_cores(pools: Mapping[str, Pool]) -> dict[str, str | None]:
    """Return cores by worker, as `cpu_cores` takes them; None = not pinned: it runs on a GPU. Raises ConfigError."""
    on_cpu = {"cpu"} if GPU_DEVICE.exists() else {"cpu", "auto"}
    without_gpu = [name for name, pool in pools.items() if pool.worker.device in on_cpu and pool.has_model]
    workers = {name: (pool.role, pool.worker) for name, pool in pools.items()}
    shared = share_cores(workers, without_gpu, frozenset(os.sched_getaffinity(0)))
    return {name: None if cores is None else format_cores(cores) for name, cores in shared.items()}


def _step(ports: Sequence[int], num_gateways: int) -> int:
    """Return the smallest step by which the ports of gateways count up so that none has another's."""
    for step in itertools.count(1):
        numbers = {port + index * step for port in ports for index in range(num_gateways)}
        if len(numbers) == len(ports) * num_gateways:
            return step
    raise AssertionError("the ports of one gateway differ")


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _on_cores(cores: str | None) -> str:
    return "" if cores is None else f"on cores {cores}"


def _reason(part: str, last_line: str) -> str | None:
    """Return why a part says that it ends, in either form of log; None when it does not say."""
    if last_line.startswith(f"{part}: "):
        return last_line
    with contextlib.suppress(json.JSONDecodeError, TypeError, KeyError):
        said = json.loads(last_line)
        return f"{part}: {said['message']}" if said["level"] == "critical" else None
    return None


def _ended(child: Child) -> PartFailed:
    """A part that cannot start says why in its last line, "part: reason"; of one that crashed the log is shown."""
    lines = child.last_lines(_SHOWN_LINES)
    part = child.name.partition("-")[0]
    reason = _reason(part, lines[-1]) if child.returncode == 1 and lines else None
    if reason is not None:
        return PartFailed(reason, [])
    code = child.returncode or 0
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return PartFailed(f"{child.name} {how}", lines)
