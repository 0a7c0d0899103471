"""Send requests over HTTP as users do, from a process of its own: a number at once, or a number a second.

Streams are read as they come; a refused request is not sent again. Times are of the monotonic clock, which all
processes of a machine share.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import random
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

REQUEST_TIMEOUT_S = 120.0
TEMPERATURES = (0.0, 0.8)
"""Temperatures that requests take in turn."""


@dataclass(frozen=True)
class Load:
    """A kind of request, and where to send it."""

    url: str
    """Base URL of the gateway."""
    prompts: tuple[str, ...]
    """Prompts that requests take in turn, from the first again."""
    max_tokens: int
    seed: int = 0
    shared_prefixes: bool = True
    """Whether a prompt that came before may be found in the workers' caches."""


@dataclass(frozen=True)
class Asked:
    """One request and its outcome, with monotonic times."""

    sent_s: float
    first_s: float | None
    """When its first token came."""
    ended_s: float
    status: int
    """HTTP status; 0 when there was none."""
    retry_after: str | None
    fault: str | None = None
    """Why it ended in another way than with all of its tokens or a refusal."""

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
        """Seconds to the first token, which must have come."""
        assert self.first_s is not None
        return self.first_s - self.sent_s


def closed_loop(load: Load, concurrency: int, seconds: float) -> list[Asked]:
    """Keep `concurrency` requests running until the time is up; wait for those that run then."""
    return asyncio.run(_closed_loop(load, concurrency, seconds))


def open_loop(load: Load, phases: Sequence[tuple[float, float]]) -> list[list[Asked]]:
    """Send Poisson arrivals, phase after phase of (requests a second, seconds), whatever becomes of those before."""
    return asyncio.run(_open_loop(load, phases))


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in another process, so that the load does not burden the watching one, and return its result."""
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
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    if not load.shared_prefixes:
        body["cache_salt"] = uuid.uuid4().hex
    sent_s, first_s, status, retry_after, fault = time.monotonic(), None, 0, None, None
    received = bytearray()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            status, retry_after = reply.status_code, reply.headers.get("retry-after")
            async for data in reply.aiter_raw():
                first_s = first_s or time.monotonic()
                received += data
    except httpx.HTTPError as error:
        fault = f"{type(error).__name__}: {error}"
    ended_s = time.monotonic()
    if fault is None and status == 200:
        fault = what_is_missing(bytes(received), load.max_tokens)
    elif fault is None and status != 429:
        fault = f"{status}: {bytes(received[-200:])!r}"
    return Asked(sent_s, first_s if status == 200 else None, ended_s, status, retry_after, fault)


def what_is_missing(stream: bytes, num_tokens: int) -> str | None:
    """Return what a streamed answer of num_tokens tokens lacks; None when it is whole."""
    *events, last = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n") if event] or [b""]
    if last != b"[DONE]":
        return f"its stream ended with {last[-200:]!r}"
    messages = [json.loads(event) for event in events]
    if errors := [message["error"] for message in messages if "error" in message]:
        return f"an error in its stream: {errors[0]}"
    reasons = [choice.get("finish_reason") for message in messages for choice in message["choices"]]
    usage = messages[-1].get("usage") if messages else None
    if reasons[-1:] != ["length"] or any(reasons[:-1]):
        return f"finish reasons {[reason for reason in reasons if reason]}, should be one, length"
    if usage is None or usage["completion_tokens"] != num_tokens:
        return f"usage {usage}, should be {num_tokens} tokens"
    return None
