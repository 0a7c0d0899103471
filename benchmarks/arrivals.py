"""Requests over HTTP as users send them, from a process of its own: so many at once, or so many a second.

Streams are read as they come; nobody asks again when refused. Times are of the monotonic clock, which all processes of
a machine share.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

REQUEST_TIMEOUT_S = 120.0
TEMPERATURES = (0.0, 0.8)
"""In turn."""


@dataclass(frozen=True)
class Load:
    """What each request asks for."""

    url: str
    """Base URL of the gateway."""
    prompts: tuple[str, ...]
    """In turn, from the first again."""
    max_tokens: int
    seed: int = 0


@dataclass(frozen=True)
class Asked:
    """One request. Monotonic times."""

    sent_s: float
    first_s: float | None
    """When its first token came."""
    ended_s: float
    status: int
    """Of HTTP; 0 when there was none."""
    retry_after: str | None
    fault: str | None = None
    """Why it ended otherwise than with its last token or a refusal."""

    @property
    def whole(self) -> bool:
        return self.status == 200 and self.fault is None

    @property
    def refused(self) -> bool:
        return self.status == 429

    @property
    def total_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def first_token_s(self) -> float:
        """Raises TypeError for one that has none."""
        assert self.first_s is not None
        return self.first_s - self.sent_s


def closed_loop(load: Load, concurrency: int, seconds: float) -> list[Asked]:
    """`concurrency` requests at any time, until the time is up; those that run then are waited for."""
    return asyncio.run(_closed_loop(load, concurrency, seconds))


def open_loop(load: Load, phases: Sequence[tuple[float, float]]) -> list[list[Asked]]:
    """Poisson arrivals, phase after phase of (requests a second, seconds), whatever becomes of those before."""
    return asyncio.run(_open_loop(load, phases))


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns there: the load's work is not that of the process that watches."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _client(load: Load) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=load.url,
        timeout=REQUEST_TIMEOUT_S,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        trust_env=False,
    )


async def _closed_loop(load: Load, concurrency: int, seconds: float) -> list[Asked]:
    numbers, asked = itertools.count(), []
    stop_s = time.monotonic() + seconds
    async with _client(load) as client:

        async def one_after_the_other() -> None:
            while time.monotonic() < stop_s:
                asked.append(await _ask(client, load, next(numbers)))

        await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
    return asked


async def _open_loop(load: Load, phases: Sequence[tuple[float, float]]) -> list[list[Asked]]:
    dice, numbers = random.Random(load.seed), itertools.count()
    tasks: list[list[asyncio.Task[Asked]]] = []
    async with _client(load) as client:
        next_s = time.monotonic()
        for rate, seconds in phases:
            tasks.append([])
            end_s = next_s + seconds
            while (next_s := next_s + dice.expovariate(rate)) < end_s:
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                tasks[-1].append(asyncio.create_task(_ask(client, load, next(numbers))))
            next_s = end_s
        return [list(await asyncio.gather(*phase)) for phase in tasks]


async def _ask(client: httpx.AsyncClient, load: Load, number: int) -> Asked:
    body = {
        "prompt": load.prompts[number % len(load.prompts)],
        "max_tokens": load.max_tokens,
        "temperature": TEMPERATURES[number % len(TEMPERATURES)],
        "seed": number,
        "stream": True,
        "ignore_eos": True,
    }
    sent_s, first_s, status, retry_after, fault, tail = time.monotonic(), None, 0, None, None, b""
    try:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            status, retry_after = reply.status_code, reply.headers.get("retry-after")
            async for data in reply.aiter_raw():
                first_s = first_s or time.monotonic()
                tail = (tail + data)[-400:]
        if status == 200 and (not tail.endswith(b"data: [DONE]\n\n") or b'"error"' in tail):
            fault = f"its stream ended with {tail[-200:]!r}"
        elif status not in (200, 429):
            fault = f"{status}: {tail[-200:]!r}"
    except httpx.HTTPError as error:
        fault = f"{type(error).__name__}: {error}"
    return Asked(sent_s, first_s if status == 200 else None, time.monotonic(), status, retry_after, fault)
