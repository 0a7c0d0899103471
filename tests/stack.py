"""The real system as processes on free ports: targets, drafts and gateways. Used by every test that needs services."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import httpx

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from tests.forked import REPO, Forked
from tests.waiting import wait_until_none

DEMO_TARGET = str(REPO / "models/demo/target")
DEMO_DRAFT = str(REPO / "models/demo/draft")
OTHER_DRAFT = str(REPO / "models/other/draft")
"""Of the demo target, in tokens of its own."""
START_S = 90.0
KV_CACHE_TOKENS = "32768"
"""Of workers of which a test says nothing else. Their own choice follows the machine's memory, and with it what has to
wait for memory and what stays cached.
"""
NUM_DRAFT_TOKENS = "5"
"""K of gateways of which a test says nothing else: what pays depends on the machine, and on what else it does."""

_KEPT = set[int]()
"""The ports of processes that were killed: bound until the tests end, for the processes' successors."""


@dataclass(eq=False)
class Process:
    """One service process. `ready` is the line it announced itself with; asking for it waits until it has."""

    module: str
    args: list[str]
    popen: Forked = field(init=False)
    stderr_path: Path | None = None
    wait: bool = True
    """For `ready`, at once; False when several are to start side by side."""

    def __post_init__(self) -> None:
        args = list(self.args)
        is_gateway = self.module == "gateway" or "--target" in args  # broken ones have modules of their own
        if not is_gateway and "--kv-cache-tokens" not in args:
            args += ["--kv-cache-tokens", KV_CACHE_TOKENS]
        if is_gateway and "--num-draft-tokens" not in args:
            args += ["--num-draft-tokens", NUM_DRAFT_TOKENS]
        self.popen = Forked(self.module, args, self.stderr_path)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if self.wait:
            _ = self.ready

    @cached_property
    def ready(self) -> dict[str, object]:
        try:
            line = self._lines.get(timeout=START_S)
        except queue.Empty:
            line = ""
        if not line:
            self.kill()
            raise RuntimeError(f"{self.module} {self.args} did not start: {self.log()}")
        found: dict[str, object] = json.loads(line)
        return found

    def _read(self) -> None:
        for line in self.popen.stdout:
            self._lines.put(line)
        self._lines.put("")

    def log(self) -> str:
        return "" if self.stderr_path is None else self.stderr_path.read_text()

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    @property
    def pid(self) -> int:
        return self.popen.pid

    def end(self) -> None:
        """SIGTERM, without waiting for it."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()

    def stop(self) -> int:
        """SIGTERM, then the exit code."""
        self.end()
        if self.popen.poll() is None:
            try:
                self.popen.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        self._close()
        return self.popen.wait(10)

    def kill(self) -> None:
        """SIGKILL. Its ports are kept for `again`."""
        self.popen.kill()
        self.popen.wait(10)
        self._keep_ports()
        self._close()

    def again(self, *, module: str | None = None, wait: bool = True) -> "Process":
        """A new one with the same arguments at the same ports, once this one has ended. `module`: another to run."""
        args = list(self.args)
        for flag, port in self._ports().items():
            args += [flag, str(port)]
        return Process(module or self.module, args, stderr_path=self.stderr_path, wait=wait)

    def _ports(self) -> dict[str, int]:
        """By the option that sets it."""
        addresses = {"--port": self.ready.get("http", self.ready.get("address"))}
        addresses |= {"--grpc-port": self.ready.get("grpc"), "--metrics-port": self.ready.get("metrics_address")}
        return {
            flag: int(address.rpartition(":")[2]) for flag, address in addresses.items() if isinstance(address, str)
        }

    def _keep_ports(self) -> None:
        """Bind the ports without listening: the kernel gives them to nobody who asks for a free one, or who connects.

        Who asks for one of them by number, with SO_REUSEADDR as servers do, gets it.
        """
        for port in self._ports().values() if "ready" in self.__dict__ else ():
            if port in _KEPT:
                continue
            with contextlib.suppress(OSError), socket.socket() as kept:  # its child may hold it still
                kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                kept.bind(("127.0.0.1", port))
                kept.detach()
                _KEPT.add(port)

    def _close(self) -> None:
        self._reader.join(5)
        self.popen.stdout.close()


def info_of(draft: Process) -> pb.WorkerInfo:
    with grpc.insecure_channel(draft.address) as channel:
        return draft_pb2_grpc.DraftServiceStub(channel).GetInfo(pb.GetInfoRequest(), timeout=10)


@dataclass
class Stack:
    """A running system. `draft` is None for plain decoding."""

    target: Process
    draft: Process | None
    gateway: Process

    @property
    def http(self) -> str:
        """Base URL."""
        return f"http://{self.gateway.ready['http']}"

    @property
    def grpc(self) -> str:
        return str(self.gateway.ready["grpc"])

    @property
    def model(self) -> str:
        return str(httpx.get(f"{self.http}/v1/models").json()["data"][0]["id"])

    def target_info(self) -> pb.WorkerInfo:
        with grpc.insecure_channel(self.target.address) as channel:
            return target_pb2_grpc.TargetServiceStub(channel).GetInfo(pb.GetInfoRequest(), timeout=10)

    def draft_info(self) -> pb.WorkerInfo:
        assert self.draft is not None
        return info_of(self.draft)

    def metrics(self) -> dict[str, float]:
        """Samples of the gateway's /metrics by 'name{labels}'."""
        return read_metrics(f"{self.http}/metrics")


@dataclass
class Pools:
    """Running targets, drafts and gateways, each gateway with all the workers. Those of a kind by index."""

    targets: list[Process]
    drafts: list[Process]
    gateways: list[Process]

    @property
    def processes(self) -> list[Process]:
        return [*self.targets, *self.drafts, *self.gateways]

    def stack(self, target: int = 0, draft: int = 0, gateway: int = 0) -> Stack:
        """One of each, for what takes a `Stack`."""
        return Stack(self.targets[target], self.drafts[draft] if self.drafts else None, self.gateways[gateway])

    def http(self, gateway: int = 0) -> str:
        """Base URL."""
        return f"http://{self.gateways[gateway].ready['http']}"

    def grpc(self, gateway: int = 0) -> str:
        return str(self.gateways[gateway].ready["grpc"])

    def metrics(self, gateway: int = 0) -> dict[str, float]:
        return read_metrics(f"{self.http(gateway)}/metrics")

    def restart(self, process: Process, *, wait: bool = True) -> Process:
        """End `process`, if it runs, at once and start it again at the same ports; the new one has its place here."""
        process.kill()
        started = process.again(wait=wait)
        for members in (self.targets, self.drafts, self.gateways):
            members[:] = [started if member is process else member for member in members]
        return started


@contextlib.contextmanager
def gateway_beside(stack: Stack, *args: str, draft: bool = True, module: str = "gateway") -> Iterator[Process]:
    """Start another gateway over the same workers, and stop it."""
    assert stack.draft is not None
    workers = ("--target", stack.target.address, *(("--draft", stack.draft.address) if draft else ()))
    gateway = Process(module, [*workers, "--port", "0", "--grpc-port", "0", *args])
    try:
        yield gateway
    finally:
        gateway.stop()


def read_metrics(url: str) -> dict[str, float]:
    return parse_metrics(httpx.get(url).text)


def parse_metrics(text: str) -> dict[str, float]:
    """Samples by 'name{labels}'."""
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def stop_all(processes: Iterable[Process]) -> None:
    """Gateways before their workers; those of a kind at the same time."""
    processes = list(processes)
    for is_gateway in (True, False):
        of_kind = [process for process in processes if (process.module == "gateway") is is_gateway]
        for process in of_kind:
            process.end()
        for process in of_kind:
            process.stop()


@contextlib.contextmanager
def running(target: str = DEMO_TARGET, draft: str | None = DEMO_DRAFT, **options: Any) -> Iterator[Stack]:
    """Start the three processes and stop them, whatever happens. options: as of `running_pools`."""
    num_drafts = 0 if draft is None else 1
    with running_pools(1, num_drafts, target=target, draft=draft or DEMO_DRAFT, **options) as pools:
        stack = pools.stack()
        try:
            yield stack
        finally:  # those that a test has put in place of the first ones
            stop_all(process for process in (stack.gateway, stack.target, stack.draft) if process is not None)


@contextlib.contextmanager
def running_pools(
    num_targets: int,
    num_drafts: int,
    num_gateways: int = 1,
    *,
    target: str = DEMO_TARGET,
    draft: str = DEMO_DRAFT,
    target_args: tuple[str, ...] = (),
    draft_args: tuple[str, ...] = (),
    gateway_args: tuple[str, ...] = (),
    target_module: str = "target_service",
    draft_module: str = "draft_service",
    log_folder: Path | None = None,
) -> Iterator[Pools]:
    """Start the processes side by side and stop them, whatever happens. Targets share the last core, drafts the first.

    The log of a module's first process is MODULE.log, of the others MODULE-1.log and so on; a restart appends to it.
    """
    pools = Pools([], [], [])

    def start(members: list[Process], module: str, *args: str) -> None:
        name = f"{module}-{len(members)}" if members else module
        path = None if log_folder is None else log_folder / f"{name}.log"
        members.append(Process(module, list(args), stderr_path=path, wait=False))

    cores = sorted(os.sched_getaffinity(0))
    metrics = ("--metrics-port", "0")
    try:
        for _ in range(num_targets):
            core = str(cores[-1])
            start(pools.targets, target_module, "--model", target, "--cpu-cores", core, *metrics, *target_args)
        for _ in range(num_drafts):
            core = str(cores[0])
            start(pools.drafts, draft_module, "--model", draft, "--cpu-cores", core, *metrics, *draft_args)
        addresses = ["--target", ",".join(member.address for member in pools.targets)]
        if pools.drafts:
            addresses += ["--draft", ",".join(member.address for member in pools.drafts)]
        for _ in range(num_gateways):
            start(pools.gateways, "gateway", *addresses, "--port", "0", "--grpc-port", "0", *gateway_args)
        for member in pools.gateways:
            _ = member.ready
        yield pools
    finally:
        stop_all(pools.processes)


def wait_until_nothing_is_held(stack: Stack) -> None:
    """Fail where a slot, block or ticket of a worker is still held 20 s after the last answer."""

    def left() -> list[pb.WorkerInfo]:
        infos = [stack.target_info(), *([] if stack.draft is None else [stack.draft_info()])]
        return [info for info in infos if info.num_slots_in_use or info.num_kv_blocks_in_use or info.num_leases]

    wait_until_none(left, 20)
