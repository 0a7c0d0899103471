"""The systems that are measured: Outrider of a checkout on two cores, and vLLM's build for CPUs on the same."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.common import WORK
from benchmarks.host import forward_clock
from benchmarks.host.accounts import DRAFT, GATEWAY, TARGET, Spent, cpu_s
from benchmarks.host.forward_clock import ForwardCounts
from benchmarks.host.models import CONTEXT, DTYPE, small_pair
from benchmarks.peers.engines import PEERS, vllm_environment
from benchmarks.processes import Checkout, ended_with_block, next_event, start
from outrider.wire.processes.processes import Child

START_S = 300.0
"""Seconds that vLLM has to compile and answer."""
VLLM_PYTHON = PEERS / "vllm/bin/python"
VLLM_LOG = WORK / "host-vllm.log"
KV_CACHE_TOKENS = 32_768


@dataclass(frozen=True)
class System:
    """A server that answers on 127.0.0.1."""

    name: str
    port: int
    model: str
    pids: Mapping[str, int]
    """By process; those below it count with it."""
    forwards: Mapping[str, ForwardCounts] = field(default_factory=dict)
    """By worker."""
    has_speculation: bool = True
    """Whether requests have the field."""

    def spent(self) -> Spent:
        """Return what its processes have used so far."""
        seconds = {name: cpu_s(pid) for name, pid in self.pids.items()}
        return Spent(seconds, {name: counts.read() for name, counts in self.forwards.items()})


@contextlib.contextmanager
def outrider(name: str, checkout: Checkout) -> Iterator[System]:
    """Run a pair and a gateway: the target on the last core, draft and gateway on the first."""
    cores = sorted(os.sched_getaffinity(0))
    target, draft = small_pair()
    with tempfile.TemporaryDirectory() as folder, ended_with_block([]) as children:
        files = {worker: Path(folder) / worker for worker in (TARGET, DRAFT)}
        forwards = {worker: ForwardCounts(file) for worker, file in files.items()}
        for worker, model, core in ((TARGET, target, cores[-1]), (DRAFT, draft, cores[0])):
            children.append(_worker(checkout, worker, model, core, files[worker]))
        addresses = [str(next_event(child)["address"]) for child in children]
        places = ["--target", addresses[0], "--draft", addresses[1], "--port", "0", "--grpc-port", "0"]
        children.append(start(checkout, "gateway", places, [cores[0]]))
        http = str(next_event(children[-1])["http"])
        model = str(httpx.get(f"http://{http}/v1/models").json()["data"][0]["id"])
        pids = {part: child.process.pid for part, child in zip((TARGET, DRAFT, GATEWAY), children, strict=True)}
        yield System(name, int(http.rpartition(":")[2]), model, pids, forwards)


def _worker(checkout: Checkout, worker: str, model: Path, core: int, counts: Path) -> Child:
    """Start a worker whose forwards are counted, on its core from the start: torch sizes its threads at import."""
    args = ["--model", str(model), "--dtype", DTYPE, "--cpu-cores", str(core), "--metrics-port", "0"]
    args += ["--kv-cache-tokens", str(KV_CACHE_TOKENS), "--no-prefix-caching"]
    program = [checkout.python, forward_clock.__file__, f"{worker}_service", *args]
    own = {forward_clock.COUNTS_FILE: str(counts), "OMP_NUM_THREADS": "1"}
    return Child(worker, ["taskset", "-c", str(core), *program], stdin="", env={**checkout.environment, **own})


@contextlib.contextmanager
def vllm() -> Iterator[System]:
    """Run vLLM's server, its forwards on the last core. Raises RuntimeError when it does not start."""
    cores = sorted(os.sched_getaffinity(0))
    target, _ = small_pair()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    args = ["--model", str(target), "--served-model-name", "small", "--host", "127.0.0.1", "--port", str(port)]
    args += ["--dtype", DTYPE, "--max-model-len", str(CONTEXT), "--max-num-seqs", "64", "--no-enable-prefix-caching"]
    args += ["--disable-uvicorn-access-log"]
    with VLLM_LOG.open("w") as log:
        process = subprocess.Popen(
            [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", *args],
            stdout=log,
            stderr=log,
            env=os.environ | vllm_environment(VLLM_PYTHON, cores[-1:]),
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, port)
        yield System("vLLM", port, "small", {"vLLM": process.pid}, has_speculation=False)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"vLLM does not start; its log is {VLLM_LOG}")


def commit_of(tree: Path) -> str:
    """Return the commit of a checkout, in short."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
