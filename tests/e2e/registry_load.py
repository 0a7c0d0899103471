"""A system with a registry from outside: its pools, its members, and clients that must not notice what changes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Protocol

import grpc
import grpc.aio

from outrider.client import AsyncClient
from outrider.v1 import registry_pb2, registry_pb2_grpc
from tests.e2e.streams import PROMPT
from tests.stack import Process


def sizes(registry: str, pool: str, count: int | None = None) -> registry_pb2.PoolSize:
    with grpc.insecure_channel(registry) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        reply: registry_pb2.ScaleReply = stub.Scale(registry_pb2.ScaleRequest(pool=pool, num_workers=count), timeout=10)
        return reply.pools[0]


async def members(registry: str) -> list[registry_pb2.Worker]:
    """As a gateway hears it when it joins."""
    async with grpc.aio.insecure_channel(registry) as channel:
        call = registry_pb2_grpc.RegistryServiceStub(channel).Join()
        found: registry_pb2.WorkerList = await asyncio.wait_for(call.read(), 10)
        call.cancel()
        return list(found.workers)


async def until_serving(registry: str, pool: str, count: int, timeout_s: float = 240.0) -> None:
    """All that are wanted, and no others."""
    give_up = time.monotonic() + timeout_s
    while True:
        size = await asyncio.to_thread(sizes, registry, pool)
        if (size.num_serving, size.num_starting, size.num_draining) == (count, 0, 0):
            return
        assert time.monotonic() < give_up, size
        await asyncio.sleep(0.2)


class Load:
    """Clients that ask for the same greedy answer again and again, one after the other each."""

    def __init__(self, max_tokens: int = 96) -> None:
        self._max_tokens = max_tokens
        self.texts: list[str] = []
        self.errors: list[Exception] = []
        self.num_drafted = 0
        self.is_over = False

    async def ask(self, client: AsyncClient) -> None:
        while not self.is_over:
            try:
                answer = await client.generate(PROMPT, max_tokens=self._max_tokens, temperature=0.0, ignore_eos=True)
            except Exception as error:
                self.errors.append(error)
                return
            self.texts.append(answer.choices[0].text)
            self.num_drafted += answer.usage.num_draft_tokens

    async def drafted_again(self, timeout_s: float = 120.0) -> None:
        """Answers that begin from now on have drafts."""
        before, give_up = self.num_drafted, time.monotonic() + timeout_s
        while self.num_drafted < before + 200:
            assert time.monotonic() < give_up and not self.errors, (self.num_drafted - before, self.errors)
            await asyncio.sleep(0.1)

    def assert_whole(self) -> None:
        """Every request was answered, and with the same text: no token was lost, repeated or another one."""
        assert self.errors == []
        assert len(self.texts) >= 4
        assert len(set(self.texts)) == 1


class Asker(Protocol):
    """What clients of one sort ask, again and again until it is over, and what they see."""

    is_over: bool

    async def ask(self, client: AsyncClient) -> None: ...


@contextlib.asynccontextmanager
async def asked_at(gateway: str, asker: Asker, num_clients: int, timeout_s: float = 120.0) -> AsyncIterator[None]:
    """With so many clients asking all the time, and until each has ended. gateway: its gRPC address."""
    async with AsyncClient(gateway, timeout_s=timeout_s) as client:
        asking = [asyncio.create_task(asker.ask(client)) for _ in range(num_clients)]
        try:
            yield
        finally:
            asker.is_over = True
            await asyncio.gather(*asking)


@contextlib.asynccontextmanager
async def asked_through(registry: str, asker: Asker, num_clients: int, *gateway_args: str) -> AsyncIterator[None]:
    """The same through a gateway that joined the registry, and ends with it."""
    args = ["--registry", registry, "--port", "0", "--grpc-port", "0", *gateway_args]
    gateway = await asyncio.to_thread(Process, "gateway", args)
    try:
        async with asked_at(str(gateway.ready["grpc"]), asker, num_clients):
            yield
    finally:
        await asyncio.to_thread(gateway.stop)


@contextlib.asynccontextmanager
async def under_load(registry: str, num_clients: int = 3, gateway_args: tuple[str, ...] = ()) -> AsyncIterator[Load]:
    """With drafts before and after."""
    load = Load()
    async with asked_through(registry, load, num_clients, *gateway_args):
        await load.drafted_again()
        yield load
        await load.drafted_again()
