"""Who speaks to the gateway: the load, and beside it, in a process of its own, a victim's stream and a health probe."""

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import httpx

from tests.hostile.requests import BURST, COMPLETIONS, HostileRequest

PROBE_EVERY_S = 0.05
PROBE_TIMEOUT_S = 30.0
LEFT = 0
"""Status of a request whose client left before it was answered."""
NO_ANSWER = -1
"""Status of a request whose connection broke."""


@dataclass(frozen=True)
class Outcome:
    """What became of one request."""

    request: HostileRequest
    status: int
    taken_s: float
    text: str = ""
    """The beginning of an error."""


@dataclass
class Observed:
    """What the victim and the probe saw while they ran."""

    gaps_s: list[float] = field(default_factory=list)
    """Between two tokens of the victim's stream."""
    first_s: list[float] = field(default_factory=list)
    """To the first token of each of its answers."""
    probes_s: list[float] = field(default_factory=list)
    """Of each /healthz."""
    faults: list[str] = field(default_factory=list)


def client_of(url: str, key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits, trust_env=False)


async def send(client: httpx.AsyncClient, request: HostileRequest) -> Outcome:
    """Send one request and read its answer; leave when its client's patience ends."""
    began_s = time.monotonic()
    status, text = LEFT, ""
    try:
        async with asyncio.timeout(request.patience_s):
            headers = {"content-type": request.content_type}
            answer = await client.post(request.path, content=request.body, headers=headers)
            status = answer.status_code
            text = answer.text[:300] if status != 200 else ""
    except TimeoutError:
        pass
    except httpx.HTTPError as error:
        status, text = NO_ANSWER, f"{type(error).__name__}: {error}"
    return Outcome(request, status, time.monotonic() - began_s, text)


async def send_all(url: str, key: str, requests: Sequence[HostileRequest], rate: float) -> list[Outcome]:
    """Send `rate` requests a second in bursts, whatever becomes of those before, and wait for all."""
    tasks = []
    async with client_of(url, key) as client:
        began_s = time.monotonic()
        for number, request in enumerate(requests):
            await asyncio.sleep(max(0.0, began_s + number // BURST * BURST / rate - time.monotonic()))
            tasks.append(asyncio.create_task(send(client, request)))
        return list(await asyncio.gather(*tasks))


@contextlib.contextmanager
def observed(url: str, key: str) -> Iterator[Observed]:
    """Run a victim's stream and a probe beside the block. What is yielded is filled when the block ends."""
    found = Observed()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_observe, args=(url, key, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()  # the victim has its first token
        yield found
        ours.send("stop")
        vars(found).update(vars(ours.recv()))
    finally:
        ours.close()
        process.join(10)
        process.kill()


def _observe(url: str, key: str, connection: Connection) -> None:
    asyncio.run(_watch(url, key, connection))


async def _watch(url: str, key: str, connection: Connection) -> None:
    found, has_token = Observed(), asyncio.Event()
    async with client_of(url, key) as client:
        tasks = [asyncio.create_task(_stream(client, found, has_token)), asyncio.create_task(_probe(client, found))]
        await has_token.wait()
        found.probes_s.clear()
        connection.send("running")
        await asyncio.to_thread(connection.recv)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    connection.send(found)


async def _stream(client: httpx.AsyncClient, found: Observed, has_token: asyncio.Event) -> None:
    """Read one answer after the other. Without drafts: an event is a token."""
    for number in itertools.count():
        body = {"prompt": f"{number}: once upon a time", "max_tokens": 200, "ignore_eos": True, "stream": True}
        body |= {"temperature": 0, "speculation": {"enabled": False}}
        began_s = last_s = time.monotonic()
        is_first = True
        try:
            async with client.stream("POST", COMPLETIONS, json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")[:200]
                    found.faults.append(f"victim: {answer.status_code}: {text}")
                    await asyncio.sleep(0.2)
                    continue
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now_s = time.monotonic()
                    if is_first:
                        found.first_s.append(now_s - began_s)
                        has_token.set()
                    else:
                        found.gaps_s.append(now_s - last_s)
                    if "error" in json.loads(line[6:]):
                        found.faults.append(f"victim: {line[:200]}")
                    is_first, last_s = False, now_s
        except httpx.HTTPError as error:
            found.faults.append(f"victim: {type(error).__name__}: {error}")
            await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            found.gaps_s.append(time.monotonic() - last_s)  # what it still waited for
            raise


async def _probe(client: httpx.AsyncClient, found: Observed) -> None:
    while True:
        began_s = time.monotonic()
        try:
            answer = await client.get("/healthz", timeout=PROBE_TIMEOUT_S)
            if answer.status_code != 200:
                found.faults.append(f"/healthz: {answer.status_code}")
        except httpx.HTTPError as error:
            found.faults.append(f"/healthz: {type(error).__name__}")
        except asyncio.CancelledError:
            found.probes_s.append(time.monotonic() - began_s)
            raise
        found.probes_s.append(time.monotonic() - began_s)
        await asyncio.sleep(max(0.0, began_s + PROBE_EVERY_S - time.monotonic()))
