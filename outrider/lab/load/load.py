"""Sends requests over HTTP as users do, and records the outcome of each. For `outrider tune --price` and `benchmarks/`.

Streams are read as they arrive. A refused request is not sent again. Times are of the monotonic clock, which is the
same in all processes of a machine.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TEMPERATURES = (0.0, 0.8)
"""Default temperatures of a load. Request number i uses entry i modulo the number of entries."""
_MAX_QUOTED_BYTES = 200
"""Number of last bytes of a reply that an error quotes."""


@dataclass(frozen=True)
class Load:
    """A series of numbered requests to one server. Requests with the same number have the same prompt, parameters and
    seed.
    """

    url: str
    """Base URL of the server."""
    prompts: tuple[str, ...]
    """Prompts. Request number i has entry i modulo the number of entries."""
    max_tokens: int
    """Maximum number of output tokens of a request."""
    temperatures: tuple[float, ...] = TEMPERATURES
    """Sampling temperatures. Request number i has entry i modulo the number of entries."""
    ignore_eos: bool = True
    """Whether outputs continue after an end-of-sequence id, so that each has exactly `max_tokens` tokens."""
    shared_prefixes: bool = True
    """Whether requests may use cached prefixes of earlier prompts. False = the whole prompt of each is prefilled."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request's body, such as `model`. They override fields of the same name."""
    timeout_s: float = 120.0
    """Seconds without data from the server after which a request fails."""

    def client(self) -> httpx.AsyncClient:
        """Return an HTTP client for the server. Use it as `async with`."""
        return httpx.AsyncClient(
            base_url=self.url,
            timeout=self.timeout_s,
            headers={"Accept-Encoding": "identity"},  # a compressed stream would come in larger pieces
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    def body(self, number: int) -> dict[str, Any]:
        """Return the JSON body of request number `number`."""
        fields = {
            "prompt": self.prompts[number % len(self.prompts)],
            "max_tokens": self.max_tokens,
            "temperature": self.temperatures[number % len(self.temperatures)],
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if not self.shared_prefixes:
            fields["cache_salt"] = uuid.uuid4().hex
        return {**fields, **self.extra}


@dataclass(frozen=True)
class RequestOutcome:
    """Times and outcome of one request. The times are readings of the monotonic clock, in seconds."""

    sent_s: float
    """Monotonic time, in seconds, at which the request was sent."""
    first_s: float | None
    """Monotonic time, in seconds, at which the first token arrived; None = no token arrived."""
    ended_s: float
    """Monotonic time, in seconds, at which the stream of the reply ended."""
    status: int
    """HTTP status of the reply; 0 = no reply arrived."""
    retry_after: str | None
    """Header Retry-After of the reply; None = it has none."""
    fault: str | None = None
    """Description of what went wrong; None = the output is complete, or the request was refused (429)."""
    usage: Mapping[str, Any] | None = None
    """Field `usage` of the last message of the stream; None = there was none."""

    @property
    def is_complete(self) -> bool:
        """Whether the whole output arrived, without a fault."""
        return self.status == 200 and self.fault is None

    @property
    def is_refused(self) -> bool:
        """Whether the server refused the request because it was too busy (429)."""
        return self.status == 429

    @property
    def total_s(self) -> float:
        """Seconds from sending the request to the end of its stream."""
        return self.ended_s - self.sent_s

    @property
    def first_token_s(self) -> float:
        """Seconds from sending the request to its first token. Only for requests with a first token."""
        assert self.first_s is not None
        return self.first_s - self.sent_s

    @property
    def num_tokens(self) -> int:
        """Number of output tokens. Read it only if `is_complete`."""
        assert self.usage is not None
        return int(self.usage["completion_tokens"])


def _do_nothing(outcome: RequestOutcome) -> None:
    pass


async def keep_running(
    client: httpx.AsyncClient,
    load: Load,
    concurrency: int,
    numbers: Iterator[int],
    done: Callable[[RequestOutcome], None] = _do_nothing,
) -> list[RequestOutcome]:
    """Send the requests of `load` that have the given numbers, keeping `concurrency` of them running at a time. Return
    their outcomes in the order in which the requests ended.

    done: called with each outcome as soon as its request has ended.
    """
    outcomes: list[RequestOutcome] = []

    async def send_requests() -> None:
        for number in numbers:
            outcome = await send_request(client, load, number)
            outcomes.append(outcome)
            done(outcome)

    await asyncio.gather(*(send_requests() for _ in range(concurrency)))
    return outcomes


async def send_request(client: httpx.AsyncClient, load: Load, number: int) -> RequestOutcome:
    """Send request number `number`, read the stream of its reply and return the outcome. A failure of the request does
    not raise; the outcome's `fault` describes it.
    """
    sent_s = time.monotonic()
    first_s: float | None = None
    status = 0
    retry_after: str | None = None
    fault: str | None = None
    usage: Mapping[str, Any] | None = None
    received = bytearray()
    try:
        async with client.stream("POST", "/v1/completions", json=load.body(number)) as reply:
            status = reply.status_code
            retry_after = reply.headers.get("retry-after")
            async for data in reply.aiter_raw():
                received += data
                if first_s is None and b"data: " in received:  # comments may come before
                    first_s = time.monotonic()
    except httpx.HTTPError as error:
        fault = f"{type(error).__name__}: {error}"
    ended_s = time.monotonic()
    if status != 200:
        first_s = None
    if fault is None and status == 200:
        try:
            usage, fault = _parse_stream(bytes(received), load)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fault = f"its stream is none of completions: {type(error).__name__}: {error}"
    elif fault is None and status != 429:
        fault = f"{status}: {_end_of(received)}"
    return RequestOutcome(sent_s, first_s, ended_s, status, retry_after, fault, usage)


def _end_of(data: bytes | bytearray) -> str:
    return " ".join(data[-_MAX_QUOTED_BYTES:].decode("utf-8", "replace").split())


def _parse_stream(stream: bytes, load: Load) -> tuple[Mapping[str, Any] | None, str | None]:
    """Parse a streamed reply. Return (usage, fault); each is None if there is none."""
    # b"data: {...}\n\ndata: [DONE]\n\n": [b"{...}", b"[DONE]"]
    stream = stream.replace(b"\r\n", b"\n")
    events = list[bytes]()
    for event in stream.split(b"\n\n"):
        if event.startswith(b"data: "):
            events.append(event.removeprefix(b"data: "))
    if not events or events[-1] != b"[DONE]":
        return None, f"its stream ended with {_end_of(stream) or 'nothing'}"
    messages = [json.loads(event) for event in events[:-1]]
    reasons = []
    for message in messages:
        if "error" in message:
            return None, f"an error in its stream: {message['error']}"
        reasons += [choice.get("finish_reason") for choice in message["choices"]]
    usage = None
    if messages:
        usage = messages[-1].get("usage")
    return usage, _fault_of_reasons(reasons, load) or _fault_of_usage(usage, load)


def _fault_of_reasons(reasons: Sequence[str | None], load: Load) -> str | None:
    # [None, None, "stop"]: one finish reason, with the last piece
    found = list(filter(None, reasons))
    expected = "stop or length"
    is_expected = len(found) == 1 and reasons[-1] is not None
    if load.ignore_eos:
        expected = "length"
        is_expected = is_expected and found == ["length"]
    if is_expected:
        return None
    return f"finish reasons {found}, should be one, {expected}"


def _fault_of_usage(usage: Mapping[str, Any] | None, load: Load) -> str | None:
    if usage is None:
        is_expected = False
    elif load.ignore_eos:
        is_expected = usage["completion_tokens"] == load.max_tokens
    else:
        is_expected = True
    if is_expected:
        return None
    or_fewer = "" if load.ignore_eos else " or fewer"
    return f"usage {usage}, should be {load.max_tokens} tokens{or_fewer}"
