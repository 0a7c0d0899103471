"""The chart's ScaledObjects under load: what their queries return of a real Prometheus, and what size KEDA makes of it.

The gateway has the chart's own command line, in which the Services' names are addresses here.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any

import pytest

from deploy.prometheus.binaries import NotFound
from outrider.client import AsyncClient
from tests.kubernetes.chart import FULLNAME, NAMESPACE, Manifest, rendered
from tests.stack import Process, running_pools
from tests.waiting import until
from tests.watching.prometheus import Prometheus

MAX_RUNNING = 4
TARGET, DRAFT = f"{FULLNAME}-demo", f"{FULLNAME}-demo-draft"
SIZES = {"replicas": 1, "maxReplicas": 3, "cpu": 1, "memory": "4Gi"}
VALUES: dict[str, Any] = {
    "targets": [SIZES | {"name": "demo", "model": "m", "answersPerReplica": 4}],
    "drafts": [SIZES | {"name": "demo-draft", "model": "d", "serves": ["demo"], "answersPerReplica": 3}],
    "prometheus": {"monitors": True},
}


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return rendered(VALUES)


@pytest.fixture(scope="module")
def gateway(manifests: list[Manifest]) -> Iterator[Process]:
    (deployment,) = [
        one for one in manifests if one["metadata"]["name"] == f"{FULLNAME}-gateway-demo" and "replicas" in one["spec"]
    ]
    line = " ".join(deployment["spec"]["template"]["spec"]["containers"][0]["args"])
    with running_pools(1, 1, 0) as pools:
        for name, worker in ((f"{TARGET}:7200", pools.targets[0]), (f"{DRAFT}:7100", pools.drafts[0])):
            assert line.count(name) == 1
            line = line.replace(name, worker.address)
        line = line.replace("--port=8000", "--port=0").replace("=8001", "=0").replace("=9000", "=0")
        limits = ["--max-running", str(MAX_RUNNING), "--max-queue-wait-s", "600"]
        pools.gateways.append(Process("gateway", [*line.split(), *limits]))
        yield pools.gateways[0]


@pytest.fixture(scope="module")
def prometheus(gateway: Process, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """With the labels that the Prometheus operator gives to what a ServiceMonitor finds."""
    labels = {"namespace": NAMESPACE, "service": f"{FULLNAME}-gateway-demo-metrics"}
    try:
        found = Prometheus(tmp_path_factory.mktemp("prometheus"), str(gateway.ready["metrics"]), labels)
    except NotFound as error:
        pytest.skip(str(error))
    with closing(found):
        yield found


class Keda:
    """As KEDA and the autoscaler behind it read a ScaledObject with one trigger of the metric type AverageValue."""

    def __init__(self, manifests: list[Manifest], name: str, prometheus: Prometheus) -> None:
        (spec,) = [one["spec"] for one in manifests if (one["kind"], one["metadata"]["name"]) == ("ScaledObject", name)]
        (trigger,) = spec["triggers"]
        self._spec, self._metadata, self._prometheus = spec, trigger["metadata"], prometheus

    def value(self) -> float:
        (line,) = self._prometheus.now(self._metadata["query"])  # it refuses several, and with ignoreNullValues none
        return line.values[0]

    def replicas(self) -> int:
        wanted = math.ceil(self.value() / float(self._metadata["threshold"]))
        return min(max(wanted, self._spec["minReplicaCount"]), self._spec["maxReplicaCount"])


@contextlib.asynccontextmanager
async def answers(address: str, number: int, *, speculation: bool = True) -> AsyncIterator[None]:
    """So many at once, each begun anew when it has ended."""

    async def ask(client: AsyncClient) -> None:
        while True:
            async with client.stream(
                "def ", max_tokens=800, ignore_eos=True, temperature=0.0, speculation=speculation, timeout_s=120
            ) as rounds:
                async for _ in rounds:
                    pass

    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(client)) for _ in range(number)]
        yield
        for task in tasks:
            task.cancel()


async def sizes(target: Keda, draft: Keda, values: tuple[int, int]) -> tuple[int, int]:
    """Replicas of both, once the queries return these values at the same time."""
    until_s, seen = time.monotonic() + 30, set()
    while time.monotonic() < until_s:
        seen.add(found := (target.value(), draft.value()))
        if found == values:
            return target.replicas(), draft.replicas()
        await asyncio.sleep(0.2)
    raise AssertionError(f"{values} did not come, but {sorted(seen)}")


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_each_pool_is_sized_by_the_answers_that_it_has(
    manifests: list[Manifest], gateway: Process, prometheus: Prometheus
) -> None:
    target, draft = (Keda(manifests, name, prometheus) for name in (TARGET, DRAFT))
    address = str(gateway.ready["grpc"])
    await until(lambda: prometheus.now("outrider_running"))
    assert await sizes(target, draft, (0, 0)) == (1, 1)
    async with answers(address, 2):
        assert await sizes(target, draft, (2, 2)) == (1, 1)
    async with answers(address, 10):  # four have a place and a draft, six wait for one
        assert await sizes(target, draft, (10, 4)) == (3, 2)
    async with answers(address, 4, speculation=False):
        assert await sizes(target, draft, (4, 0)) == (1, 1), "drafts are not asked for"
    assert await sizes(target, draft, (0, 0)) == (1, 1)
