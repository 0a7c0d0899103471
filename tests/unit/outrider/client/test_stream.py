"""Calls that end before they are over."""

import asyncio
import gc
import time

import pytest

from outrider.client import AsyncClient
from outrider.v1 import gateway_pb2 as pb
from outrider.wire import errors
from tests.unit.outrider.client.connected import FakeTransport
from tests.unit.outrider.client.scripted_gateway import TEXT, ScriptedGateway, eventually, hanging, rounds


async def test_leaving_the_block_cancels_at_the_server(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    async with AsyncClient(gateway.address) as client:
        async with client.stream("hello") as stream:
            async for round_ in stream:
                assert round_.text_delta == " the quick red"
                assert not gateway.cancelled.is_set()
                break
        assert await asyncio.to_thread(eventually, gateway.cancelled)
        assert [round_ async for round_ in stream] == []
        await stream.aclose()


async def test_cancelling_the_task_cancels_at_the_server(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    async with AsyncClient(gateway.address) as client:
        task = asyncio.create_task(client.generate("hello"))
        assert await asyncio.to_thread(eventually, gateway.asked)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(eventually, gateway.cancelled)


async def test_a_dropped_stream_cancels_at_the_server(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    async with AsyncClient(gateway.address) as client:
        stream = client.stream("hello")
        await anext(stream)
        del stream
        gc.collect()
        assert await asyncio.to_thread(eventually, gateway.cancelled)


async def test_closing_the_client_ends_its_calls_with_an_error(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    client = AsyncClient(gateway.address)
    task = asyncio.create_task(client.generate("hello"))
    assert await asyncio.to_thread(eventually, gateway.asked)
    await client.aclose()
    await client.aclose()
    with pytest.raises(errors.OutriderError, match="closed while this call was in progress"):
        await task
    with pytest.raises(errors.OutriderError, match="client is closed"):
        await client.models()


async def test_the_deadline_ends_the_call_on_both_sides(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging())
    async with AsyncClient(gateway.address) as client:
        started = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded, match=r"after 0\.3 s"):
            await client.generate("hello", timeout_s=0.3)
        assert 0.25 < time.monotonic() - started < 3
    assert await asyncio.to_thread(eventually, gateway.cancelled)


async def test_the_clients_deadline_holds_unless_the_call_has_its_own(gateway: ScriptedGateway) -> None:
    gateway.scripts.append(hanging(0))
    async with AsyncClient(gateway.address, timeout_s=0.2) as client:
        with pytest.raises(errors.DeadlineExceeded):
            await client.generate("hello")
        gateway.scripts.clear()  # a call that was slow to begin may have left it
        assert (await client.generate("hello", timeout_s=None)).text == TEXT


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "without an answer"),
        (rounds()[:2], "before choice 0 had finished"),
        ([pb.GenerateResponse(tokens=[pb.GeneratedToken(id=1, kind=99)])], "unknown token kind 99"),  # type: ignore[arg-type]
        ([pb.GenerateResponse(finish_reason=99)], "unknown finish reason 99"),  # type: ignore[arg-type]
    ],
)
async def test_an_answer_that_breaks_the_contract_is_an_error(
    messages: list[pb.GenerateResponse], complaint: str
) -> None:
    with pytest.raises(errors.OutriderError, match=complaint):
        await AsyncClient(transport=FakeTransport(list(messages))).generate("hello")
