"""Places in the gateway's queue come back however a request is left. Whole answers: tests/e2e."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.coordinator import RunningChoices
from gateway.generation import GenerationRequest, OutputTimings, RoundOutput
from outrider.wire.errors import DeadlineExceeded
from outrider.wire.requests.params import SamplingParams
from outrider.wire.settings.config import GatewayConfig
from tests.unit.gateway.scripted_pool import connection_of, link_of, served_model


async def test_a_handler_that_is_cancelled_while_it_leaves_gives_its_place_back() -> None:
    """As gRPC does when the client goes in the moment in which its answer ends."""
    changes: list[int] = []
    model = served_model({}, {})
    model.places.num_running = model.places.capacity  # nobody gets a place
    request = GenerationRequest("request", "target", (1,), SamplingParams())
    answers = RunningChoices(model, 2, changes.append)

    async def handler() -> None:
        async with answers:
            answers.start((request, request))
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


class QuickDecoder:
    """All its rounds at once."""

    def __init__(self, *_: Any) -> None:
        pass

    async def run(self) -> AsyncIterator[RoundOutput]:
        for _ in range(100):
            yield RoundOutput((), "text", 0, 0, OutputTimings())


async def test_who_reads_slowly_gets_no_more_after_the_requests_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is free long before, so nothing else bounds what lies in memory for such readers."""
    monkeypatch.setattr("gateway.coordinator.Decoder", QuickDecoder)
    model = served_model(
        {"target": link_of(connection_of())}, {}, gateway=GatewayConfig(target="127.0.0.1:9", request_timeout_s=0.3)
    )
    changes: list[int] = []
    num_read = 0
    async with RunningChoices(model, 1, changes.append) as answers:
        answers.start((GenerationRequest("request", "target", (1,), SamplingParams()),))
        with pytest.raises(DeadlineExceeded, match="request_timeout_s"):
            async for _ in answers.stream():
                num_read += 1
                await asyncio.sleep(0.1)
    assert changes == [-1] and 1 <= num_read <= 3
