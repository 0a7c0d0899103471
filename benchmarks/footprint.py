"""Watch what each process of a running system holds over time: memory, open files, threads. Reads /proc on a thread."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx

from outrider.cli.up.endpoints import Endpoints, StartedWorker
from outrider.v1 import common_pb2, draft_pb2_grpc, target_pb2_grpc
from outrider.wire.processes.descendants import descendants

SETTLE_S = 20.0
"""Seconds that a system has to let go of everything after the last request."""
GATEWAY_HOLDS = ("outrider_running", "outrider_queue_depth")
PARTS = ("target_service", "draft_service", "gateway", "deploy.launcher")
RAYS_OWN = "Ray's "
"""Prefix of the names of Ray's processes: not Outrider's code, nor its workers'."""
_RAY_PROGRAMS = ("gcs_server", "raylet")


@dataclass(frozen=True)
class Held:
    """Resources that one process holds at one moment (monotonic)."""

    at_s: float
    rss_bytes: int
    own_bytes: int
    """Bytes of rss_bytes that belong to no file: heaps, stacks, the KV cache. Leaks show here."""
    num_files: int
    num_threads: int


def parts_below(workers: Iterable[StartedWorker] = ()) -> dict[str, int]:
    """Return the pids of the parts that this process has started, by module; the second of a kind is `gateway 1`.

    `workers` have their own names: with Ray there is no other way to know which process is whose.
    """
    found = {worker.name: worker_info(worker).pid for worker in workers}
    for pid in sorted(set(descendants(os.getpid())) - set(found.values())):
        with contextlib.suppress(OSError):
            kind = kind_of(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0"))
            if kind is not None:
                count = sum(name.startswith(kind) for name in found)
                found[f"{kind} {count}" if count else kind] = pid
    return found


def kind_of(words: Sequence[str]) -> str | None:
    """Return the part that a process with this command line is; None when it is no part of a system."""
    program, _, title = words[0].rpartition("/")[2].partition("::")
    if "-m" in words[:-1]:
        module = words[words.index("-m") + 1]
        return module if module in PARTS else None
    if program in _RAY_PROGRAMS:
        return f"{RAYS_OWN}{program}"
    if program == "ray" and title:  # an agent that sets its own title
        return f"{RAYS_OWN}{title}"
    scripts = [word for word in words[1:] if word.endswith(".py") and "/ray/" in word]
    return f"{RAYS_OWN}{Path(scripts[0]).stem}" if scripts else None


def held(pid: int) -> Held:
    """Return what the process holds now. Raises OSError when there is no such process."""
    folder = Path(f"/proc/{pid}")
    sizes = dict(line.split(":", 1) for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return Held(
        time.monotonic(),
        int(sizes["Rss"].split()[0]) * 1024,
        int(sizes["Anonymous"].split()[0]) * 1024,
        len(os.listdir(folder / "fd")),
        int(status["Threads"]),
    )


@contextlib.contextmanager
def repeated(function: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call a function again and again, on a thread of its own, while the block runs."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            function()

    thread = threading.Thread(target=repeat, name="footprint", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def watched(pids: Mapping[str, int], every_s: float) -> Iterator[dict[str, list[Held]]]:
    """Yield samples by name, to which each moment adds one while the block runs and the process lives."""
    seen: dict[str, list[Held]] = {name: [] for name in pids}

    def add_samples() -> None:
        for name, pid in pids.items():
            with contextlib.suppress(OSError):
                seen[name].append(held(pid))

    with repeated(add_samples, every_s):
        yield seen


def left_in(endpoints: Endpoints) -> list[str]:
    """Return what workers and gateway still hold without any requests: slots, blocks, tickets, answers."""
    give_up_s = time.monotonic() + SETTLE_S
    while (left := _held_of(endpoints)) and time.monotonic() < give_up_s:
        time.sleep(0.2)
    return left


def _held_of(endpoints: Endpoints) -> list[str]:
    left = []
    for worker in endpoints.workers:
        info = worker_info(worker)
        counts = (info.num_slots_in_use, info.num_kv_blocks_in_use, info.num_leases)
        if any(counts):
            left.append("{} still holds {} slots, {} blocks, {} tickets".format(worker.name, *counts))
    metrics = httpx.get(f"http://{endpoints.http}/metrics").text
    samples = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    held = {name: samples[name] for name in GATEWAY_HOLDS if float(samples[name])}
    return [*left, f"the gateway still holds {held}"] if held else left


def worker_info(worker: StartedWorker) -> common_pb2.WorkerInfo:
    stubs: dict[str, Any] = {"target": target_pb2_grpc.TargetServiceStub, "draft": draft_pb2_grpc.DraftServiceStub}
    with grpc.insecure_channel(worker.address) as channel:
        info: common_pb2.WorkerInfo = stubs[worker.role](channel).GetInfo(common_pb2.GetInfoRequest(), timeout=10)
        return info
