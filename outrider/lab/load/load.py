"""Send requests over HTTP as users do, and keep what became of each. The load of `outrider bench` and `benchmarks/`.

Streams are read as they come; a refused request is not sent again. Times are of the monotonic clock, which all
processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

TEMPERATURES = (0.0, 0.8)
"""Temperatures of a load that says none; its requests take them in turn."""


@dataclass(frozen=True)
class Load:
    """A kind of request, and where to send it. Those of a number are alike, seed included."""

    url: str
    """Base URL of the server."""
    prompts: tuple[str, ...]
    """Prompts that requests take in turn, from the first again."""
    max_tokens: int
    temperatures: tuple[float, ...] = TEMPERATURES
    ignore_eos: bool = True
    """Whether each answer has to have max_tokens tokens."""
    shared_prefixes: bool = True
    """Whether a prompt that came before may be found in the workers' caches."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the body, such as `model`."""
    timeout_s: float = 120.0
    headers: Mapping[str, str] = field(default_factory=dict)
    verify: ssl.SSLContext | bool = True

    def client(self) -> httpx.AsyncClient:
        """Return a client of the server. Use as `async with`."""
        return httpx.AsyncClient(
            base_url=self.url,
            timeout=self.timeout_s,
            headers={"Accept-Encoding": "identity", **self.headers},  # streams are read as they come
            verify=self.verify,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    def body(self, number: int) -> dict[str, Any]:
        """Return the fields of a request."""
        asked = {
            "prompt": self.prompts[number % len(self.prompts)],
            "max_tokens": self.max_tokens,
            "temperature": self.temperatures[number % len(self.temperatures)],
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if not self.shared_prefixes:
            asked["cache_salt"] = uuid.uuid4().hex
        return {**asked, **self.extra}


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
    """Why it ended in another way than with its whole answer or a refusal."""
    usage: Mapping[str, Any] | None = None
    """As the server told it with the last token."""

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

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, which must be whole."""
        assert self.usage is not None
        return int(self.usage["completion_tokens"])


async def keep_running(
    client: httpx.AsyncClient,
    load: Load,
    concurrency: int,
    numbers: Iterator[int],
    done: Callable[[Asked], None] = lambda asked: None,
) -> list[Asked]:
    """Keep `concurrency` requests running while there are numbers; wait for the last. done: called after each."""
    asked: list[Asked] = []

    async def one_after_the_other() -> None:
        for number in numbers:
            asked.append(await ask(client, load, number))
            done(asked[-1])

    await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
    return asked


async def ask(client: httpx.AsyncClient, load: Load, number: int) -> Asked:
    """Send one request and read its stream. Whatever goes wrong is in what it returns."""
    sent_s, first_s, status, retry_after, fault, usage = time.monotonic(), None, 0, None, None, None
    received = bytearray()
    try:
        async with client.stream("POST", "/v1/completions", json=load.body(number)) as reply:
            status, retry_after = reply.status_code, reply.headers.get("retry-after")
            async for data in reply.aiter_raw():
                received += data
                if first_s is None and b"data: " in received:  # comments may come before
                    first_s = time.monotonic()
    except httpx.HTTPError as error:
        fault = f"{type(error).__name__}: {error}"
    ended_s = time.monotonic()
    if fault is None and status == 200:
        try:
            usage, fault = _read(bytes(received), load)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fault = f"its stream is none of completions: {type(error).__name__}: {error}"
    elif fault is None and status != 429:
        fault = f"{status}: {_line(received[-200:])}"
    return Asked(sent_s, first_s if status == 200 else None, ended_s, status, retry_after, fault, usage)


def _line(data: bytes | bytearray) -> str:
    return " ".join(data.decode("utf-8", "replace").split())


def _read(stream: bytes, load: Load) -> tuple[Mapping[str, Any] | None, str | None]:
    """Return a streamed answer's usage and what it lacks, None when it is whole."""
    stream = stream.replace(b"\r\n", b"\n")
    events = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n") if event.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        return None, f"its stream ended with {_line(stream[-200:]) or 'nothing'}"
    messages = [json.loads(event) for event in events[:-1]]
    if errors := [message["error"] for message in messages if "error" in message]:
        return None, f"an error in its stream: {errors[0]}"
    reasons = [choice.get("finish_reason") for message in messages for choice in message["choices"]]
    usage = messages[-1].get("usage") if messages else None
    if not reasons or reasons[-1] is None or any(reasons[:-1]) or (load.ignore_eos and reasons[-1] != "length"):
        wanted = "length" if load.ignore_eos else "stop or length"
        return usage, f"finish reasons {[reason for reason in reasons if reason]}, should be one, {wanted}"
    if usage is None or (load.ignore_eos and usage["completion_tokens"] != load.max_tokens):
        return usage, f"usage {usage}, should be {load.max_tokens} tokens{'' if load.ignore_eos else ' or fewer'}"
    return usage, None
