"""The load of `outrider tune --price` and `benchmarks/`: which outputs count as complete, and both sides in turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from outrider.lab.load.figures import MIN_TURNS, LoadFigures
from outrider.lab.load.ladder import Plan, climb
from outrider.lab.load.load import Load, RequestOutcome, send_request

LOAD = Load("http://a", ("one", "two"), max_tokens=2, ignore_eos=False)
USAGE = {"choices": [], "usage": {"completion_tokens": 2}}


class Body(httpx.AsyncByteStream):
    def __init__(self, text: str) -> None:
        self.text = text

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.text.encode()


def piece(reason: str | None) -> dict[str, Any]:
    return {"choices": [{"finish_reason": reason}]}


def stream(*events: dict[str, Any], line_end: str = "\n") -> str:
    told = [*map(json.dumps, events), "[DONE]"]
    return "".join(f"data: {event}{2 * line_end}" for event in told)


def asked(status: int, content: str, load: Load = LOAD) -> RequestOutcome:
    async def ask_once() -> RequestOutcome:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, stream=Body(content)))
        async with httpx.AsyncClient(base_url="http://a", transport=transport) as client:
            return await send_request(client, load, 0)

    return asyncio.run(ask_once())


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_complete_output(line_end: str) -> None:
    found = asked(200, stream(piece(None), piece("stop"), USAGE, line_end=line_end))
    assert found.whole and found.num_tokens == 2 and 0 <= found.first_token_s <= found.total_s


@pytest.mark.parametrize(
    ("status", "content", "fault"),
    [
        (500, "out of order", "500: out of order"),
        (200, stream(piece("stop"))[:-8], "its stream ended with"),
        (200, stream(piece(None), USAGE), "finish reasons [], should be one, stop or length"),
        (200, stream(piece("stop"), piece("stop"), USAGE), "finish reasons ['stop', 'stop']"),
        (200, stream(piece(None), {"error": "lost"}), "an error in its stream: lost"),
        (200, stream(piece("stop")), "usage None, should be 2 tokens or fewer"),
        (200, "data: no\n\ndata: [DONE]\n\n", "its stream is none of completions"),
    ],
)
def test_what_is_wrong_with_an_output(status: int, content: str, fault: str) -> None:
    found = asked(status, content)
    assert not found.whole and fault in str(found.fault)


def test_a_refusal_is_no_fault() -> None:
    found = asked(429, "later")
    assert found.refused and found.fault is None and not found.whole


def test_both_sides_get_the_same_requests_in_turn() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, stream=Body(stream(piece("stop"), USAGE)))

    async def climbed() -> list[LoadFigures]:
        async with httpx.AsyncClient(base_url="http://a", transport=httpx.MockTransport(answer)) as client:
            return [figures async for figures in climb(client, LOAD, Plan([1, 2], 0.0), lambda *_: None)]

    one, two = asyncio.run(climbed())
    assert (one.concurrency, two.concurrency) == (1, 2)
    assert one.gain is not None and one.gain.interval is not None and one.plain_tokens_per_s > 0
    sides = [("speculation" in body, body["seed"]) for body in bodies if body["seed"] is not None]
    first = sides[2 : 2 + 4 * MIN_TURNS]  # behind one unmeasured request of each side
    for turn in range(MIN_TURNS):
        own = first[4 * turn : 4 * turn + 4]
        plain_first = turn % 2 == 1
        assert own == [(side, 2 * turn + place) for side in (plain_first, not plain_first) for place in (0, 1)]
