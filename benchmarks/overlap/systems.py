"""The processes that the arms run in: a pair in one process, and split ones behind links of a given round trip."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.overlap.apart_draft import STEP_S
from benchmarks.overlap.checkouts import Checkout
from benchmarks.overlap.groups import Group
from benchmarks.overlap.shapes import Shape
from outrider.client import AsyncClient
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2_grpc
from outrider.wire.processes.processes import Child
from tests.samples import total
from tests.stack import read_metrics
from tests.tcp_relay import TcpRelay

START_S = 180.0
"""Seconds that a process may take to start. Doubled, one that hangs is reported twice as late."""
ORDER_S = 600.0
"""The same of an order to a pair in one process."""
NUM_PINGS = 20
"""Calls that a round trip is the median of."""


def started(
    checkout: Checkout,
    module: str,
    args: Sequence[str],
    cores: Sequence[int],
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start a module of a checkout on some cores."""
    pinned = ["taskset", "-c", ",".join(map(str, cores)), checkout.python, "-m", module, *args]
    return Child(module, pinned, stdin="", env={**checkout.environment, **(environment or {})})


def started_worker(
    checkout: Checkout,
    module: str,
    model: Path,
    core: int,
    *more: str,
    environment: Mapping[str, str] | None = None,
) -> Child:
    """Start a worker on one core, in float32 and without a prefix cache. more: of its command line; the last wins."""
    common = ("--dtype", "float32", "--no-prefix-caching", "--metrics-port", "0")
    args = ["--model", str(model), "--cpu-cores", str(core), *common, *more]
    return started(checkout, module, args, [core], environment)


def told(child: Child, timeout_s: float = START_S) -> dict[str, Any]:
    """Return the next event of a process. Ends this one where there is none: its log says why."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        with contextlib.suppress(queue.Empty):
            return child.events.get(timeout=0.2)
        if child.returncode is not None:
            break
    sys.exit(f"{child.name} says nothing any more:\n" + "\n".join(child.last_lines(30)))


class Colocated:
    """Both models in one process."""

    def __init__(self, checkout: Checkout, target: Path, draft: Path, cores: Sequence[int]) -> None:
        settings = {"target": str(target), "draft": str(draft), "cores": list(cores)}
        self.child = started(checkout, "benchmarks.overlap.colocated", [json.dumps(settings)], cores)

    def costs(self, prompt: Sequence[int], num_rounds: int) -> tuple[dict[int, float], dict[int, float]]:
        """Return the seconds of a step by its rows, of target and draft."""
        found = self._order(do="costs", prompt=list(prompt), rounds=num_rounds)
        verify, draft = ({int(width): s for width, s in found[name].items()} for name in ("verify", "draft"))
        return verify, draft

    def answer(
        self, prompt: Sequence[int], group: Group, seed: int, max_tokens: int, shape: int | Shape
    ) -> dict[str, Any]:
        """Return the fields of `colocated.Answer`."""
        return self._order(
            do="answer",
            prompt=list(prompt),
            group=[group.cost, group.rule, group.temperature],
            seed=seed,
            max_tokens=max_tokens,
            shape=shape if isinstance(shape, int) else shape.paths,
        )

    @contextlib.contextmanager
    def drafting(self, prompt: Sequence[int], seconds: float) -> Iterator[None]:
        """Let the draft make steps on this process's cores for so long."""
        self._tell(do="draft", prompt=list(prompt), seconds=seconds)
        yield
        told(self.child, ORDER_S)

    def _order(self, **order: Any) -> dict[str, Any]:
        self._tell(**order)
        return told(self.child, ORDER_S)

    def _tell(self, **order: Any) -> None:
        assert self.child.process.stdin is not None
        self.child.process.stdin.write(json.dumps(order) + "\n")
        self.child.process.stdin.flush()


@contextlib.contextmanager
def ended_with_block(children: list[Child]) -> Iterator[list[Child]]:
    """End all processes that the list then holds, the last first."""
    try:
        yield children
    finally:
        for child in reversed(children):
            child.ask_to_stop()
        for child in reversed(children):
            child.stop(grace_s=15.0)
            child.close()


@dataclass
class Front:
    """A gateway before a pair of workers, and how to reach all of them."""

    client: AsyncClient
    metrics: dict[str, str]
    """URL by part: gateway, target, draft."""
    relays: Sequence[TcpRelay] = ()
    """On the links gateway - target, gateway - draft and draft - target; none for links as they are."""

    def set_network(self, round_trip_s: float, bandwidth: float | None) -> None:
        for relay in self.relays:
            relay.delay_s, relay.bandwidth = round_trip_s / 2, bandwidth

    def counts(self) -> Counts:
        return Counts({part: read_metrics(url) for part, url in self.metrics.items()})


@dataclass(frozen=True)
class Counts:
    """Samples of the series of all three parts at a moment."""

    samples: Mapping[str, Mapping[str, float]]

    def since(self, before: Counts, part: str, name: str, **labels: str) -> float:
        """Return by how much a series, or the sum of those with these labels, has grown."""
        return total(self.samples[part], name, **labels) - total(before.samples[part], name, **labels)


@dataclass
class Split:
    """Workers of a checkout, and gateways before them: one on links as they are, one behind relays."""

    near: Front
    far: Front
    draft_address: str
    far_draft_address: str
    draft: Child

    def front(self, round_trip_s: float, bandwidth: float | None) -> Front:
        """Return the gateway for links of this round trip, set to it."""
        if not round_trip_s and bandwidth is None:
            return self.near
        self.far.set_network(round_trip_s, bandwidth)
        return self.far

    async def measured_round_trip_s(self) -> float:
        """Return what the relays, as they are set, add to a call."""
        far, near = [await _ping_s(each) for each in (self.far_draft_address, self.draft_address)]
        return max(0.0, far - near)


async def _ping_s(address: str) -> float:
    async with grpc.aio.insecure_channel(address) as channel:
        stub, taken = draft_pb2_grpc.DraftServiceStub(channel), list[float]()
        for _ in range(NUM_PINGS + 1):  # the first connects
            began = time.perf_counter()
            await stub.GetInfo(pb.GetInfoRequest())
            taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


@contextlib.asynccontextmanager
async def split(
    checkout: Checkout,
    target: Path,
    draft: Path,
    target_module: str = "target_service",
    draft_step_s: Mapping[int, float] | None = None,
    more: Mapping[str, Sequence[str]] | None = None,
    draft_module: str = "draft_service",
    gateway_module: str = "gateway",
) -> AsyncIterator[Split]:
    """Run a pair, the target on the last core, the draft and the gateways on the first.

    draft_step_s: by rows, what a step of the draft is to take; it sleeps for what it takes less. more: what the command
    line of target, draft or gateway has beside, by that name.
    """
    first, last = 0, 1
    more = {"target": (), "draft": (), "gateway": (), **(more or {})}
    async with contextlib.AsyncExitStack() as stack:
        children = stack.enter_context(ended_with_block([]))
        drafting: tuple[str, dict[str, str]] = (draft_module, {})
        if draft_step_s is not None:
            drafting = ("benchmarks.overlap.apart_draft", {STEP_S: json.dumps(draft_step_s)})
        for (module, environment), model, core, role in (
            ((target_module, {}), target, last, "target"),
            (drafting, draft, first, "draft"),
        ):
            args = ["--kv-cache-tokens", "16384", *more[role]]
            children.append(started_worker(checkout, module, model, core, *args, environment=environment))
        workers = [await asyncio.to_thread(told, child) for child in children]
        addresses = [str(each["address"]) for each in workers]
        relays = [await stack.enter_async_context(TcpRelay(addresses[end])) for end in (0, 1, 0)]
        far = [relay.address for relay in relays]
        fronts = list[Front]()
        for to_target, to_draft, from_draft in ((addresses[0], addresses[1], addresses[0]), far):
            args = ["--target", to_target, "--draft", to_draft, "--target-for-draft", from_draft, *more["gateway"]]
            children.append(started(checkout, gateway_module, [*args, "--port", "0", "--grpc-port", "0"], [first]))
            ready = await asyncio.to_thread(told, children[-1])
            client = await stack.enter_async_context(AsyncClient(str(ready["grpc"])))
            urls = {"gateway": str(ready["http"]), "target": workers[0]["metrics_address"]}
            urls |= {"draft": workers[1]["metrics_address"]}
            fronts.append(Front(client, {part: f"http://{at}/metrics" for part, at in urls.items()}))
        fronts[1].relays = relays
        yield Split(fronts[0], fronts[1], addresses[1], far[1], children[1])
