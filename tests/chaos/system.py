"""The processes under chaos and the network between them: a relay on every link, so that each can be cut by itself."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc
from tests.forked import REPO
from tests.random_heads import random_eagle3, random_medusa
from tests.stack import DEMO_DRAFT, DEMO_TARGET, Pools, Process, stop_all
from tests.tcp_relay import TcpRelay

WORKER_ARGS = ("--batch-invariant", "--metrics-port", "0")
HEADS: dict[str, Callable[[str, Path], str]] = {"eagle3": random_eagle3, "medusa": random_medusa}
START_ATTEMPTS = 10
"""A port that is free for a moment may be taken by a connection that goes out: it is free again soon."""


def draft_args(kind: str, folder: Path) -> tuple[str, ...]:
    """Return arguments of a draft: the demo model, or a head of the demo target, of random weights where it is not
    shipped.
    """
    if kind == "model":
        return ("--model", DEMO_DRAFT)
    shipped = REPO / "models/demo" / kind
    head = str(shipped) if shipped.exists() else HEADS[kind](DEMO_TARGET, folder / kind)
    return ("--model", head, "--target-model", DEMO_TARGET, "--trust-draft-config")


@dataclass
class System:
    """Members by index. `links` by (from, to), such as ("gateway 0", "target 1") or ("drafts", "target 0")."""

    pools: Pools
    links: dict[tuple[str, str], TcpRelay]
    folder: Path
    """Of the logs."""

    def between(self, one: str, other: str) -> list[tuple[str, str]]:
        """The links from parts of kind `one` ("gateway", "drafts") to those of kind `other`, in their order."""
        return [ends for ends in self.links if ends[0].startswith(one) and ends[1].startswith(other)]

    def into(self, member: str) -> list[TcpRelay]:
        """Every link that ends at `member`, such as "draft 0"."""
        return [relay for (_, end), relay in self.links.items() if end == member]

    def info(self, role: str, index: int) -> pb.WorkerInfo:
        """Raises grpc.RpcError. Asked for directly, whatever is cut."""
        members = self.pools.targets if role == "target" else self.pools.drafts
        service = target_pb2_grpc.TargetServiceStub if role == "target" else draft_pb2_grpc.DraftServiceStub
        with grpc.insecure_channel(members[index].address) as channel:
            found: pb.WorkerInfo = service(channel).GetInfo(pb.GetInfoRequest(), timeout=10)
            return found

    async def replace(self, old: Process, module: str | None = None) -> Process:
        """A new life at the ports of `old`, which has ended, and in its place here. `module`: another to run."""
        error: Exception | None = None
        for _ in range(START_ATTEMPTS):
            again = old.again(module=module, wait=False)
            try:
                await asyncio.to_thread(lambda started: started.ready, again)
            except RuntimeError as failed:
                error = failed
                await asyncio.sleep(1.0)
                continue
            for members in (self.pools.targets, self.pools.drafts, self.pools.gateways):
                members[:] = [again if member is old else member for member in members]
            return again
        raise RuntimeError(f"{old.module} did not come back at its port") from error


@contextlib.asynccontextmanager
async def running_system(
    num_targets: int,
    num_gateways: int,
    drafts: Sequence[Sequence[str]],
    kv_cache_tokens: int,
    request_timeout_s: float,
    folder: Path,
) -> AsyncIterator[System]:
    """drafts: of each, arguments that say what it is. Each is a pool of its own."""
    pools = Pools([], [], [])
    cores = sorted(os.sched_getaffinity(0))
    cache = ("--kv-cache-tokens", str(kv_cache_tokens))

    def start(members: list[Process], module: str, *args: str) -> None:
        log = folder / f"{module}-{len(members)}.log"
        members.append(Process(module, list(args), stderr_path=log, wait=False))

    async with contextlib.AsyncExitStack() as stack:
        try:
            for _ in range(num_targets):
                core = ("--cpu-cores", str(cores[-1]))
                start(pools.targets, "target_service", "--model", DEMO_TARGET, *WORKER_ARGS, *cache, *core)
            for kind in drafts:
                core = ("--cpu-cores", str(cores[0]))
                start(pools.drafts, "draft_service", *kind, *WORKER_ARGS, *cache, *core)
            links: dict[tuple[str, str], TcpRelay] = {}

            async def link(one: str, other: str, member: Process) -> str:
                address = await asyncio.to_thread(lambda: member.address)
                links[one, other] = await stack.enter_async_context(TcpRelay(address))
                return links[one, other].address

            to_targets = [
                await link("drafts", f"target {i}", target) for i, target in enumerate(pools.targets) if pools.drafts
            ]
            for number in range(num_gateways):
                me = f"gateway {number}"
                targets = [await link(me, f"target {i}", target) for i, target in enumerate(pools.targets)]
                args = ["--target", ",".join(targets), "--port", "0", "--grpc-port", "0"]
                args += ["--request-timeout-s", f"{request_timeout_s:g}"]
                if pools.drafts:
                    addresses = [await link(me, f"draft {i}", draft) for i, draft in enumerate(pools.drafts)]
                    args += ["--draft", ";".join(addresses), "--target-for-draft", ",".join(to_targets)]
                start(pools.gateways, "gateway", *args)
            for gateway in pools.gateways:
                await asyncio.to_thread(lambda member: member.ready, gateway)
            yield System(pools, links, folder)
        finally:
            await asyncio.to_thread(stop_all, pools.processes)
