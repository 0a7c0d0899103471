"""Places in the gateway's queue come back however a request is left. Whole answers: tests/e2e."""

from __future__ import annotations

import asyncio

import pytest

from gateway.coordinator import Answers
from gateway.generation import GenerationRequest
from outrider.wire.params import SamplingParams
from tests.unit.scripted_pool import served_model


async def test_a_handler_that_is_cancelled_while_it_leaves_gives_its_place_back() -> None:
    """As gRPC does when the client goes in the moment in which its answer ends."""
    changes: list[int] = []
    model = served_model({}, {})
    model.places.num_running = model.places.capacity  # nobody gets a place
    request = GenerationRequest("request", "target", (1,), SamplingParams())
    answers = Answers(model, (request, request), changes.append)

    async def handler() -> None:
        async with answers:
            await asyncio.sleep(60)

    task = asyncio.create_task(handler())
    await asyncio.sleep(0)
    for _ in range(2):  # the second finds the block waiting for the cancelled answers
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert sum(changes) == -2
