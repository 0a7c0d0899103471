"""Starts a whole system, watches it, and ends all of it. Used by `outrider up` and `outrider demo`.

Three child processes with Ray (launcher, gateway; the workers are Ray's), three or two without.
"""

from __future__ import annotations

import os
import queue
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import httpx

from outrider.cli.cores import format_cores, share_cores
from outrider.cli.processes import Child, Event, OnLog, become_subreaper, end_descendants
from outrider.cli.stopping import StopFlag
from outrider.cli.system import SystemConfig, flags, gateway_config, workers_of
from outrider.wire.config import DraftConfig, GatewayConfig, TargetConfig
from outrider.wire.errors import ConfigError, Unavailable

_POLL_S = 0.1
_GATEWAY_GRACE_S = 10.0
"""It lets running answers end for 5 s, and then tells their clients that they end."""
_WORKERS_GRACE_S = 30.0
"""The launcher stops two actors and Ray, which takes seconds."""
_SHOWN_LINES = 20


class Reporter(Protocol):
    """Told how the start goes on."""

    def progress(self, part: str, state: str, detail: str) -> None:
        """`state` is "starting", "loading" or "ready"."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a running system listens, as "host:port"."""

    http: str
    grpc: str
    target: str
    draft: str | None
    metrics: dict[str, str]
    """Where each worker's own metrics are, by its role; the gateway's are at /metrics of `http`."""


@dataclass(frozen=True, slots=True)
class _Workers:
    """Both by role, as "host:port"."""

    addresses: dict[str, str]
    metrics: dict[str, str]


class PartFailed(Unavailable):
    """A process of the system ended by itself, or was never ready."""

    def __init__(self, message: str, log_lines: list[str]) -> None:
        super().__init__(message)
        self.log_lines = log_lines
        """The end of its log."""


class Supervisor:
    """Use as `with`: leaving the block ends every process below this one. For a process that does nothing else."""

    def __init__(self, config: SystemConfig, stop: StopFlag, on_log: OnLog | None = None) -> None:
        self._config = config
        self._reporter: Reporter | None = None
        self._stop_flag = stop
        self._on_log = on_log
        self._children: dict[str, Child] = {}
        self._ray_folder: str | None = None

    def __enter__(self) -> Supervisor:
        become_subreaper()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, reporter: Reporter) -> Endpoints:
        """Blocks until a request would be served. Raises OutriderError with what is wrong, or StopRequested."""
        self._reporter = reporter
        wanted = gateway_config(self._config.gateway, "127.0.0.1:0", None)
        check_free(wanted.host, wanted.port, "--port")
        check_free(wanted.host, wanted.grpc_port, "--grpc-port")
        workers = self._start_plain() if self._config.ray is None else self._start_ray()
        return self._start_gateway(workers)

    def watch(self) -> None:
        """Blocks until a stop is requested. Raises PartFailed when a part that is needed has ended by itself."""
        while not self._stop_flag.wait(_POLL_S):
            for name, child in list(self._children.items()):
                if child.returncode is not None and name != "draft":
                    raise _ended(child)
                if child.returncode is not None and self._on_log is not None:
                    del self._children[name]
                    self._on_log(name, f" WARNING {_ended(child).message}; plain decoding from now on")
                    child.close()

    def stop(self) -> None:
        """End the gateway, then the workers, then whatever they left behind. Idempotent."""
        for name in ("gateway", "launcher", "draft", "target"):
            if child := self._children.get(name):
                grace_s = _GATEWAY_GRACE_S if name == "gateway" else _WORKERS_GRACE_S
                # Actors on a cluster that is not ours end only when the launcher kills them.
                joined = name == "launcher" and self._config.ray is not None and self._config.ray.address is not None
                child.stop(0.0 if self._stop_flag.hurry and not joined else grace_s)
        end_descendants(grace_s=0.5)
        for child in self._children.values():
            child.close()
        self._children.clear()
        if self._ray_folder is not None:  # a launcher that was killed could not remove it
            shutil.rmtree(self._ray_folder, ignore_errors=True)

    def _start_ray(self) -> _Workers:
        line = self._config.to_json() + "\n"
        child = self._spawn("launcher", ["-m", "deploy.launcher", "--config", "-"], stdin=line)
        assert self._config.ray is not None
        ready = self._await_ready(child, self._config.ray.start_timeout_s + 60)
        return _Workers({role: ready[role] for role in ready["pids"]}, _present(ready["metrics"]))

    def _start_plain(self) -> _Workers:
        for role, worker in _on_own_cores(workers_of(self._config)).items():
            self._progress(role, "loading", f"{worker.model} {_where(worker.cpu_cores)}".rstrip())
            self._spawn(role, ["-m", f"{role}_service", *flags(worker)])
        started = _Workers({}, {})
        for role, child in list(self._children.items()):
            ready = self._await_ready(child, timeout_s=900.0)
            started.addresses[role] = ready["address"]
            started.metrics.update(_present({role: ready["metrics_address"]}))
            self._progress(role, "ready", ready["address"])
        return started

    def _start_gateway(self, workers: _Workers) -> Endpoints:
        target, draft = workers.addresses["target"], workers.addresses.get("draft")
        config = gateway_config(self._config.gateway, target, draft)
        self._progress("gateway", "starting", f"for {target}")
        child = self._spawn("gateway", ["-m", "gateway", *flags(config)])
        ready = self._await_ready(child, config.start_timeout_s)
        endpoints = Endpoints(str(ready["http"]), str(ready["grpc"]), target, draft, workers.metrics)
        self._await_served(child, endpoints.http, config)
        self._progress("gateway", "ready", endpoints.http)
        return endpoints

    def _progress(self, part: str, state: str, detail: str) -> None:
        if self._reporter is not None:
            self._reporter.progress(part, state, detail)

    def _spawn(self, name: str, args: list[str], stdin: str | None = None) -> Child:
        child = Child(name, [sys.executable, *args], stdin=stdin, on_log=self._on_log)
        self._children[name] = child
        return child

    def _await_ready(self, child: Child, timeout_s: float) -> Event:
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            self._stop_flag.check()
            try:
                event = child.events.get(timeout=_POLL_S)
            except queue.Empty:
                self._check_running()
                continue
            if event["event"] == "ready":
                return event
            if event["event"] == "progress":
                self._ray_folder = event.get("folder") or self._ray_folder
                self._progress(event["part"], event["state"], event["detail"])
        raise PartFailed(f"{child.name} is not ready after {timeout_s:g} s", child.last_lines(_SHOWN_LINES))

    def _await_served(self, child: Child, http: str, config: GatewayConfig) -> None:
        """`/readyz` says 200 only when a request would be served."""
        give_up = time.monotonic() + config.start_timeout_s
        reason = "it does not answer"
        while time.monotonic() < give_up:
            self._stop_flag.check()
            self._check_running()
            try:
                reply = httpx.get(f"http://{http}/readyz", timeout=5.0, trust_env=False)
                if reply.status_code == httpx.codes.OK:
                    return
                reason = reply.text.strip()
            except httpx.TransportError:
                pass
            self._stop_flag.wait(_POLL_S)
        raise Unavailable(f"the gateway serves no request after {config.start_timeout_s:g} s: {reason}")

    def _check_running(self) -> None:
        for child in self._children.values():
            if child.returncode is not None and child.events.empty():
                raise _ended(child)


def check_free(host: str, port: int, option: str) -> None:
    """Raise ConfigError when somebody listens on host:port. Saves loading two models only to find out."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = f"{error.strerror}; choose another with {option}"
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from None


def _on_own_cores(workers: Mapping[str, TargetConfig | DraftConfig]) -> dict[str, TargetConfig | DraftConfig]:
    """The same, each pinned if it runs on the CPU: Ray is not there to say it. Raises ConfigError."""
    on_cpu = {"cpu"} if Path("/dev/nvidiactl").exists() else {"cpu", "auto"}
    without_gpu = [role for role, worker in workers.items() if worker.device in on_cpu]
    cores = share_cores(workers, without_gpu, frozenset(os.sched_getaffinity(0)))
    return {
        role: worker.model_copy(update={"cpu_cores": None if (mine := cores[role]) is None else format_cores(mine)})
        for role, worker in workers.items()
    }


def _present(addresses: Mapping[str, str | None]) -> dict[str, str]:
    return {role: address for role, address in addresses.items() if address is not None}


def _where(cores: str | None) -> str:
    return "" if cores is None else f"on cores {cores}"


def _ended(child: Child) -> PartFailed:
    """A part that cannot start says why in its last line, "part: reason"; of one that crashed the log is shown."""
    lines = child.last_lines(_SHOWN_LINES)
    if child.returncode == 1 and lines and lines[-1].startswith(f"{child.name}: "):
        return PartFailed(lines[-1], [])
    code = child.returncode or 0
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return PartFailed(f"{child.name} {how}", lines)
