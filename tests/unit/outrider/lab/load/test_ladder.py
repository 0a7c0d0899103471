"""Both sides of a load, with and without speculation, in turn."""

import asyncio
import json
from typing import Any

import httpx

from outrider.lab.load.figures import MIN_BATCHES, LoadFigures
from outrider.lab.load.ladder import LadderPlan, climb
from tests.unit.outrider.lab.load.completions import LOAD, USAGE, Body, piece, stream


def test_both_sides_get_the_same_requests_alternately() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, stream=Body(stream(piece("stop"), USAGE)))

    async def climbed() -> list[LoadFigures]:
        async with httpx.AsyncClient(base_url="http://a", transport=httpx.MockTransport(answer)) as client:
            return [figures async for figures in climb(client, LOAD, LadderPlan([1, 2], 0.0), lambda *_: None)]

    one, two = asyncio.run(climbed())
    assert (one.concurrency, two.concurrency) == (1, 2)
    assert one.gain is not None and one.gain.interval is not None and one.plain_tokens_per_s > 0
    sides = [("speculation" in body, body["seed"]) for body in bodies if body["seed"] is not None]
    first = sides[2 : 2 + 4 * MIN_BATCHES]  # behind one unmeasured request of each side
    for turn in range(MIN_BATCHES):
        own = first[4 * turn : 4 * turn + 4]
        plain_first = turn % 2 == 1
        assert own == [(side, 2 * turn + place) for side in (plain_first, not plain_first) for place in (0, 1)]
