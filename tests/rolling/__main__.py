"""`make rolling-test`: two gateways behind a TCP balancer are replaced one after the other, as a Deployment does it,
while 16 streams and short requests go over kept connections, HTTP (OpenAI's client) and gRPC (our SDK).

Prints what clients saw of it. Exit code 1 when a request is lost that a client could make again, or a text is another.
"""

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai

from outrider.client import AsyncClient
from tests.e2e.streams import PROMPT
from tests.forked import REPO
from tests.rolling.balancer import Backend, Balancer
from tests.stack import Process, running_pools

NUM_STREAMS = 8
"""At once, of each protocol."""
MAX_TOKENS = 600
POLL_INTERVAL_S = 0.05
UNDER_WAY_S = 3.0
"""Of load before, between and after the replacements."""
TIMEOUT_S = 300.0
GATEWAY_ARGS = ("--drain-timeout-s", "60")
LOGS = REPO / ".work" / "rolling-test"


@dataclass
class Seen:
    """What the clients of one protocol saw."""

    texts: Counter[str] = field(default_factory=Counter)
    num_short: int = 0
    longest_short_s: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    """Attempts that failed and were made again by the client itself, by what they met. HTTP only."""
    lost: list[str] = field(default_factory=list)
    """Requests that failed in the end."""


class Load:
    """Streams and short requests of one protocol, one after the other each, until it is over."""

    def __init__(self, stream: Callable[[], Awaitable[str]], short: Callable[[], Awaitable[object]]) -> None:
        self.seen = Seen()
        self.is_over = False
        self._stream = stream
        self._short = short

    async def run(self) -> None:
        await asyncio.gather(*(self._ask() for _ in range(NUM_STREAMS)), self._poll())

    async def _ask(self) -> None:
        while not self.is_over:
            try:
                self.seen.texts[await self._stream()] += 1
            except Exception as error:
                self.seen.lost.append(f"stream: {type(error).__name__}: {error}")

    async def _poll(self) -> None:
        while not self.is_over:
            began_s = time.monotonic()
            try:
                await self._short()
                self.seen.num_short += 1
            except Exception as error:
                self.seen.lost.append(f"short request: {type(error).__name__}: {error}")
            self.seen.longest_short_s = max(self.seen.longest_short_s, time.monotonic() - began_s)
            await asyncio.sleep(POLL_INTERVAL_S)


class CountingTransport(httpx.AsyncHTTPTransport):
    """Counts the attempts of OpenAI's client that failed."""

    def __init__(self, refused: Counter[str]) -> None:
        super().__init__()
        self._refused = refused

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            answer = await super().handle_async_request(request)
        except httpx.TransportError as error:
            self._refused[type(error).__name__] += 1
            raise
        if answer.status_code != 200:
            self._refused[f"{answer.status_code}, connection: {answer.headers.get('connection')}"] += 1
        return answer


def http_load(client: openai.AsyncOpenAI, model: str) -> Load:
    async def stream() -> str:
        extra = {"ignore_eos": True}
        chunks = await client.completions.create(
            model=model, prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0.0, stream=True, extra_body=extra
        )
        return "".join([chunk.choices[0].text async for chunk in chunks if chunk.choices])

    return Load(stream, lambda: client.models.list())


def grpc_load(client: AsyncClient) -> Load:
    async def stream() -> str:
        answer = await client.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        return answer.choices[0].text

    return Load(stream, client.models)


def backend_of(gateway: Process) -> Backend:
    return Backend(str(gateway.ready["http"]), str(gateway.ready["grpc"]))


async def replace(balancer: Balancer, number: int, gateway: Process) -> Process:
    """Start a gateway beside this one, then end this one. Return the new one."""
    new = await asyncio.to_thread(Process, "gateway", gateway.args, LOGS / f"new-{number}.log")
    await balancer.add(backend_of(new))
    old = balancer.backends[0]
    began_s = time.monotonic()
    gateway.end()
    code = await asyncio.to_thread(gateway.popen.wait, 90)
    balancer.backends.remove(old)
    took_s = time.monotonic() - began_s
    say(f"gateway {number} replaced: the old one drained for {took_s:.1f} s and ended with {code}")
    assert code == 0
    return new


async def roll(gateways: list[Process], model: str) -> list[Load]:
    """Return the loads as they were when all was over. gateways: those that run, for whoever ends them."""
    async with Balancer() as balancer, contextlib.AsyncExitStack() as stack:
        for gateway in gateways:
            await balancer.add(backend_of(gateway))
        refused: Counter[str] = Counter()
        http = await stack.enter_async_context(
            openai.AsyncOpenAI(
                base_url=f"http://{balancer.addresses['http']}/v1",
                api_key="none",
                timeout=TIMEOUT_S,
                http_client=httpx.AsyncClient(transport=CountingTransport(refused)),
            )
        )
        grpc = await stack.enter_async_context(AsyncClient(balancer.addresses["grpc"], timeout_s=TIMEOUT_S))
        loads = [http_load(http, model), grpc_load(grpc)]
        loads[0].seen.refused = refused
        running = [asyncio.create_task(load.run()) for load in loads]
        await asyncio.sleep(UNDER_WAY_S)
        for number in range(len(gateways)):
            gateways.append(await replace(balancer, number, gateways[number]))
            await asyncio.sleep(UNDER_WAY_S)
        for load in loads:
            load.is_over = True
        await asyncio.gather(*running)
        return loads


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    for log in LOGS.glob("*.log"):
        log.unlink()
    say(f"logs of all parts: {LOGS}")
    with running_pools(1, 1, 2, gateway_args=GATEWAY_ARGS, log_folder=Path(LOGS)) as pools:
        model = pools.stack().model
        gateways = pools.gateways[:]
        try:
            loads = asyncio.run(roll(gateways, model))
        finally:
            for gateway in gateways:
                gateway.stop()
    for name, load in zip(("HTTP", "gRPC"), loads, strict=True):
        seen = load.seen
        say(
            f"{name}: {seen.texts.total()} streams, {seen.num_short} short requests of at most "
            f"{seen.longest_short_s:.2f} s; {len(seen.lost)} lost; attempts that failed and were made again: "
            f"{dict(seen.refused) or 'none seen'}"
        )
        for line in seen.lost[:5]:
            say(f"  lost: {line}")
    texts = {text for load in loads for text in load.seen.texts}
    if len(texts) > 1:
        say(f"{len(texts)} different texts of one greedy prompt")
    return int(len(texts) != 1 or any(load.seen.lost for load in loads))


if __name__ == "__main__":
    sys.exit(main())
